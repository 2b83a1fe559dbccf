"""Settings of the whole suite."""

import torch

# The tests' tensors are tiny: a second thread costs more than it gives, and one thread makes sums repeatable.
torch.set_num_threads(1)
