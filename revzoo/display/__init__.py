"""What people see: tables and figures of reports, and the progress of a run. Only it and `graph` import rich or plot."""
