"""Networks divided over processes."""
