"""The arithmetic on the grid, compiled: the same bits as in eager mode."""

import pytest
import torch
from torch import Tensor

from revzoo.runtime.coupling import Coupling, dual_residual, leapfrog, momentum
from revzoo.runtime.exact import Grid
from tests.runtime.test_compile import needs_compiler

pytestmark = [pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")]


def make_terms(dtype: torch.dtype, transposed: tuple[bool, bool, bool]) -> list[Tensor]:
    """Return two states and the output of f, of all magnitudes, with zeros of both signs."""
    terms = []
    for is_transposed in transposed:
        x = torch.randn(3, 5, 7, dtype=dtype) * 10.0 ** torch.randint(-6, 2, (3, 5, 7))
        x[torch.rand(x.shape) < 0.1] = 0.0
        x[torch.rand(x.shape) < 0.1] *= -1.0
        terms.append(x.mT.contiguous().mT if is_transposed else x)
    return terms


def read_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)


CONTIGUOUS, TRANSPOSED, MIXED = (False, False, False), (True, True, True), (False, False, True)
QUICK = [(Coupling(0.0, -1.0, 0.7), torch.float32, MIXED), (momentum(kept_bits=3), torch.float32, CONTIGUOUS)]
CASES = [
    *QUICK,
    (leapfrog(), torch.float32, TRANSPOSED),
    (Coupling(1.0, 1.0, 0.3), torch.float64, MIXED),
    (Coupling(1.5, -0.5, 0.5, 1), torch.float32, MIXED),
    (momentum(kept_bits=8, gain=1.0), torch.float64, TRANSPOSED),
    *((dual_residual(kept_bits=bits), torch.float32, MIXED) for bits in (0, 5, 12)),
]


@pytest.mark.parametrize(
    ("backend", "coupling", "dtype", "transposed"),
    [
        *(pytest.param("aot_eager", *case) for case in QUICK),
        *(pytest.param("inductor", *case, marks=[needs_compiler, pytest.mark.slow]) for case in CASES),
    ],
)
def test_compiled_and_eager_arithmetic_give_the_same_bits(backend, coupling, dtype, transposed):
    torch.manual_seed(0)
    grid = Grid(dtype)
    torch.compiler.reset()
    advance, invert = (torch.compile(each, backend=backend, fullgraph=True) for each in (grid.advance, grid.invert))
    previous, current, out = make_terms(dtype, transposed)
    previous, current = grid.round(previous), grid.round(current)
    following, kept = grid.advance(coupling, previous, current, out, keeps_bits=True)
    other, others_kept = advance(coupling, previous, current, out, keeps_bits=True)
    assert torch.equal(read_bits(other), read_bits(following))
    if coupling.kept_bits:
        fields, others = ([x] if isinstance(x, Tensor) else x.fields for x in (kept, others_kept))
        assert len(fields) == len(others) > 0
        assert all(map(torch.equal, fields, others))
    assert torch.equal(read_bits(invert(coupling, other, current, out, others_kept)), read_bits(previous))
