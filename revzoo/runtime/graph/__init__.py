"""Captured graphs, run so that backward recovers what it needs from a few kept tensors."""
