"""What people see: tables and figures of reports, and the progress of a run. No other package imports rich or matplotlib."""
