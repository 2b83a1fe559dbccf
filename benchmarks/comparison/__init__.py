"""The same blocks run by revzoo, by PyTorch alone and by other packages: memory, FLOPs, time, and what else has to work."""
