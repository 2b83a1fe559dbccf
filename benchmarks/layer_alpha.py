"""How much the inverse of a layer amplifies noise: measured, and by the layer's own formula.

Noise of known size is added to the output, which is then inverted. Below 1 the inverse amplifies it.
Source: Hascoet et al. 2023, section 4.1.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.runtime.layer_call import find_alpha

# Relative to the output. So small that few elements of a LeakyReLU change their sign, and in float64 so large that rounding
# does not count.
_NOISE = 1e-5
_NOISE_SEED = 7_340_033  # not one that anybody's inputs were drawn with: the noise must not follow the signal


@torch.no_grad()
def measure_alpha(layer: nn.Module, x: Tensor) -> tuple[float, float | None]:
    """Return by which factor a layer's inverse changes the signal-to-noise ratio: measured on x, and from its `alpha`.

    Computed in float64 on a copy of the layer, with noise that is the same in all elements.

    Args:
        layer: a layer with an inverse; None is returned for the formula if it has none.
        x: the layer's input.
    """
    module, x = copy.deepcopy(layer).double(), x.detach().double()
    keep = getattr(module, "forward_keeping", None)
    y, *kept = (module(x),) if keep is None else keep(x)
    inverse: Callable[..., Tensor] = cast(Any, module).inverse
    generator = torch.Generator().manual_seed(_NOISE_SEED)
    noise = torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device) * (_NOISE * y.square().mean().sqrt())
    error = inverse(y + noise, *kept) - inverse(y, *kept)
    ratio = (x.square().sum() / error.square().sum()) / (y.square().sum() / noise.square().sum())
    if isinstance(module, Bijection):
        return float(ratio), 1.0
    formula = find_alpha(module)
    return float(ratio), None if formula is None else float(formula(y, *kept))
