"""torch.export and ONNX of what a user deploys: the eval model, which is the plain forward in every mode."""

from collections import Counter

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import revzoo
from revzoo.runtime import ReversibleChain, SpaceToDepth

# PyTorch 2.11 warns of itself while it traces and decomposes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
]

BATCH = torch.export.Dim("batch")
SHORT = {
    "rev_vit_digits": ["stages.0.depth=1"],
    "revnet_digits": ["stages=[{depth: 1, width: 16, transition: {type: residual_pair, preactivate: false}}]"],
}


def trained(name: str, *, exact: bool = False, short: bool = False) -> revzoo.Model:
    """Return a model in eval mode whose norms have statistics of their own."""
    model = revzoo.create(name, exact=exact, overrides=SHORT[name] if short else None)
    model(model.example_input(8))
    return model.eval()


def export(model: revzoo.Model, strict: bool = False) -> torch.export.ExportedProgram:
    return torch.export.export(model, (model.example_input(2),), dynamic_shapes=({0: BATCH},), strict=strict)


def run_onnx(program: torch.export.ExportedProgram, x: Tensor) -> Tensor:
    """Convert, check against the ONNX standard and run with its reference implementation."""
    proto = torch.onnx.export(program, dynamo=True, verbose=False).model_proto
    onnx.checker.check_model(proto, full_check=True)
    (out,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    return torch.from_numpy(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_an_exported_model_and_its_onnx_give_the_models_outputs(name):
    model = trained(name)
    program = export(model)
    x = model.example_input(5)  # not the batch it was exported with
    with torch.no_grad():
        logits = model(x)
    assert torch.equal(program.module()(x), logits)
    torch.testing.assert_close(run_onnx(program, x), logits, rtol=1e-5, atol=1e-5)


def test_a_class_token_takes_any_batch():
    """As converted networks of timm have it; `len` of a tensor would make the batch a constant."""
    model = revzoo.create("rev_vit_digits", overrides=[*SHORT["rev_vit_digits"], "stem.class_token=true"]).eval()
    x = model.example_input(5)
    with torch.no_grad():
        assert torch.equal(export(model).module()(x), model(x))


@pytest.mark.parametrize("name", ["rev_vit_digits", pytest.param("revnet_digits", marks=pytest.mark.slow)])
def test_exact_arithmetic_is_exported_too(name):
    model = trained(name, exact=True, short=True)
    program = export(model)
    x = model.example_input(5)
    with torch.no_grad():
        logits = model(x)
        model.exact = False
        assert not torch.equal(model(x), logits)  # rounding is part of the function
    assert torch.equal(program.module()(x), logits)
    torch.testing.assert_close(run_onnx(program, x), logits, rtol=1e-4, atol=1e-4)  # one step of the grid is 1.5e-5


def operations(model: revzoo.Model) -> Counter[str]:
    return Counter(str(node.target) for node in export(model, strict=True).graph.nodes if node.op == "call_function")


@pytest.mark.slow
def test_the_schedule_leaves_no_trace_in_an_export():
    model = trained("rev_vit_digits", short=True)
    inverted = operations(model)
    assert inverted["aten.linear.default"] == 5  # qkv, projection, two of the MLP, head
    for modes in ("store", ["recompute"] * len(model.units), ["selective"] * len(model.units)):
        model.schedule = modes
        assert operations(model) == inverted


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["store", "selective", "recompute", "invert"])
def test_an_exported_chain_gives_the_chains_outputs_in_every_mode(schedule, strict):
    def unit(width: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    chain = ReversibleChain([unit(2), unit(2), SpaceToDepth(), unit(8)], coupling="leapfrog").eval()
    chain.schedule = schedule
    example = tuple(torch.randn(2, 3, 2, 4, 4).unbind())
    program = torch.export.export(chain, example, dynamic_shapes=({0: BATCH}, {0: BATCH}), strict=strict)
    assert sum(str(node.target) == "aten.conv2d.default" for node in program.graph.nodes) == 3
    streams = torch.randn(2, 6, 2, 4, 4).unbind()
    for out, expected in zip(program.module()(*streams), chain(*streams), strict=True):
        assert out.shape == (6, 8, 2, 2)
        assert torch.equal(out, expected)
