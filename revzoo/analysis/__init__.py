"""Measuring and checking models: memory, arithmetic, gradients, and what is stored where."""
