"""Reports laid out as tables for a terminal."""
