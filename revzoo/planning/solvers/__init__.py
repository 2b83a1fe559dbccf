"""Exact searches for the best schedule. They work on bytes and costs (`problem.py`) and know neither torch nor a model."""

from typing import Literal

Solver = Literal["timeline", "knapsack"]  # as users name them
