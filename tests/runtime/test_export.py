"""torch.export and ONNX of what a user deploys: the eval model, which is the plain forward in every mode."""

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
SHORT = ["stages.0.depth=1"]


def export(model: revzoo.Model) -> torch.export.ExportedProgram:
    return torch.export.export(model, (model.example_input(2),), dynamic_shapes=({0: BATCH},))


def run_onnx(program: torch.export.ExportedProgram, x: Tensor) -> Tensor:
    """Convert, check against the ONNX standard and run with its reference implementation."""
    proto = torch.onnx.export(program, dynamo=True, verbose=False).model_proto
    onnx.checker.check_model(proto, full_check=True)
    (out,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    return torch.from_numpy(out)


def test_a_class_token_takes_any_batch():
    """As converted networks of timm have it; `len` of a tensor would make the batch a constant."""
    model = revzoo.create("rev_vit_digits", overrides=[*SHORT, "stem.class_token=true"]).eval()
    x = model.example_input(5)
    with torch.no_grad():
        assert torch.equal(export(model).module()(x), model(x))


def test_an_exported_model_and_its_onnx_give_the_models_outputs():
    model = revzoo.create("rev_vit_digits", exact=True, overrides=SHORT)
    program = export(model.eval())
    x = model.example_input(5)  # not the batch it was exported with
    with torch.no_grad():
        logits = model(x)
        model.exact = False
        assert not torch.equal(model(x), logits)  # rounding is part of the function
    assert torch.equal(program.module()(x), logits)
    torch.testing.assert_close(run_onnx(program, x), logits, rtol=1e-4, atol=1e-4)  # one step of the grid is 1.5e-5


@pytest.mark.parametrize("schedule", ["store", "invert", ["selective", "invert", "recompute"]])
def test_an_exported_chain_gives_the_chains_outputs_in_every_mode(schedule):
    def unit(width: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    chain = ReversibleChain([unit(2), unit(2), SpaceToDepth(), unit(8)], coupling="leapfrog").eval()
    chain.schedule = schedule
    example = tuple(torch.randn(2, 3, 2, 4, 4).unbind())
    program = torch.export.export(chain, example, dynamic_shapes=({0: BATCH}, {0: BATCH}))
    assert sum(str(node.target) == "aten.conv2d.default" for node in program.graph.nodes) == 3
    streams = torch.randn(2, 6, 2, 4, 4).unbind()
    for out, expected in zip(program.module()(*streams), chain(*streams), strict=True):
        assert out.shape == (6, 8, 2, 2)
        assert torch.equal(out, expected)
