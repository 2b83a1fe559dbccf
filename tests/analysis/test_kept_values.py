"""A run that writes to parameters or to the batch leaves their values, and the counts of writes, as they were."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import revzoo
from revzoo.analysis.dry_run import isolated
from revzoo.errors import RevzooError
from revzoo.runtime import LiveBytes
from tests.in_place.networks import Toy


class Momentum(nn.Module):
    """A student, and a teacher that moves towards it in every forward."""

    def __init__(self, move):
        super().__init__()
        self.move, self.student, self.teacher = move, Toy(), Toy().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.move(p, q)
        return self.student(x), self.teacher(x)


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu, self.toy = nn.ReLU(inplace=True), Toy()

    def forward(self, x):
        return self.toy(self.relu(x))


def embed():
    return nn.Sequential(nn.Embedding(9, 6, max_norm=0.5), Toy())


def move_in_place(p, q):
    p.mul_(0.9).add_(q, alpha=0.1)


def move_data(p, q):
    p.data.view(-1).lerp_(q.data.view(-1), 0.1)


def move_all(p, q):
    torch._foreach_lerp_([p], [q], 0.1)


def replace_data(p, q):
    p.data = torch.lerp(p, q, 0.1)  # bitsandbytes packs weights anew so, in its first evaluation on a CPU


X = torch.linspace(-1, 1, 24).view(4, 6)
NETWORKS = {
    "in place": (lambda: Momentum(move_in_place), X),
    "data": (lambda: Momentum(move_data), X),
    "replaced data": (lambda: Momentum(replace_data), X),
    "foreach": (lambda: Momentum(move_all), X),
    "out": (lambda: Momentum(lambda p, q: torch.add(p, q, out=p)), X),
    "max_norm": (embed, torch.arange(8).view(2, 4)),
    "batch": (Overwriting, X),
}
CALLS = {
    "measure_memory": lambda m, x: revzoo.measure_memory(m, x),
    "timed": lambda m, x: revzoo.plan(m, x, budget=None, profile=True),
    "timed blocks": lambda m, x: revzoo.reversible_(m) and revzoo.plan(m, x, "1 GB", profile=True),
    "reversible_": lambda m, x: revzoo.reversible_(m, batch=x),
    "refused": lambda m, x: revzoo.reversible_(m, batch=x, split=("attn", "mlp")),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_written_to_comes_back(name, call):
    make, x = NETWORKS[name]
    model, x = make(), x.clone()
    held = [x, *model.parameters()]
    before = [(t.detach().clone(), t._version) for t in held]
    try:
        CALLS[call](model, x)
    except RevzooError:
        assert call == "refused"
    for t, (values, version) in zip(held, before, strict=True):
        assert torch.equal(t, values)
        assert t._version == version


def test_only_what_is_written_to_is_copied_once_and_not_counted():
    model, x = Momentum(move_in_place), X.clone()
    with isolated(model, x) as inputs, LiveBytes() as live:
        weights = live.watch([model, *model.parameters()])
        model(inputs)
        weight = model.teacher.head.weight.clone()
        model(inputs)
        assert not torch.equal(model.teacher.head.weight, weight)  # inside, the teacher goes on moving
        del weight
        assert live.alive(without=weights | live.watch(inputs)) == 0


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_operators_of_higher_order_run():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            y = self.layer(x)[None, None]
            return y + flex_attention(*[y.detach()] * 3)  # on a CPU it has no backward

    model = Attention()
    with isolated(model, X) as x:
        assert torch.equal(model(x), model(X))
