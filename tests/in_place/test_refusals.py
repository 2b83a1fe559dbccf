"""Networks and blocks that `reversible_` refuses, by name, and leaves as they were."""

import re
from functools import partial

import pytest
import torch
from torch import nn

import revzoo
from revzoo.analysis.chains import find_block_chains
from revzoo.errors import ConversionError, InputError, RecoveryError, UnknownNameError
from tests.in_place.networks import Tanh, Toy, X, assert_equal, train_step


def widen(m, x):
    return m.layer(x).repeat(1, 2)


def write_into(m, x):
    x += m.layer(x.clone())
    return x


BAD = {
    "widen": (widen, r"changes its state from \(4, 6\), .* to \(4, 12\)"),
    "write_into": (write_into, "writes into what it is given"),
    "to_double": (lambda m, x: m.layer(x).double(), "changes its state from .* to .*torch.float64"),
    "dictionary": (lambda m, x: {"x": [x]}, "returns dict, not a new state"),
    "unrelated": (lambda m, x: -x, "is no residual map: it returns -1.00 times its input"),
}


def narrow(m, x):
    return (x["x"][0] if isinstance(x, dict) else x)[:, :6].float().clone()


@pytest.mark.parametrize("name", BAD)
def test_blocks_that_cannot_be_steps_stay_ordinary_with_the_reason(name):
    write, reason = BAD[name]
    toy = Toy(Tanh(), Tanh(), Tanh(), Tanh(write), nn.Identity(), Tanh(), Tanh())
    toy.blocks[4].forward = partial(narrow, None)
    report = revzoo.reversible_(toy, batch=X)
    ends = 2 if name == "write_into" else 3  # what it writes into is no state of a chain
    assert {chain.path: chain.blocks for chain in report.chains} == {
        f"blocks[0:{ends}]": [f"blocks.{i}" for i in range(ends)],
        "blocks[5:7]": ["blocks.5", "blocks.6"],
    }
    assert list(find_block_chains(toy)) == [f"blocks[0:{ends}]", "blocks[5:7]"]
    assert re.match(f"blocks.3 {reason}", report.ordinary[-2])
    assert ("blocks.2 returns a state that something writes into" in str(report)) is (ends == 2)
    stored, inverted = (train_step(toy, {"x": X}, schedule)[0] for schedule in ("store", "invert"))
    assert_equal(inverted, stored)
    toy = Toy(Tanh(write), nn.Identity())
    toy.blocks[1].forward = partial(narrow, None)
    before = [dict(m.__dict__) for m in toy.modules()]
    with pytest.raises(ConversionError, match=f"blocks.0 {reason}"):
        revzoo.reversible_(toy, "blocks", batch=X.clone())
    assert [dict(m.__dict__) for m in toy.modules()] == before


class Ranged(Tanh):
    """A block with the largest input so far in a buffer, as quantised networks have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().amax())
        return super().forward(x)


def spectral():
    block = Tanh()
    nn.utils.parametrizations.spectral_norm(block.layer)
    return block


@pytest.mark.parametrize(("make", "buffer"), [(Ranged, "largest"), (spectral, r"layer\S+_u")])
def test_blocks_that_change_their_buffers_in_training_stay_ordinary(make, buffer):
    torch.manual_seed(0)
    toy = Toy(Tanh(), Tanh(), make())
    report = revzoo.reversible_(toy, batch=X)
    assert re.match(f"blocks.2 changes its '{buffer}' in forward, so a second run would not repeat", report.ordinary[0])
    toy.train()(X).sum().backward()
    with pytest.raises(ConversionError, match=f"blocks.0 changes its '{buffer}' in forward"):
        revzoo.reversible_(Toy(make(), make()), batch=X)
    revzoo.reversible_(toy := Toy(make(), make()))
    with pytest.raises(RecoveryError, match=f"blocks.0 changes its '{buffer}' in forward"):
        toy.train()(X)


def test_a_network_that_no_training_step_would_end_is_refused_and_stays_as_it_was():
    numbers = iter(range(99))
    toy = Toy(Tanh(), Tanh(lambda m, x: x + next(numbers) * m.layer(x)), Tanh())
    before = [dict(m.__dict__) for m in toy.modules()]
    with pytest.raises(ConversionError, match=r"(?s)step of the reversible Toy fails.*blocks.1 ran differently.*revzoo.plan"):
        revzoo.reversible_(toy, batch=X)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        revzoo.reversible_(toy, batch=X[:, :3])
    assert [dict(m.__dict__) for m in toy.modules()] == before


def test_a_residual_map_is_told_from_noise():
    x, g = torch.randn(2, 160, 6)
    for factor, rows in ((1, 160), (20, 160), (0, 1)):  # of one row there are too few elements to tell
        blocks = (Tanh(lambda m, x: x * bool(factor) + (factor or 1) * g[: len(x)]), Tanh())  # noqa: B023
        revzoo.reversible_(Toy(*blocks), batch=x[:rows])
    with pytest.raises(ConversionError, match=r"blocks.0 is no residual map: it returns -?0\.0\d times its input"):
        revzoo.reversible_(Toy(Tanh(lambda m, x: g), Tanh()), batch=x)


class Shuffle(nn.Module):
    """A block of ShuffleNet: it keeps half of its channels, in other places, behind a ReLU."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        a, b = x.chunk(2, 1)
        return torch.stack((a, self.layer(b)), 2).flatten(1, 2)


def test_blocks_that_shuffle_channels_are_told_from_residual_ones_by_more_than_positive_means():
    torch.manual_seed(0)
    toy = Toy(*(Shuffle() for _ in range(4)))
    toy.head = nn.Identity()
    with pytest.raises(ConversionError, match=r"blocks.\d is no residual map: it returns -?0\.0\d times its input"):
        revzoo.reversible_(toy, batch=torch.randn(4, 16, 8, 8).relu())


def test_what_norms_that_are_not_fitted_hide_in_eval_mode_is_seen_in_training_mode():
    torch.manual_seed(0)
    toy = Toy(*(Tanh(lambda m, x: m.layer(x) if m.training else x) for _ in range(3)))
    with pytest.raises(ConversionError, match=r"blocks.\d is no residual map"):
        revzoo.reversible_(toy, batch=torch.randn(200, 6))


@pytest.mark.parametrize(("batch", "received"), [([], "list"), ({}, "dict"), ("a", "str"), (X[:0], r"\[\(0, 6\)\]")])
def test_a_batch_without_tensors_is_named(batch, received):
    with pytest.raises(InputError, match=f"The batch must hold at least one .* Received: {received}"):
        revzoo.reversible_(Toy(), batch=batch)


@pytest.mark.parametrize(
    ("head", "received"),
    [
        (lambda x: torch.complex(x, x), r"torch.complex64 of shape \(4, 6\)"),
        (lambda x: x.sum(), r"torch.float32 of shape \(\)"),
        (lambda x: "text", "str"),
    ],
)
def test_outputs_that_cannot_be_compared_are_described(head, received):
    toy = Toy()
    toy.head.forward = head
    with pytest.raises(InputError, match=f"Received: {received}. Return one, .* or leave `batch` out"):
        revzoo.reversible_(toy, batch=X)
    revzoo.reversible_(toy)


def test_a_list_of_wrapped_norms_has_no_blocks():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.BatchNorm1d(6)

        def forward(self, x):
            return self.module(x)

    with pytest.raises(ConversionError, match="no list of two or more blocks"):
        revzoo.reversible_(Toy(*(Norm() for _ in range(4))), batch=X)


@pytest.mark.parametrize("name", ["widen", "write_into", "dictionary"])
def test_without_a_batch_such_blocks_raise_in_their_first_call(name):
    toy = Toy(Tanh(), Tanh(BAD[name][0]), Tanh(), Tanh())
    revzoo.reversible_(toy, "blocks")
    with pytest.raises(InputError, match="blocks.1"):
        toy(X)


def compiled():
    toy = Toy()
    toy.blocks[2]._compiled_call_impl = toy.blocks[2]._call_impl  # as block.compile() does, which imports the compiler
    return toy


def shared():
    block = Tanh()
    return Toy(block, Tanh(), block)


def nested():
    toy = Toy(nn.Sequential(Tanh(), Tanh()), nn.Sequential(Tanh(), Tanh()))
    return toy


REFUSED = {
    "no module": (lambda: 3, (), "torch.nn.Module"),
    "no list": (lambda: nn.Linear(2, 2), (), "no list of two or more blocks"),
    "no such path": (Toy, ("block",), "Did you mean 'blocks'"),
    "no list at the path": (Toy, ("head",), "'head', a Linear"),
    "shared": (shared, ("blocks",), "blocks.0 is the same module as blocks.2"),
    "nested": (nested, ("blocks", "blocks.0"), "blocks.0.0 is a part of blocks.0"),
    "compiled": (compiled, (), "Received: compiled blocks.2. Call reversible_ before torch.compile"),
    "zoo": (lambda: revzoo.create("rev_vit_digits"), (), "reversible chain already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_reversible_is_named(name):
    make, paths, message = REFUSED[name]
    model = make()
    with pytest.raises((ConversionError, InputError, UnknownNameError), match=message):
        revzoo.reversible_(model, *paths)
    if isinstance(model, nn.Module):
        assert all("forward" not in m.__dict__ for m in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kept_bits": 16}, "kept_bits is an integer from 1 to 15"),
        ({"kept_bits": True}, "kept_bits is an integer from 1 to 15. Received: True"),
        ({"coupling": "additive"}, "Allowed: dual_residual, momentum"),
        ({"fraction_bits": 50}, "fraction_bits is an integer from 4 to 40"),
    ],
)
def test_numbers_out_of_range_are_named(options, message):
    with pytest.raises((InputError, UnknownNameError), match=message):
        revzoo.reversible_(Toy(), **options)


def test_a_second_call_is_refused_and_changes_nothing():
    torch.manual_seed(0)
    toy = Toy()
    revzoo.reversible_(toy, kept_bits=2)
    y = toy(X)
    with pytest.raises(InputError, match=r"'blocks' is reversible already. Call revzoo.ordinary_\(model\)"):
        revzoo.reversible_(toy)
    assert torch.equal(toy(X), y)
