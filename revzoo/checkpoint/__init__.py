"""Weights on disk: reading and writing files, and the index of those that ship."""
