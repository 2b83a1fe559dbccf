"""Examples to train on: images, digits and texts, loaded so that every random choice can be repeated."""
