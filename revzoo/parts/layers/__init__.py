"""Building blocks that several parts share. A spec cannot name them."""
