"""What steps keep beyond their modes is counted to the byte, and said by verify."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.analysis.leftover import measure_leftovers
from revzoo.runtime import ReversibleChain

STREAM = 4 * 6 * 4  # bytes of a stream


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.x.cos()


class Step(nn.Module):
    def __init__(self, keeps: str):
        super().__init__()
        self.keeps, self.linear = keeps, nn.Linear(6, 6)

    def forward(self, w: Tensor) -> Tensor:
        match self.keeps:
            case "checkpoint":
                return checkpoint(self.linear, w, use_reentrant=False)
            case "save_on_cpu":
                with save_on_cpu():
                    return self.linear(w).tanh()
            case "ctx":
                return KeepsOnContext.apply(self.linear(w))
            case "attribute":
                self.seen = self.linear(w)
                return self.seen.tanh()
        return self.linear(w).tanh()


def streams() -> tuple[Tensor, Tensor]:
    x1, x2 = torch.randn(2, 4, 6)
    return x1, x2


@pytest.mark.parametrize(
    ("keeps", "mode", "streams_kept"),
    [
        ("nothing", "invert", [0, 0, 0, 0]),
        ("nothing", "recompute", [0, 0, 0, 0]),
        ("checkpoint", "invert", [0, 0, 0, 0]),  # saves its input for backward, so that it can be dropped
        ("checkpoint", "recompute", [0, 0, 0, 0]),
        ("save_on_cpu", "invert", [1, 2, 2, 1]),  # tanh's output, and the input if it is not there anyway
        ("save_on_cpu", "recompute", [1, 1, 1, 1]),
        ("ctx", "invert", [1, 1, 1, 1]),
        ("attribute", "invert", [1, 1, 1, 1]),
        ("attribute", "store", [0, 0, 0, 0]),
    ],
)
def test_bytes_that_steps_keep_themselves(keeps, mode, streams_kept):
    chain = ReversibleChain([Step(keeps) for _ in range(4)])
    chain.schedule = mode
    assert measure_leftovers(chain, streams()) == {f"steps.{i}": n * STREAM for i, n in enumerate(streams_kept) if n}


@pytest.mark.parametrize("schedule", ["invert", "recompute", "selective"])
@pytest.mark.parametrize("name", ["rev_vit_digits", "rev_swin_digits", "revnet_digits"])
def test_models_of_the_zoo_keep_what_their_modes_say(name, schedule):
    model = revzoo.create(name, schedule=schedule)
    with torch.autocast("cpu", torch.bfloat16):
        assert measure_leftovers(model, model.example_input(2)) == {}


def test_verify_says_it_and_gradients_are_right():
    chain = ReversibleChain([Step(keeps) for keeps in ("nothing", "attribute", "checkpoint", "ctx", "nothing")])
    report = revzoo.verify(chain, streams())
    assert report.ok
    assert report.leftover_bytes == {"steps.1": STREAM, "steps.3": STREAM}
    assert "Kept although the mode drops it: 192 B, by steps.1, steps.3. The step itself keeps it, not autograd" in str(report)
    chain.schedule = "store"
    assert "although" not in str(revzoo.verify(chain, streams()))
