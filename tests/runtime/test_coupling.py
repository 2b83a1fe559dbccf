"""What a coupling refuses, and couplings with coefficients for each example."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from revzoo.errors import InputError
from revzoo.runtime import Coupling, ReversibleChain

D = 6


@dataclass(frozen=True)
class RandomSigns(Coupling):
    """w[k+1] = f(w[k]) + s (w[k-1] - w[k]) / 2, where s is 1 or -1 for each example, drawn in every forward."""

    def bind(self, pair: tuple[Tensor, Tensor]) -> Coupling:
        signs = torch.randint(0, 2, (len(pair[0]), *[1] * (pair[0].dim() - 1))).to(pair[0].dtype) * 2 - 1
        return Signed(self.a, self.b, self.c, signs=signs)


@dataclass(frozen=True)
class Signed(Coupling):
    signs: Tensor | None = None

    def advance(self, previous: Tensor, current: Tensor, out: Tensor) -> Tensor:
        return out + 0.5 * self.signs * (previous - current)

    def invert(self, following: Tensor, current: Tensor, out: Tensor, into: Tensor | None = None) -> Tensor:
        return torch.add((following - out) * self.signs * 2, current, out=into)


def differentiate(chain: ReversibleChain, mode: str) -> list[Tensor]:
    chain.schedule = mode
    torch.manual_seed(0)
    streams = [x.requires_grad_() for x in torch.randn(2, 5, D, dtype=torch.float64).unbind()]
    y1, y2 = chain(*streams)
    return list(torch.autograd.grad((y1.sin() * y2).sum(), [*streams, *chain.parameters()]))


@pytest.mark.parametrize("mode", ["invert", "recompute", "selective", ["invert", "store", "recompute", "invert"]])
def test_a_coupling_has_coefficients_for_each_example(mode, error):
    torch.manual_seed(0)
    steps = [nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
    chain = ReversibleChain(steps, coupling=RandomSigns(-0.5, 0.5, 1.0)).double()
    expected = differentiate(chain, "store")
    for _ in range(4):
        assert error(differentiate(chain, mode), expected) < 1e-10


def test_it_has_none_on_a_grid_and_no_inverse():
    chain = ReversibleChain([nn.Tanh()], coupling=RandomSigns(-1.0, 1.0, 1.0), exact=True)
    with pytest.raises(InputError, match=r"steps\.0 has coefficients for each example, which exact arithmetic cannot undo"):
        chain(*torch.randn(2, 5, D).requires_grad_().unbind())
    with pytest.raises(InputError, match="The inverse needs the coefficients that forward drew"):
        chain.inverse(*torch.randn(2, 5, D).unbind())


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ((float("nan"), 1, 1), "finite numbers. Received: (nan, 1, 1)"),
        ((0, "1", 1), "finite numbers. Received: (0, '1', 1)"),
        ((0, 1, float("inf")), "finite numbers"),
        ((1, 0.3, 1, 2), "kept for |b| = 2^-kept_bits"),
        ((0, 1, 0), "c = 0 leaves f out"),
    ],
)
def test_coefficients_that_make_no_coupling(coefficients, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Coupling(*coefficients)
