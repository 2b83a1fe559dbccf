"""Copies of chains and models, by deepcopy, pickle and state dict: equal to the original and independent of it."""

import copy
import pickle
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import revzoo
from revzoo.runtime import ReversibleChain

COPIERS = {"deepcopy": copy.deepcopy, "pickle": lambda network: pickle.loads(pickle.dumps(network))}


class Twice(nn.Module):
    """A chain as a network of one input, with dropout and BatchNorm inside."""

    def __init__(self) -> None:
        super().__init__()
        units = [nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)]
        self.chain = ReversibleChain(units, coupling="momentum")
        self.chain.schedule = ["invert", "selective", "recompute"]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.chain(x, x.flip(0)))

    def example_input(self, batch_size: int) -> Tensor:
        return torch.randn(batch_size, 6)


def vit() -> revzoo.Model:
    schedule = ["recompute", "invert", "invert", "recompute", "invert", "store", "recompute"]
    return revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2", "block.drop_path.max=0.2"], schedule=schedule)


def revnet() -> revzoo.Model:
    stage = "{depth: 1, width: 16, transition: {type: residual_pair, preactivate: false}}"
    schedule = ["store", "selective", "invert", "selective", "recompute", "store"]
    return revzoo.create("revnet_digits", overrides=[f"stages=[{stage}]", "block.drop_path.max=0.2"], schedule=schedule)


def chain_in(network: nn.Module) -> ReversibleChain | revzoo.Model:
    return network.chain if isinstance(network, Twice) else network


def forward(network: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return network(x)


def backward(network: nn.Module, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), list(network.parameters())))


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def state(network: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in network.state_dict().values()]


def train(network: nn.Module, x: Tensor) -> None:
    gradients = backward(network, forward(network, x))
    with torch.no_grad():
        torch._foreach_sub_(list(network.parameters()), gradients, alpha=0.1)


@pytest.fixture(params=[Twice, vit, revnet])
def network(request):
    return request.param()


@pytest.fixture(params=COPIERS)
def copier(request) -> Callable[[nn.Module], nn.Module]:
    return COPIERS[request.param]


@pytest.mark.parametrize("trained", [False, True])
def test_a_copy_repeats_the_original_and_shares_nothing(trained, network, copier):
    x = network.example_input(3)
    if trained:
        train(network, x)
    twin = copier(network)
    assert chain_in(twin).schedule == chain_in(network).schedule
    tensors = [[*each.parameters(), *each.buffers()] for each in (network, twin)]
    assert not {t.data_ptr() for t in tensors[0]} & {t.data_ptr() for t in tensors[1]}
    assert same(*tensors)

    outputs = [forward(each, x) for each in (network, twin)]
    assert same(outputs[:1], outputs[1:])
    assert same(*(backward(each, y) for each, y in zip((network, twin), outputs, strict=True)))
    assert same(state(network), state(twin))  # BatchNorm's statistics

    before, schedule = state(network), chain_in(network).schedule
    chain_in(twin).schedule = "store"
    train(twin, x)
    assert same(state(network), before)
    assert not same(state(twin), before)
    assert chain_in(network).schedule == schedule


def test_a_copy_made_between_forward_and_backward_disturbs_neither(network, copier):
    x = network.example_input(3)
    other = copier(network)
    expected = backward(other, forward(other, x))
    y = forward(network, x)
    twin = copier(network)
    assert same(state(twin), state(other))  # what was read of BatchNorm, and nothing more
    train(twin, x)
    assert same(backward(network, y), expected)


def test_a_copy_is_exact_by_itself(copier):
    model = vit()
    model.exact = True
    twin = copier(model)
    assert twin.exact
    twin.exact = False
    assert model.exact
    assert [step.name for step in twin.steps] == [step.name for step in model.steps]


def test_a_state_dict_moves_between_schedules_and_arithmetics(tmp_path):
    model = revnet()
    x = model.example_input(3)
    train(model, x)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = revnet()
    other.schedule, other.exact = "store", True
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    other.exact = False
    assert same([model.eval()(x)], [other.eval()(x)])


def vit_keys() -> list[str]:
    layers = ["stem.patch_embed.proj"]
    for j in range(6):
        block = f"stages.0.blocks.{j}"
        layers += [f"{block}.{layer}" for layer in ("f.norm", "f.attn.qkv", "f.attn.proj", "g.norm", "g.mlp.fc1", "g.mlp.fc2")]
    layers += ["fuse.norm", "head.linear"]
    return ["stem.pos_embed", *(f"{layer}.{part}" for layer in layers for part in ("weight", "bias"))]


@pytest.mark.parametrize(("name", "count"), [("rev_vit_digits", 79), ("revnet_digits", 224)])
def test_state_dict_keys_depend_on_the_architecture_alone(name, count):
    keys = vit_keys() if name == "rev_vit_digits" else list(revzoo.create(name).state_dict())
    assert len(keys) == count
    for schedule in ("selective", "invert"):
        model = revzoo.create(name, schedule=schedule, exact=schedule == "invert")
        assert list(model.state_dict()) == keys
    for step in model.steps:
        step.compile()
    model.compile()
    assert list(model.state_dict()) == keys
