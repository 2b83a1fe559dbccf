"""What people see: tables and figures of reports, and the progress of a run. Only this package imports rich and matplotlib."""
