"""What `reversible_` with `split` refuses, with the reason: the network is then as it was."""

import pytest
import torch
from torch import nn

import revzoo
from revzoo.errors import ConversionError, InputError, UnknownNameError
from tests.in_place.test_reversible_split import SPLIT, Toy, X, is_untouched


@pytest.fixture
def toy():
    torch.manual_seed(0)
    return Toy()


def side_by_side(m, x):
    h = m.norm1(x)
    return x + m.attn(h) + m.mlp(h)


def other_order(m, x):
    x = x + m.mlp(m.norm2(x))
    return x + m.attn(m.norm1(x))


def norm_after_the_sum(m, x):
    return m.norm2(m.norm1(x + m.attn(x)) + m.mlp(x))


class Adding(nn.Linear):
    def forward(self, x, state):
        return state + super().forward(x)


def branch_with_the_state(m, x):  # as BLOOM's, which are given what to add
    x = m.attn(m.norm1(x), x)
    return x + m.mlp(m.norm2(x))


def own_bias(m, x):  # zero until it is trained
    x = x + m.attn(m.norm1(x)) + 0.0 * m.norm1.bias + m.norm2.bias
    return x + m.mlp(m.norm2(x))


def functional(m, x):
    x = x + nn.functional.linear(m.norm1(x), m.attn.weight)
    return x + m.mlp(m.norm2(x))


def raises(m, x):
    if not (h := m.attn(m.norm1(x))).any():
        raise ArithmeticError("nothing to attend to")
    return x + h + m.mlp(x)


def attribute(m, x):
    m.normed = m.norm1(x)
    x = x + m.attn(m.normed)
    return x + m.mlp(m.norm2(x))


def noise_in_training(m, x):
    x = x + m.attn(m.norm1(x)) + m.training * torch.randn_like(x)
    return x + m.mlp(m.norm2(x))


def change_in_between(m, x):
    y = x + m.attn(m.norm1(x))
    return y + m.mlp(m.norm2(y)), y - x


CANNOT = {
    "side by side": ({"write": side_by_side}, "blocks.0 cannot be two steps, attn added to the state, then mlp"),
    "other order": ({"write": other_order}, "cannot be two steps"),
    "norm after the sum": ({"write": norm_after_the_sum}, "cannot be two steps"),
    "a branch with the state": ({"write": branch_with_the_state}, "cannot be two steps"),
    "a bias": ({"write": own_bias}, "cannot be two steps"),
    "an attribute": ({"write": attribute}, "blocks.0 sets as an attribute a tensor that changes"),
    "noise in training": ({"write": noise_in_training}, "cannot be two steps"),
    "another result": ({"write": change_in_between}, "blocks.0 returns besides its state a tensor that changes"),
    "no call": ({"write": functional}, "blocks.0 does not call attn as a submodule"),
    "an error": ({"write": raises}, "blocks.0 cannot run one of its branches without the other: ArithmeticError: nothing to"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_split_is_refused_with_the_reason(name):
    torch.manual_seed(0)
    options, message = CANNOT[name]
    model = Toy(**options)
    if name == "a branch with the state":
        for block in model.blocks:
            block.attn = Adding(8, 8)
    for key, p in model.named_parameters():
        if key.endswith("bias"):
            nn.init.zeros_(p)
    with pytest.raises(ConversionError, match=message):
        revzoo.reversible_(model, batch=X, split=SPLIT)
    assert is_untouched(model)


def side_by_side_with_one_norm(m, x):
    return x + m.attn(m.norm1(x)) + m.mlp(m.norm1(x))


@pytest.mark.parametrize("write", [None, side_by_side_with_one_norm])
def test_a_norm_at_two_places_keeps_its_weights(write):
    torch.manual_seed(0)
    model = Toy() if write is None else Toy(write=write)
    for block in model.blocks:
        block.norm2 = block.norm1
    parameters, before = list(model.parameters()), [p.clone() for p in model.parameters()]
    if write is None:
        revzoo.reversible_(model, batch=X, split=SPLIT)
    else:
        with pytest.raises(ConversionError, match="cannot be two steps"):
            revzoo.reversible_(model, batch=X, split=SPLIT)
    assert all(p is known for p, known in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(p, known) for p, known in zip(model.parameters(), before, strict=True))


def test_the_fast_path_of_torch_is_refused():
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2))
    with pytest.raises(InputError, match=r"runs its block without linear1, but the block now computes without calling"):
        revzoo.reversible_(model, "1.layers", batch=X[None], split=SPLIT)
    assert is_untouched(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"split": ("attn",)}, InputError, r"split is a pair of branches.*Received: \('attn',\)"),
        ({"split": "attn"}, InputError, "split is a pair of branches"),
        ({"split": ("attn", ())}, InputError, "split is a pair of branches"),
        ({"split": ("attn", 3)}, InputError, "split is a pair of branches"),
        ({"batch": None}, InputError, r"Give one: reversible_\(model, batch=batch, split=\('attention', 'mlp'\)\)"),
        ({"split": ("attn", "mpl")}, UnknownNameError, "mlp"),
    ],
)
def test_arguments_that_are_none_are_named(toy, options, error, message):
    with pytest.raises(error, match=message):
        revzoo.reversible_(toy, **{"batch": X, "split": SPLIT, **options})
    assert is_untouched(toy)


def test_another_way_through_a_block_is_noticed(toy):
    revzoo.reversible_(toy, batch=X, split=SPLIT)
    toy.blocks[1].write = functional
    with pytest.raises(InputError, match=r"blocks.1.mlp runs its block without attn, but the block now computes without"):
        toy(X)


def test_a_branch_compiled_later_is_refused(toy):
    revzoo.reversible_(toy, batch=X, split=SPLIT)
    toy.blocks[1].mlp.compile(backend="eager")
    with pytest.raises(
        InputError, match=r"blocks.1.attention is one of two steps of a block, and a Sequential in it is compiled"
    ):
        toy(X)
