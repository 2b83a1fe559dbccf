"""Data sets for training: images, digits and texts, loaded so that every random choice can be repeated."""
