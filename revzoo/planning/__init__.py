"""Choosing the mode of every step: exact searches over a description in bytes and costs, which knows no tensors."""
