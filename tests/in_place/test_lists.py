"""Which blocks of a network become chains: stages whose first block changes the state, two streams, lists that are none."""

import re

import pytest
import timm
import torch
from torch import nn

import revzoo
from revzoo.analysis.chains import find_block_chains
from revzoo.errors import ConversionError, InputError
from tests.in_place.networks import Tanh, Toy, X, assert_equal, train_step


class Widen(nn.Module):
    """The first block of a stage: it changes the width, with a projection on the shortcut."""

    def __init__(self, width):
        super().__init__()
        self.layer, self.shortcut = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)

    def forward(self, x):
        return self.shortcut(x) + self.layer(x).tanh()


class Wide(nn.Module):
    """An ordinary block; `shortcut` and `pool` make it one that changes its state."""

    def __init__(self, width, shortcut=False, pool=False):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.shortcut = nn.Linear(width, width) if shortcut else None
        self.pool = pool

    def forward(self, x):
        x = x[::2] if self.pool else x
        return (x if self.shortcut is None else self.shortcut(x)) + self.layer(x).tanh()


class Stages(nn.Module):
    def __init__(self, *stages):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleDict({"blocks": nn.Sequential(*blocks)}) for blocks in stages)

    def forward(self, x):
        for stage in self.stages:
            x = stage["blocks"](x)
        return x


def of_another_class():
    return Stages([Wide(6), Wide(6)], [Widen(6), *(Wide(12) for _ in range(3))], [Widen(12), *(Wide(24) for _ in range(2))])


def with_a_projection():
    return Stages(
        [Wide(6), Wide(6)], [Wide(6, True, True), *(Wide(6) for _ in range(3))], [Wide(6, True, True), Wide(6), Wide(6)]
    )


def in_one_list():
    return nn.Sequential(Wide(6), Wide(6), Widen(6), Wide(12), Wide(12), Wide(12))


STAGES = {"stages.0.blocks": (0, 2), "stages.1.blocks": (1, 4), "stages.2.blocks": (1, 3)}


@pytest.mark.parametrize(
    ("make", "spans"),
    [(of_another_class, STAGES), (with_a_projection, STAGES), (in_one_list, {"[0:2]": (0, 2), "[3:6]": (3, 6)})],
)
@pytest.mark.parametrize("batch", [None, X])
def test_the_first_block_of_a_stage_stays_ordinary_and_the_rest_of_all_stages_are_chains(make, spans, batch):
    model = make()
    report = revzoo.reversible_(model, batch=batch)
    lists = {path: path.partition("[")[0] for path in spans}
    expected = {path: [f"{lists[path]}.{i}".removeprefix(".") for i in range(*span)] for path, span in spans.items()}
    assert {chain.path: chain.blocks for chain in report.chains} == expected
    assert {path: chain.blocks for path, chain in find_block_chains(model).items()} == expected
    first = "stages.1.blocks.0" if "stages.0.blocks" in spans else "2"
    reason = "differs in class or weights" if batch is None else r"changes its state from \(4, 6\)"
    assert re.match(f"{first} {reason}", report.ordinary[0])
    stored, inverted = (
        train_step(model, {"input" if make is in_one_list else "x": X}, each)[0] for each in ("store", "invert")
    )
    assert stored.keys() == dict(model.named_parameters()).keys()
    assert_equal(inverted, stored)
    assert revzoo.verify(model, X).identical
    budget = revzoo.measure_memory(model, X).peak_bytes
    assert revzoo.plan(model, X, budget).peak_bytes <= budget
    revzoo.ordinary_(model)
    assert all("forward" not in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("batch", [None, X])
def test_a_stage_may_be_named(batch):
    model = of_another_class()
    for p in model.stages[2].parameters():
        nn.init.zeros_(p)  # outputs are zeros before and after
    report = revzoo.reversible_(model, "stages.1.blocks", batch=batch)
    assert report.chains[0].blocks == [f"stages.1.blocks.{i}" for i in (1, 2, 3)]
    assert batch is None or report.similarity.least_cosine == 1.0


def test_without_a_batch_a_block_that_turns_out_to_change_its_state_says_so():
    model = Stages([Wide(6, pool=True), Wide(6), Wide(6)])
    revzoo.reversible_(model)
    with pytest.raises(InputError, match=r"stages.0.blocks.0 changes its state from \(4, 6\) to \(2, 6\).*with batch="):
        model(X)
    revzoo.ordinary_(model)
    assert revzoo.reversible_(model, batch=X).chains[0].blocks == ["stages.0.blocks.1", "stages.0.blocks.2"]


def test_numbered_children_are_a_list_with_a_batch():
    model = timm.create_model("regnetx_002", num_classes=5)
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32).sin()
    with pytest.raises(ConversionError, match="RegNet has no list .*A batch may show more"):
        revzoo.reversible_(model)
    report = revzoo.reversible_(model, batch=images)
    assert {chain.path: (chain.blocks[0], len(chain.blocks)) for chain in report.chains} == {
        "s3": ("s3.b2", 3),
        "s4": ("s4.b2", 6),
    }


class TwoStreams(nn.Module):
    """A block that is given its states in one order and returns them in another, as those of diffusers do."""

    def __init__(self, is_last=False):
        super().__init__()
        self.image, self.text, self.is_last = nn.Linear(6, 6), nn.Linear(6, 6), is_last

    def forward(self, hidden, text):
        mean = hidden.mean(0) + text.mean(0)
        return None if self.is_last else text + self.text(text + mean).tanh(), hidden + self.image(hidden + mean).tanh()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TwoStreams(i == 3) for i in range(4))

    def forward(self, x, text):
        for block in self.blocks:
            text, x = block(x, text=text)
        return x


@pytest.mark.parametrize(("batch", "tokens"), [(True, 4), (True, 2), (False, 2)])
def test_a_block_of_two_streams_may_return_its_state_in_another_place(batch, tokens):
    model, given = Pair(), {"x": X, "text": X[:tokens].flip(1)}
    with torch.no_grad():
        before = model(**given)
    report = revzoo.reversible_(model, batch=given if batch else None)
    assert (model(**given) - before).abs().max() < 0.02
    assert not report.restarts
    stored, inverted = (train_step(model, given, schedule) for schedule in ("store", "invert"))
    assert_equal(inverted[0], stored[0])
    assert {f"blocks.{i}.{part}.weight" for i in range(3) for part in ("image", "text")} <= stored[0].keys()
    assert inverted[1] < stored[1]


class CallsForward(Toy):
    """It calls `forward` of its blocks itself, and they return dicts."""

    def __init__(self):
        super().__init__(*[Tanh(lambda m, x: {"mean": x.mean(), "state": x + m.layer(x).tanh()}) for _ in range(4)])

    def forward(self, x):
        mean = 0.0
        for block in self.blocks:
            out = block.forward(x)
            x, mean = out["state"], mean + out["mean"]
        return self.head(x) * mean


@pytest.mark.parametrize("batch", [None, X])
def test_a_network_that_calls_forward_itself_and_blocks_that_return_dicts(batch):
    model = CallsForward()
    report = revzoo.reversible_(model, batch=batch)
    assert (report.steps, report.restarts) == (4, ())
    stored, inverted = (train_step(model, {"x": X}, schedule) for schedule in ("store", "invert"))
    assert_equal(inverted[0], stored[0])
    assert inverted[1] < stored[1]


def test_entries_may_be_none_and_blocks_of_several_classes_need_a_batch():
    model = Toy(Tanh(), nn.Sequential(nn.Linear(6, 6, bias=False), nn.Identity()), Wide(6))
    model.blocks[1].register_forward_hook(lambda m, args, y: y)
    model.blocks[1].forward = lambda x: x + model.blocks[1][0](x)
    model.skips = nn.ModuleList([None, None])
    with pytest.raises(ConversionError, match=r"blocks \(1 Tanh and 1 Sequential and 1 Wide.*A batch may show more"):
        revzoo.reversible_(model)
    assert revzoo.reversible_(model, "blocks").steps == 3  # the user says that they are a list
    revzoo.ordinary_(model)
    report = revzoo.reversible_(model, batch=X)
    assert "each a Tanh or Sequential or Wide;" in str(report)
    stored, inverted = (train_step(model, {"x": X}, schedule)[0] for schedule in ("store", "invert"))
    assert_equal(inverted, stored)


class Parts(nn.Module):
    """The sum is in the network's code."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Tanh(lambda m, x: m.layer(x)), nn.Linear(6, 6)]) for _ in range(3))

    def forward(self, x):
        for attention, mlp in self.layers:
            x = mlp(attention(x) + x) + x
        return x


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.groups = nn.ModuleList([Tanh()])

    def forward(self, x):
        for _ in range(4):
            x = self.groups[0](x)
        return x


class Uncalled(Toy):
    """The longest list is not called, so the next one is taken."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.ModuleList([Tanh() for _ in range(6)])


def test_a_list_that_cannot_be_is_passed_over():
    assert [chain.path for chain in revzoo.reversible_(Uncalled()).chains] == ["decoder"]
    assert [chain.path for chain in revzoo.reversible_(Uncalled(), batch=X).chains] == ["blocks"]
    with pytest.raises(ConversionError, match="decoder has no two blocks .*decoder.0 is not called with this batch"):
        revzoo.reversible_(Uncalled(), "decoder", batch=X)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Parts, r"layers \(3 ModuleList: layers.0 is a ModuleList \(Tanh, Linear\): the network's own code calls its parts"),
        (Shared, r"groups \(1 Tanh: groups.0 is called 4 times \(shared layers\)"),
        (lambda: Toy(*[Tanh()] * 3), r"blocks \(3 Tanh: blocks.0 is the same module as blocks.1 \(shared layers\)"),
    ],
)
def test_a_network_without_such_a_list_hears_why_and_of_plan(make, reason):
    with pytest.raises(ConversionError, match=f"{reason}.*revzoo.plan"):
        revzoo.reversible_(make(), batch=X)
