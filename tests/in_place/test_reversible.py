"""`reversible_` and `ordinary_`: the same network where it stands, and exact gradients in every mode."""

import copy
import io

import pytest
import torch
from torch import nn

import revzoo
from revzoo.analysis.chains import find_block_chains
from revzoo.errors import InputError, RecoveryError
from tests.in_place.networks import NETWORKS, SPLIT, TEXT, Tanh, Toy, X, assert_equal, compute_loss, gpt2, train_step


def make_case(name):
    make, path, batch = NETWORKS[name]
    return make(), path, batch


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_network_stays_what_it_is_with_nearly_its_function_and_comes_back(name):
    model, path, batch = make_case(name)
    kinds = {name: type(m) for name, m in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    gradients, _ = train_step(model, batch)
    with torch.no_grad():
        before = model.eval()(**batch)
        report = revzoo.reversible_(model, path, batch=batch)
        after = model(**batch)
    before, after = (y if isinstance(y, torch.Tensor) else y.logits for y in (before, after))
    assert 0 < (before - after).abs().max() < 0.02 * before.abs().max()
    assert report.similarity.least_cosine == torch.cosine_similarity(before, after, dim=-1).min() > 0.9999
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert report.steps == len(model.get_submodule(path))
    assert f"{path}: {report.steps} steps, each a {type(model.get_submodule(path)[0]).__name__}" in str(report)
    assert not model.training
    assert not all(torch.equal(g, gradients[name]) for name, g in train_step(model, batch)[0].items())
    revzoo.ordinary_(model)
    assert_equal(train_step(model, batch)[0], gradients)
    assert all("forward" not in m.__dict__ for m in model.modules())
    with pytest.raises(InputError, match="nothing can be undone"):
        revzoo.ordinary_(model)


@pytest.mark.parametrize(("name", "split"), [*((name, None) for name in NETWORKS), ("llama", SPLIT)])
def test_gradients_are_those_of_storing(name, split):
    model, path, batch = make_case(name)
    report = revzoo.reversible_(model, path, batch=batch, split=split)
    stored, stored_bytes = train_step(model, batch, "store")
    assert stored.keys() == dict(model.named_parameters()).keys()
    for schedule in ("invert", "recompute", "selective"):
        gradients, kept = train_step(model, batch, schedule)
        assert_equal(gradients, stored)
        assert kept < stored_bytes
    mixed = ["invert", "store", "invert", "recompute", "invert", "invert"][: report.steps]
    assert_equal(train_step(model, batch, mixed)[0], stored)


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("vit", torch.float16)])
def test_a_model_in_half_precision_computes_in_it_with_states_in_float32(name, dtype):
    model, path, batch = make_case(name)
    model = model.to(dtype)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    model.eval()
    with torch.no_grad():
        before = model(**batch)
        report = revzoo.reversible_(model, path)
        after = model(**batch)
    before, after = (y if isinstance(y, torch.Tensor) else y.logits for y in (before, after))
    assert after.dtype is before.dtype is dtype
    assert torch.cosine_similarity(before.float(), after.float(), dim=-1).min() > 0.999
    seen = []
    for block in model.get_submodule(path):
        block.register_forward_hook(lambda m, args, out: seen.append(out if isinstance(out, torch.Tensor) else out[0]))
    stored, _ = train_step(model, batch, "store")
    assert_equal(train_step(model, batch, "invert")[0], stored)
    assert {x.dtype for x in seen} == {dtype}
    assert len(seen) == 2 * report.steps  # hooks see each state once, not again in backward


def test_a_model_under_autocast_has_the_gradients_of_storing():
    model, path, batch = make_case("bert")
    revzoo.reversible_(model, path)
    gradients = []
    for schedule in ("store", "invert"):
        for chain in find_block_chains(model).values():
            chain.schedule = schedule
        model.train().zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute_loss(model(**batch))
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(gradients[1], gradients[0])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e3])
def test_a_grid_fits_the_states_of_a_batch(scale):
    torch.manual_seed(0)
    x = torch.randn(8, 6) * scale
    toy = Toy(*[Tanh(lambda m, x: x + scale * m.layer(x / scale).tanh()) for _ in range(4)])
    report = revzoo.reversible_(toy, batch=x)
    assert report.similarity.least_cosine > 0.9999
    largest = toy.blocks[0](x).abs().max()
    assert report.chains[0].coupling.fraction_bits == {1e-6: 35, 1.0: 16, 3e3: 6}[scale]
    assert largest < 2.0 ** (24 - report.chains[0].coupling.fraction_bits)
    revzoo.ordinary_(toy)
    revzoo.reversible_(toy)
    if scale > 1:
        with pytest.raises(RecoveryError, match="fraction_bits"):
            toy(x)


@pytest.mark.parametrize(("through", "split"), [("deepcopy", None), ("file", None), ("file", SPLIT)])
def test_copies_are_reversible_and_independent(through, split):
    model = gpt2()
    ordinary, _ = train_step(model, TEXT)
    revzoo.reversible_(model, batch=TEXT, split=split)
    expected, kept = train_step(model, TEXT)
    if through == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    revzoo.ordinary_(model)
    gradients, other_kept = train_step(other, TEXT)
    assert_equal(gradients, expected)
    assert other_kept == kept
    assert_equal(train_step(model, TEXT)[0], ordinary)


def test_the_longest_list_is_taken_and_named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.short, self.long = Toy(Tanh(), Tanh()), Toy()

    report = revzoo.reversible_(two := Two())
    assert [chain.path for chain in report.chains] == ["long.blocks"]
    assert report.left == ("short.blocks",)
    assert "left as they are: short.blocks; name them to make them reversible, too" in str(report)
    assert [chain.path for chain in revzoo.reversible_(two, "short.blocks").chains] == ["short.blocks"]
    assert list(find_block_chains(two)) == ["short.blocks", "long.blocks"]
    revzoo.ordinary_(two)
    report = revzoo.reversible_(two, "short.blocks", "long.blocks", kept_bits=4)
    assert report.steps == 6
    assert report.kept_bytes_per_element == (8.5, 9.5)


def test_the_report_in_words():
    torch.manual_seed(0)
    assert str(revzoo.reversible_(Toy(), batch=X)).splitlines() == [
        "Toy: momentum coupling, 8 bits kept of every element and step",
        "blocks: 4 steps, each a Tanh; they keep 11 bytes for every element of the state (their inputs alone would be 16 in "
        "float32, 8 in half precision), on a grid of 2^-16",
        "outputs before and after, 4 examples: cosine 0.999998, at least 0.999997",
        "peak of a training step on this batch: 1.9 KiB stored, 1.8 KiB with gradient checkpointing of the blocks, 1.9 KiB "
        "reversible",
        "Not worth it on this batch: most of the peak is outside of the blocks, or in one of them while it runs again in "
        "backward. revzoo.plan of the ordinary network reaches checkpointing's peak in less time; split= holds half a block at "
        "a time, tiles=8 an eighth.",
    ]


def test_a_weight_changed_before_backward_is_noticed():
    toy = Toy()
    revzoo.reversible_(toy)
    loss = toy(X).sum()
    with torch.no_grad():
        toy.blocks[1].layer.weight.mul_(2)
    with pytest.raises(RecoveryError, match="'layer.weight' of blocks.1 was changed in place"):
        loss.backward()


class Force(Toy):
    """Its forward differentiates, with respect to positions or to weights as in an inner loop."""

    def __init__(self, of_weights):
        super().__init__()
        self.of_weights = of_weights

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        (force,) = torch.autograd.grad(energy.sum(), self.head.weight if self.of_weights else x, create_graph=True)
        return energy, force


@pytest.mark.parametrize("of_weights", [False, True])
def test_a_forward_that_differentiates_runs_on_the_batch(of_weights):
    model = Force(of_weights)
    report = revzoo.reversible_(model, batch=X)
    assert (report.steps, report.restarts, report.ordinary) == (4, (), ())
    assert report.similarity.cosine == pytest.approx(1, abs=1e-4)
    assert "training mode" not in str(report)
