"""Runs of a model that leave no trace: memory, FLOPs and gradients of a training step, reports, and ordinary twins."""
