"""Reports drawn as pictures."""
