"""Training and evaluation: a recipe, a data pipeline, one loop."""
