"""The twins that specs name: they build, on the meta device, with the parameters that the spec states."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F

import revzoo
from revzoo.analysis.counting import report_model
from revzoo.analysis.resnet import RESNETS, ResNet
from revzoo.analysis.twin import build_twin
from tests.parts.test_revnet import unit

ELSEWHERE = {"pyslowfast"}  # known, and not installable
SMALL = [
    "irevnet_300",
    "rev_bert_base",
    "rev_gpt_20m",
    "rev_llama_1b",
    "rev_mvit_t",
    "rev_swin_t",
    "rev_vit_ti",
    "revnet_38",
]  # of each family with twins


def parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_the_twin_has_the_stated_parameters(name):
    spec = revzoo.load_spec(name)
    if spec.twin["library"] == "transformers":
        pytest.importorskip("transformers")
    twin = build_twin(spec)
    assert {p.device.type for p in twin.parameters()} == {"meta"}
    assert parameters(twin) == spec.twin["parameters"]


@pytest.mark.slow
def test_every_twin_has_the_stated_parameters():
    specs = map(revzoo.load_spec, revzoo.list_models())
    named = [spec for spec in specs if spec.twin is not None and spec.twin["library"] not in ELSEWHERE]
    assert len(named) >= 40
    assert {spec.twin["library"] for spec in named} == {"revzoo", "timm", "transformers"}
    different = {repr((spec.twin, spec.input, spec.head.arguments.get("outputs"))): spec for spec in named}
    sizes = {spec.name: (parameters(build_twin(spec)), spec.twin["parameters"]) for spec in different.values()}
    assert {name: pair for name, pair in sizes.items() if pair[0] != pair[1]} == {}


def test_a_twin_takes_the_spec_s_input_and_classes():
    overrides = ["input.size=[64,64]", "input.channels=1", "head.outputs=7"]
    for name in ("rev_vit_ti", "revnet_56"):
        spec = revzoo.load_spec(name, overrides)
        assert build_twin(spec)(torch.empty(2, 1, 64, 64, device="meta")).shape == (2, 7)


def test_arguments_of_a_twin_go_first():
    spec = revzoo.load_spec("rev_vit_ti", ["twin.arguments={depth: 1, num_classes: 3}"])
    twin = build_twin(spec)
    assert (len(twin.blocks), twin.num_classes) == (1, 3)


def test_why_there_is_no_twin(monkeypatch):
    assert build_twin(revzoo.load_spec("rev_vit_digits")) == "rev_vit_digits names no twin"

    def reason(library, name="nothing_of_the_kind"):
        return build_twin(revzoo.load_spec("rev_vit_ti", [f"twin={{library: {library}, name: {name}}}"]))

    assert "not built here, only those of timm, transformers, revzoo" in reason("keras")
    for library in ("timm", "transformers", "revzoo"):
        assert reason(library).startswith(f"{library} cannot build nothing_of_the_kind for rev_vit_ti: ")
    assert "deepness" in build_twin(revzoo.load_spec("rev_vit_ti", ["twin.arguments={deepness: 1}"]))
    assert "leave pretrained out" in build_twin(revzoo.load_spec("rev_vit_ti", ["twin.arguments={pretrained: true}"]))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers" in reason("transformers").partition(": ")[2]


def test_a_twin_that_does_not_take_the_input_is_no_reason_to_stop():
    spec = revzoo.load_spec(
        "rev_vit_digits", ["stages.0.depth=1", "twin={library: timm, name: resnet18, arguments: {in_chans: 3}}"]
    )
    with torch.device("meta"):
        twin = report_model(revzoo.build(spec), batch_size=1).twin
    assert (twin.parameters, twin.memory) == (None, None)
    assert re.match(r"it does not take the model's input \(.*conv1 \(Conv2d\).*got 1 channels", twin.problem)


def test_resnet_is_the_formula():
    """With one unit a stage: the first ones of the stages, whose shortcuts differ, are all there is to get wrong."""
    model = ResNet(RESNETS["resnet_32"]._replace(depths=(1, 2, 1)), 3, (8, 8), 5)
    x = torch.randn(2, 3, 8, 8)
    expected = model.stem(x)
    for block, stride in zip(model.blocks, (1, 2, 1, 2), strict=True):
        short = expected
        if stride == 2:
            short = F.avg_pool2d(short, 2)
            zeros = torch.zeros(2, short.shape[1] // 2, *short.shape[2:])
            short = torch.cat((zeros, short, zeros), 1)
        expected = short + unit(expected, block.f.parameters(), (3, 3), stride, preactivate=block is not model.blocks[0])
    norm = model.norm
    pooled = F.relu(F.batch_norm(expected, None, None, norm.weight, norm.bias, True, eps=1e-3)).mean((2, 3))
    torch.testing.assert_close(model(x), model.linear(pooled))


def test_a_checkpointed_resnet_keeps_less_and_has_the_same_gradients():
    model = ResNet(RESNETS["resnet_32"]._replace(depths=(2, 1, 1)), 3, (8, 8), 5)
    x = torch.randn(2, 3, 8, 8)
    gradients, kept = [], []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        kept.append(revzoo.measure_memory(model, x).activation_bytes)
        gradients.append(torch.autograd.grad(model(x).sum(), model.parameters()))
    assert all(map(torch.equal, *gradients))
    assert kept[1] < 0.7 * kept[0]
