"""Weights on disk: files of weights, the index of shipped weights, and checkpoints of other libraries."""
