"""Exact searches for the best schedule. They work on bytes and costs (`problem.py`) and know neither torch nor a model."""
