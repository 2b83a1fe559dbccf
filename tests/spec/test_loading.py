"""Specs resolve to what is written, and whatever is wrong is said once, where it stands."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import SPEC

from revzoo.errors import SpecError, UnknownNameError
from revzoo.spec import DropPath, Input, Part, Stage, list_models, load_spec, names, recipe_file, spec_file

pytestmark = pytest.mark.usefixtures("toys")


GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> str:
    return (GOLDEN / name).read_text(encoding="utf-8").rstrip("\n")


def message(call, *arguments) -> str:
    with pytest.raises(SpecError) as caught:
        call(*arguments)
    return str(caught.value)


def test_spec_is_resolved(write):
    spec = load_spec(write(SPEC))

    assert (spec.name, spec.family, spec.file) == ("toy", "toys", "toy.yaml")
    assert spec.input == Input("image", 3, (32, 32))
    assert spec.stem == Part("patches", {"width": 8, "patch": 4})
    assert spec.coupling == Part("additive")
    assert spec.drop_path == DropPath(0.1, "linear")
    mlp = Part("mlp", {"ratio": 4.0})
    assert spec.stages == (
        Stage(2, 8, Part("attention", {"heads": 2}), mlp),
        Stage(3, 16, Part("attention", {"heads": 4}), mlp, Part("merging")),
    )
    assert (spec.init, spec.twin, spec.expect) == (None, None, {})
    assert spec.stages[1].f.path == "stages.1.f"
    assert spec.coupling.path == "block.coupling"
    assert isinstance(spec.stages[0].g.arguments["ratio"], float)


def test_stage_changes_removes_or_replaces_the_shared_branches(write):
    text = SPEC.replace("width: 8}\n", "width: 8, g: null}\n", 1).replace("f: {heads: 4}", "f: {type: conv}, g: mlp")
    first, second = load_spec(write(text)).stages

    assert (first.f, first.g) == (Part("attention", {"heads": 2}), None)
    assert (second.f, second.g) == (Part("conv"), Part("mlp"))


def test_stages_may_complete_a_template_or_do_without(write):
    completed = SPEC.replace("f: {type: attention, heads: 2}", "f: attention").replace(
        "depth: 2,", "depth: 2, f: {type: attention, heads: 1},"
    )
    text = message(load_spec, write(completed))
    # The second stage gives only `heads` over a bare name, and a map over a name replaces it.
    assert text == "1 problem found:\n  toy.yaml: stages.1.f.type: found nothing; allowed: one of attention, conv, mlp."
    assert load_spec(write(completed.replace("f: attention", "f: {type: attention}"))).stages[0].f.arguments == {
        "heads": 1
    }


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("stages.0.depth=6", lambda spec: spec.stages[0].depth == 6),
        ("stages[1].depth=6", lambda spec: spec.stages[1].depth == 6),
        ("stages.0.f.heads=1", lambda spec: [stage.f.arguments["heads"] for stage in spec.stages] == [1, 4]),
        ("stages.1.transition=null", lambda spec: spec.stages[1].transition is None),
        ("head.outputs=100", lambda spec: spec.head.arguments == {"outputs": 100}),
        ("block.coupling={type: momentum, m: 1}", lambda spec: spec.coupling == Part("momentum", {"m": 1.0})),
        ("block.g={type: conv, kernel: [1, 7]}", lambda spec: spec.stages[0].g == Part("conv", {"kernel": (1, 7)})),
        ("block.drop_path.rule=constant", lambda spec: spec.drop_path == DropPath(0.1, "constant")),
        ("init.type=normal", None),
        ("input.size=[8,16]", lambda spec: spec.input.size == (8, 16)),
        ("input.size.1=16", lambda spec: spec.input.size == (32, 16)),
        ("stem.patch=[2, 4]", lambda spec: spec.stem.arguments["patch"] == (2, 4)),
        ("block.drop_path.max=1e-3", lambda spec: spec.drop_path.max == 0.001),
    ],
)
def test_override(write, override, read):
    path = write(SPEC)
    if read is None:
        assert message(load_spec, path, [override]) == (
            "1 problem found:\n  override: init.std: found nothing; allowed: a number."
        )
    else:
        assert not read(load_spec(path))
        assert read(load_spec(path, [override]))


def test_a_later_override_wins(write):
    assert load_spec(write(SPEC), ["head.outputs=3", "head.outputs=4"]).head.arguments == {"outputs": 4}


def test_every_wrong_override_is_reported(write):
    overrides = [
        "depth",
        "=3",
        "stages..depth=3",
        "stages.2.depth=6",
        "stages.first.depth=6",
        "stages.0.dept=6",
        "stage.0.depth=6",
        "head.output=3",
        "head.outputs=[1,",
        "block.coupling.m=1",
        "stages.0.depth=no",
        "base=rev",
    ]
    assert message(load_spec, write(SPEC), overrides) == golden("overrides.txt")


def test_every_problem_of_a_spec_is_reported_once(write):
    assert message(load_spec, write(golden("problems.yaml"))) == golden("problems.txt")
