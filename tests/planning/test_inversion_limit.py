"""How many steps in a row may be inverted, as gradients say."""

import pytest
import torch
from torch import nn

import revzoo
from revzoo.errors import RecoveryError
from revzoo.planning.profiling.hooks import list_units
from revzoo.planning.profiling.inversion_limit import measure_inversion_limit, place_anchors
from revzoo.runtime import Coupling, ReversibleChain

pytestmark = pytest.mark.filterwarnings("ignore:The streams are torch.bfloat16:UserWarning")


def chain_of(depth: int, mlp, coupling: object = "additive", **kwargs) -> ReversibleChain:
    return ReversibleChain([mlp() for _ in range(depth)], coupling, **kwargs)


def streams(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 6, 5, 8, dtype=dtype).unbind()


def test_anchors_stand_behind_every_run(mlp):
    entries = list_units(chain_of(7, mlp))
    i, r = "invert", "recompute"
    assert place_anchors(entries, None) == [i] * 7
    assert place_anchors(entries, 0) == [r] * 7
    assert place_anchors(entries, 1) == [i, r, i, r, i, r, i]
    assert place_anchors(entries, 2) == [i, i, r, i, i, r, i]


def test_nodes_store_and_end_a_run():
    model = revzoo.create("revnet_digits", overrides=["stages.0.depth=1", "stages.1.depth=1", "stages.2.depth=1"])
    stage = ["store", "invert", "invert"]
    assert place_anchors(list_units(model), 2) == ["store", *stage, *stage, *stage, "store", "store"]


@pytest.mark.parametrize("exact", [False, True])
def test_float32_has_no_limit(exact, mlp):
    assert measure_inversion_limit(chain_of(8, mlp, exact=exact), streams()) is None


def test_half_precision_streams_get_one(mlp):
    chain = chain_of(8, mlp, "leapfrog").bfloat16()
    run = measure_inversion_limit(chain, streams(torch.bfloat16))
    assert run is not None
    assert 0 <= run <= 4
    assert chain.schedule == ["invert"] * 8


def test_a_coupling_that_forgets_gets_one(mlp):
    # What b takes away in forward, 1 / b brings back with its rounding error: 24 halvings leave nothing of float32.
    run = measure_inversion_limit(chain_of(24, mlp, Coupling(0, 0.5, 1)), streams())
    assert run is not None
    assert 3 <= run <= 12
    assert measure_inversion_limit(chain_of(24, mlp, Coupling(0, 0.5, 1)).double(), streams(torch.float64)) is None


def test_a_step_that_does_not_repeat_itself_is_refused(mlp):
    class Moving(nn.Linear):
        calls = 0

        def forward(self, w: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(w * (1 + self.calls))

    chain = ReversibleChain([mlp(), Moving(8, 8), nn.GELU()])
    chain.schedule = "store"
    with pytest.raises(RecoveryError, match=r"No plan can be made.* repeat"):
        measure_inversion_limit(chain, streams())
    assert chain.schedule == ["store"] * 3


def test_a_few_examples_decide(tiny, monkeypatch):
    seen = []
    tiny.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    assert measure_inversion_limit(tiny, tiny.example_input(9)) is None
    assert set(seen) == {4}
