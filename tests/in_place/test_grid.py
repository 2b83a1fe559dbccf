"""Which grid the states of a chain are on: it holds those of training, and resolves the smallest tokens."""

import copy

import pytest
import torch
from torch import nn

import revzoo
from revzoo.analysis.chains import find_block_chains
from revzoo.errors import RecoveryError
from tests.in_place.networks import Tanh, Toy, X


class Normed(nn.Module):
    """A layer whose BatchNorm has no statistics yet: in eval mode its output is a ten-thousandth of that in training."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6, eps=1e-20)
        nn.init.normal_(self.layer.weight, std=1e-4)

    def forward(self, x):
        return self.norm(self.layer(x))


class Residual(Normed):
    def forward(self, x):
        return x + super().forward(x)


def make_normed():
    return nn.Sequential(Normed(), Toy(*[Residual() for _ in range(4)]))


class Tiny(nn.Module):
    """Tokens of which the first is tiny, as class tokens at the start are; the head reads its direction."""

    def __init__(self, scale=1e-6):
        super().__init__()
        self.token = nn.Parameter(scale * torch.randn(1, 1, 6))
        self.blocks = nn.ModuleList(Tanh(lambda m, x: x + scale * m.layer(x).tanh()) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(6, eps=1e-20), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Channels(Tanh):
    """A block of tokens or, with 4 dimensions, of images."""

    def __init__(self, dimensions):
        super().__init__()
        self.axis = 1 if dimensions == 4 else -1

    def forward(self, x):
        x = x.movedim(self.axis, -1)
        return super().forward(x).movedim(-1, self.axis)


TOKENS = torch.linspace(-4, 4, 2 * 5 * 6).view(2, 5, 6)


def train(model, x, schedule):
    """Return losses and weights of three steps."""
    for chain in find_block_chains(model).values():
        chain.schedule = schedule
    optimizer, losses = torch.optim.AdamW(model.train().parameters(), 1e-6), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + list(model.state_dict().values())


def assert_trains_as_stored(model, ordinary, x):
    inverted = train(copy.deepcopy(model), x, "invert")
    assert all(map(torch.equal, inverted, train(model, x, "store")))
    torch.testing.assert_close(inverted[:3], train(ordinary, x, "store")[:3], rtol=0.02, atol=0)


def test_a_network_with_batchnorm_from_scratch_trains_on_the_grid_of_its_batch():
    torch.manual_seed(0)
    model = make_normed()
    ordinary, before, stream = copy.deepcopy(model), copy.deepcopy(model.eval().state_dict()), torch.get_rng_state()
    report = revzoo.reversible_(model, batch=X)
    assert "in eval mode; in training mode they are larger" in str(report)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))  # running statistics, too
    assert torch.equal(torch.get_rng_state(), stream)
    assert not any(m.training for m in model.modules())
    assert_trains_as_stored(model, ordinary, X)


def test_a_batch_that_cannot_be_run_in_training_mode_is_said():
    report = revzoo.reversible_(make_normed(), batch=X[:1])
    assert "cannot be run in training mode (ValueError: Expected more than 1 value per channel" in str(report)


def test_tiny_tokens_have_states_in_float64():
    torch.manual_seed(0)
    model = Tiny()
    ordinary = copy.deepcopy(model)
    report = revzoo.reversible_(model, batch=TOKENS)
    assert report.similarity.least_cosine > 0.999
    assert report.kept_bytes_per_element == (19.0,)
    assert "blocks: states are float64, because the 24 binary digits of float32 do not hold tokens or pixels of" in str(report)
    assert_trains_as_stored(model, ordinary, TOKENS)


def test_without_a_batch_tiny_tokens_are_warned_of_once():
    torch.manual_seed(0)
    revzoo.reversible_(model := Tiny())
    with pytest.warns(UserWarning, match=r"blocks.0 begins a chain.*leaves nothing.*reversible_ with a batch like this one"):
        model(TOKENS)
    model(TOKENS)  # where warnings are errors
    revzoo.reversible_(normal := Tiny(scale=0.1))
    normal(TOKENS)


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 6, 4, 4)])
def test_later_states_that_are_much_smaller_are_warned_of_once(shape):
    torch.manual_seed(0)
    model = nn.Sequential(*[Channels(len(shape)) for _ in range(3)])
    x = torch.randn(shape)
    revzoo.reversible_(model, batch=x)
    model(x.flip(0))
    with pytest.warns(UserWarning, match=r"0 begins a chain.*has size .*e-0.*leaves little"):
        model(1e-4 * x)
    model(1e-4 * x)  # where warnings are errors


def test_another_function_is_warned_of():
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"Toy computes another function now: the cosine .* is .*\. More kept_bits") as seen:
        revzoo.reversible_(
            Toy(*[Tanh(lambda m, x: m.layer(x).mul(9).tanh() + 0.5 * x) for _ in range(6)]), batch=X, kept_bits=1
        )
    assert seen[0].filename == __file__
    nn.init.zeros_((toy := Toy()).head.weight)
    nn.init.zeros_(toy.head.bias)
    assert revzoo.reversible_(toy, batch=X).similarity.cosine == 1  # of zeros and zeros, without a warning


def test_states_that_leave_the_grid_name_the_block_and_what_can_be_done():
    toy = Toy(Tanh(), Tanh(lambda m, x: x + 300), Tanh())
    revzoo.reversible_(toy, fraction_bits=16)
    with pytest.raises(RecoveryError, match=r"below 256 .* Received: 30\d.* after blocks.1. .* with fewer fraction_bits.$"):
        toy(X)
