"""Figures, each drawn from plain data or a report and written as PNG."""
