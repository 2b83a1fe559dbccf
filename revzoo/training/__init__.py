"""Training and evaluation of a model by a recipe: one loop for one process or many."""
