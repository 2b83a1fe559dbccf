"""Every shipped spec builds, and what it expects of itself holds."""

import inspect
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import revzoo
from revzoo.errors import InputError, SpecError
from revzoo.registry import branches, couplings, fuses, heads, inits, splits, stems
from revzoo.spec import Part

# The largest networks are built in slow tests only; of the others, some of every family are also run.
SLOW_TO_BUILD = ("*_300*", "*_enwik8", "*_bert_large", "*_1024", "*_h", "rev_mvit_l", "*_g", "*_g_mlp", "*_v2_b", "*_104")
QUICK_TO_RUN = ("irevnet_injective", "*_mini", "*_digits", "rev_vit_s")
MODELS = revzoo.list_models()


def mark(is_slow):
    return [pytest.param(name, marks=pytest.mark.slow) if is_slow(name) else name for name in MODELS]


def matches(name, patterns):
    return any(fnmatch(name, pattern) for pattern in patterns)


@pytest.mark.parametrize("name", mark(lambda name: matches(name, SLOW_TO_BUILD)))
def test_every_spec_builds_on_the_meta_device_with_the_parameters_and_steps_it_expects(name):
    model = revzoo.create(name, device="meta")
    expect = model.spec.expect
    assert set(expect) >= {"parameters", "stream_shape", "reversible_steps"}
    assert sum(p.numel() for p in model.parameters()) == expect["parameters"]
    assert len(model.steps) == expect["reversible_steps"]


@pytest.mark.parametrize("name", mark(lambda name: not matches(name, QUICK_TO_RUN)))
def test_every_model_runs_with_the_streams_and_flops_it_expects(name):
    model = revzoo.create(name, device="meta")
    expect = model.spec.expect
    streams = []
    model.fuse.register_forward_pre_hook(lambda fuse, inputs: streams.append(tuple(inputs[0].shape[1:])))
    batch = model.example_input(2)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        logits = model(batch)
    assert logits.shape in ((2, model.num_outputs), (*batch.shape, model.num_outputs))
    assert streams == [tuple(expect["stream_shape"])]
    if expect.get("flops"):  # published to two or three digits, without norms and activations
        assert counter.get_total_flops() / 2 / 2 == pytest.approx(expect["flops"], rel=0.02)


def test_drop_path_grows_linearly_over_the_whole_network():
    model = revzoo.create("rev_vit_b", device="meta")
    rates = [step.drop_path.drop_prob for step in model.steps]
    torch.testing.assert_close(rates[::2], torch.linspace(0, 0.2, 12).tolist())
    assert rates[::2] == rates[1::2]
    constant = revzoo.create("rev_vit_b", overrides=["block.drop_path.rule=constant"], device="meta")
    assert {step.drop_path.drop_prob for step in constant.steps} == {0.2}


def problems(name: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as error:
        revzoo.create(name, overrides=overrides, device="meta")
    return [f"{p.path}: found {p.received}; allowed: {p.allowed}" for p in error.value.problems]


@pytest.mark.parametrize(
    ("name", "overrides", "named"),
    [
        ("rev_vit_digits", ["stages.0.width=60", "block.f.heads=7"], ["stages.0.width: found 60", "stages.0.f.heads: found 7"]),
        (
            "revnet_38",
            ["stages.1.width=31", "stages.2.transition.stride=3"],
            ["stages.1.transition.layout: found 'basic'", "stages.2.transition.stride: found 3"],
        ),
        (
            "revnet_38",
            ["block.f={type: attention, heads: 2}", "fuse.norm=layer_norm"],
            [*(f"stages.{i}.f.type: found 'attention'" for i in range(3)), "fuse.norm: found 'layer_norm'"],
        ),
    ],
)
def test_parts_that_do_not_fit_are_all_named(name, overrides, named):
    assert [problem.partition("; allowed")[0] for problem in problems(name, *overrides)] == named


def test_both_places_of_a_width_are_named():
    for name, override, hint in (
        ("rev_vit_digits", "stages.0.width=60", "Set stages.0.width=64 or stem.width=60."),
        ("rev_vit_digits", "stem.width=60", "Set stages.0.width=60 or stem.width=64."),
        ("irevnet_cifar10", "stages.0.width=20", "Set stages.0.width=16 or stem.width=40."),  # half the channels to each stream
        (
            "rev_vit_digits",
            f"stages={[{'depth': 1, 'width': w} for w in (64, 32)]}",
            "Set stages.1.width=64 or stages.0.width=32.",
        ),
    ):
        with pytest.raises(SpecError) as error:
            revzoo.create(name, overrides=[override], device="meta")
        assert error.value.problems[0].hint == f" {hint}"


def test_any_registered_coupling_builds_and_trains():
    for coupling in ("{type: momentum, m: 0.5}", "{type: midpoint, h: 0.1}", "leapfrog"):
        model = revzoo.create("rev_vit_digits", overrides=[f"block.coupling={coupling}"])
        model(model.example_input(2)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "override", "path", "allowed"),
    [
        ("rev_vit_digits", "input=3", "input", "a mapping with the key kind: 'image' or 'text'"),
        ("rev_vit_digits", "stem.patch=0", "stem.patch", "an integer >= 1"),
        ("rev_vit_digits", "stages.0.g.ratio=.nan", "stages.0.g.ratio", "a finite number > 0"),
        ("rev_vit_digits", "stages.0.depth=10001", "stages.0.depth", "an integer from 1 to 10000"),
        ("revnet_digits", "fuse.momentum=0", "fuse.momentum", "a number in (0, 1]"),
        ("revnet_digits", "block.coupling={type: momentum, m: 1}", "block.coupling.m", "null or a number in [0, 1)"),
    ],
)
def test_a_number_out_of_range_is_named(name, override, path, allowed):
    (problem,) = problems(name, override)
    assert problem.startswith(f"{path}: found ")
    assert f"; allowed: {allowed}" in problem


def test_what_only_torch_can_refuse_is_named_too():
    (problem,) = problems("rev_vit_digits", f"stages.0.g.ratio={1e300}")
    assert problem.startswith("stages.0.g: found {'type': 'mlp', 'ratio': 1e+300")
    assert "; allowed: a size that torch can build (" in problem


def test_the_line_of_a_part_of_ones_own_is_named(monkeypatch):
    class Strict(torch.nn.Module):
        def __init__(self, context, *, size: int = 3):
            raise ValueError(f"{size} is odd")

    monkeypatch.setitem(branches._entries, "strict", Strict)
    line = inspect.getsourcelines(Strict)[1] + 2
    with pytest.raises(SpecError, match=rf"a part that can be built \(ValueError: 3 is odd, in line {line} of {__file__}\)"):
        revzoo.create("irevnet_digits", overrides=["stages=[{depth: 1, width: 64, f: {type: strict}}]"])


class Bare(torch.nn.Module):
    def __init__(self, context):
        super().__init__()


class Uninitialised(torch.nn.Module):
    def __init__(self, context):
        pass


@pytest.mark.parametrize(
    ("registry", "make", "override", "allowed"),
    [
        (stems, Bare, "stem={type: own}", "out_shape"),
        (heads, Bare, "head={type: own}", "an integer attribute outputs"),
        (branches, Uninitialised, "block.f={type: own}", "super().__init__()"),
        (couplings, lambda: 3, "block.coupling={type: own}", "a revzoo.runtime.Coupling"),
        (inits, lambda: 3, "init={type: own}", "a function of a module"),
    ],
)
def test_parts_of_ones_own_are_what_the_network_needs(registry, make, override, allowed, monkeypatch):
    monkeypatch.setattr(registry, "_entries", registry._load() | {"own": make})
    for problem in problems("rev_vit_digits", override):
        assert ".type: found 'own'" in problem
        assert allowed in problem


def test_what_a_base_wrote_is_placed_there(tmp_path):
    (tmp_path / "base.yaml").write_text("name: base\nbase: rev_vit_digits\nblock: {f: {heads: 5}}\n")
    (tmp_path / "mine.yaml").write_text("name: mine\nbase: base.yaml\n")
    with pytest.raises(SpecError, match=rf"{tmp_path}/base.yaml: stages.0.f.heads: found 5"):
        revzoo.create(tmp_path / "mine.yaml", device="meta")


@pytest.mark.parametrize(
    ("registry", "override", "message"),
    [
        (splits, "split={type: own}", "split must return two tensors. Received: Tensor."),
        (fuses, "fuse={type: own}", "fuse must return one or more tensors. Received: NoneType."),
    ],
)
def test_what_parts_of_ones_own_return_is_checked(registry, override, message, monkeypatch):
    class Own(torch.nn.Module):
        def __init__(self, context):
            super().__init__()
            self.out_shape = context.shape

        def forward(self, *inputs):
            return inputs[0] if len(inputs) == 1 else None

    monkeypatch.setattr(registry, "_entries", registry._load() | {"own": Own})
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1", override])
    with pytest.raises(InputError, match=message):
        model(model.example_input(2))


def test_build_takes_a_spec():
    with pytest.raises(InputError, match=r"Received: 'revnet_digits'\. Use revzoo\.create\(name\)"):
        revzoo.build("revnet_digits")
    spec = revzoo.load_spec("revnet_digits")
    bare = replace(spec, block=replace(spec.block, coupling=Part("momentum", {"m": 1.0}, "block.coupling")))
    with pytest.raises(SpecError, match=r"block\.coupling: found .*'m': 1\.0.*; allowed: A coupling with c = 0"):
        revzoo.build(bare)


def test_more_blocks_than_can_be_built(tmp_path):
    (tmp_path / "spec.yaml").write_text("base: rev_vit_digits\nstages: [" + "{depth: 10000, width: 64}," * 2 + "]")
    with pytest.raises(SpecError, match="stages: found 20000 blocks; allowed: stages of at most 10000 blocks together"):
        revzoo.load_spec(tmp_path / "spec.yaml")
