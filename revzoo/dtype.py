"""What the dtypes of sums and of states mean."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)  # too coarse for states that are to be inverted


def match_dtype(out: Tensor, x: Tensor) -> Tensor:
    """Cast `out` if a sum with x would have another dtype than x."""
    return out if out.dtype == x.dtype or torch.promote_types(out.dtype, x.dtype) == x.dtype else out.to(x.dtype)
