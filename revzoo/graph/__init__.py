"""Planning any module: its captured graph, cut into spans that are recovered from a few kept tensors."""
