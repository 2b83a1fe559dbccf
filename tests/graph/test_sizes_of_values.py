"""Networks with tensors whose size depends on values: sparse and nested ones, and paddings that a buffer says."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revzoo
from revzoo.analysis.flops import count_flops
from revzoo.errors import InputError, MissingValueError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # CSR is in beta state


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Graph(Net):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.sparse.mm(edges, self.run(x))


class HoldsGraph(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("edges", EDGES.to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        return self.edges @ self.run(x)


class MakesGraph(Net):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return edges.to_sparse_csr() @ self.run(x)


class Bags(Net):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(32, 16, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(self.bag(tokens))


class Pad(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)
        self.register_buffer("padding", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        padding = (self.padding, 0)
        x = x * 2 if x.shape[-1] <= max(padding) else x
        return x + F.dropout(self.conv(F.pad(x, padding, mode="reflect")).relu(), 0.1)


def make_padded() -> nn.Module:
    return nn.Sequential(*(Pad() for _ in range(2)))


EDGES = (draw(20, 20) > 1).float()
CASES = {
    "COO in the batch": (Graph, (draw(20, 16), EDGES.to_sparse())),
    "CSR in a buffer": (HoldsGraph, draw(20, 16)),
    "CSR made in forward": (MakesGraph, (draw(20, 16), EDGES)),
    "gradient of bags": (Bags, torch.arange(32).view(32, 1)),
    "a buffer as a size": (make_padded, draw(2, 4, 64)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_its_plan_promises(name: str, same_step):
    torch._dynamo.reset()
    make, batch = CASES[name]
    module, plain = make(), make()
    plain.load_state_dict(module.state_dict())
    stored = revzoo.measure_memory(module, batch).peak_bytes
    plan = revzoo.plan(module, batch, stored - 1)
    assert plan.drops_something
    assert plan.no_recompute_peak_bytes == stored
    plan.apply(module, batch)
    assert revzoo.measure_memory(module, batch).peak_bytes == plan.peak_bytes < stored
    same_step(module, plain, batch)


def test_gradients_of_bags_count_without_values():
    tokens = torch.arange(256).view(8, 32) % 32
    module = Bags()
    with torch.device("meta"):
        twin = Bags()
    counted, measured = (revzoo.measure_memory(m, t).peak_bytes for m, t in ((twin, tokens.to("meta")), (module, tokens)))
    assert counted == measured


def test_other_sparse_tensors_have_no_size_without_values():
    with pytest.raises(MissingValueError, match="of layout torch.sparse_coo: its size depends on its values"):
        count_flops(Graph(), CASES["COO in the batch"][1])
    with torch.device("meta"):
        module, batch = MakesGraph(), (torch.empty(20, 16), torch.empty(20, 20))
    with pytest.raises(MissingValueError, match="MakesGraph.*the size of a sparse tensor depends on values"):
        revzoo.measure_memory(module, batch)
    with pytest.raises(InputError, match="MakesGraph cannot run without values"):
        revzoo.plan(module, batch, "1MiB")


def test_a_reversible_network_with_sparse_tensors_is_verified_and_planned():
    for make, batch in (CASES[name] for name in ("COO in the batch", "CSR in a buffer", "gradient of bags")):
        module = make()
        revzoo.reversible_(module, batch=batch)
        assert revzoo.verify(module, batch).identical
        plan = revzoo.plan(module, batch, "1MiB")
        plan.apply(module)
        assert revzoo.measure_memory(module, batch).peak_bytes <= plan.peak_bytes


class MakesNested(Net):
    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(x, offsets)
        return self.layers[0].linear(nested).values()


class TakesNested(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0].linear(x).values()


def test_nested_tensors_are_refused():
    torch._dynamo.reset()
    rows, offsets = draw(17, 16), torch.tensor([0, 4, 9, 17])
    nested = torch.nested.nested_tensor_from_jagged(rows, offsets)
    for module, batch, where in (
        (MakesNested(), (rows, offsets), r"nested_view_from_values_offsets\w*"),
        (TakesNested(), (nested,), "its batch"),
    ):
        with pytest.raises(InputError, match=f"{type(module).__name__} cannot be planned.*a nested tensor in {where}\\. Plan"):
            revzoo.plan(module, batch, "1MiB")
