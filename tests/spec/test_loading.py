"""Specs resolve to what is written, and whatever is wrong is said once, where it stands."""

from pathlib import Path

import pytest
import yaml

from revzoo.errors import RevzooError, SpecError
from revzoo.spec import DropPathSpec, ImageInput, Part, StageSpec, list_models, load_spec, names

pytestmark = pytest.mark.usefixtures("toys")


GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> str:
    return (GOLDEN / name).read_text(encoding="utf-8").rstrip("\n")


SPEC = """
name: toy
family: toys
sources: [{of: all, cite: nowhere}]
input: {kind: image, channels: 3, size: [32, 32]}
stem: {type: patches, width: 8, patch: 4}
split: {type: duplicate}
block:
  coupling: additive
  f: {type: attention, heads: 2}
  g: {type: mlp, ratio: 4}
  drop_path: {max: 0.1}
stages:
  - {depth: 2, width: 8}
  - {depth: 3, width: 16, f: {heads: 4}, transition: {type: merging}}
fuse: {type: concat}
head: {type: linear, outputs: 10}
"""


def message(call, *arguments) -> str:
    with pytest.raises(RevzooError) as caught:
        call(*arguments)
    return str(caught.value)


def test_spec_is_resolved(write):
    spec = load_spec(write(SPEC))

    assert (spec.name, spec.family, spec.file) == ("toy", "toys", "toy.yaml")
    assert spec.input == ImageInput("image", 3, (32, 32))
    assert spec.stem == Part("patches", {"width": 8, "patch": 4})
    assert spec.coupling == Part("additive")
    assert spec.drop_path == DropPathSpec(0.1, "linear")
    mlp = Part("mlp", {"ratio": 4.0})
    assert spec.stages == (
        StageSpec(2, 8, Part("attention", {"heads": 2}), mlp),
        StageSpec(3, 16, Part("attention", {"heads": 4}), mlp, Part("merging")),
    )
    assert (spec.init, spec.twin, spec.expect) == (None, None, {})
    assert spec.stages[1].f.path == "stages.1.f"
    assert spec.coupling.path == "block.coupling"
    assert isinstance(spec.stages[0].g.arguments["ratio"], float)


def test_stage_changes_removes_or_replaces_the_shared_branches(write):
    text = SPEC.replace("width: 8}\n", "width: 8, g: null}\n", 1).replace("f: {heads: 4}", "f: {type: conv}, g: mlp")
    first, second = load_spec(write(text)).stages

    assert (first.f, first.g) == (Part("attention", {"heads": 2}), None)
    assert (second.f, second.g) == (Part("conv"), Part("mlp", {"ratio": 4.0}))


def test_stages_may_complete_a_template(write):
    shared = SPEC.replace("f: {type: attention, heads: 2}", "f: attention")
    assert message(load_spec, write(shared)) == (
        "1 problem found:\n  toy.yaml: block.f.heads: found nothing; allowed: an integer."
    )
    spec = load_spec(write(shared.replace("depth: 2,", "depth: 2, f: {type: attention, heads: 1}, g: mlp,")))
    assert [stage.f for stage in spec.stages] == [Part("attention", {"heads": 1}), Part("attention", {"heads": 4})]
    assert spec.stages[0].g == Part("mlp", {"ratio": 4.0}), "a bare name is the same as a map with that type"


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("stages.0.depth=6", lambda spec: spec.stages[0].depth == 6),
        ("stages[1].depth=6", lambda spec: spec.stages[1].depth == 6),
        ("stages.0.f.heads=1", lambda spec: [stage.f.arguments["heads"] for stage in spec.stages] == [1, 4]),
        ("stages.1.transition=null", lambda spec: spec.stages[1].transition is None),
        ("block.coupling={type: momentum, m: 1}", lambda spec: spec.coupling == Part("momentum", {"m": 1.0})),
        ("block.g={type: conv, kernel: [1, 7]}", lambda spec: spec.stages[0].g == Part("conv", {"kernel": (1, 7)})),
        ("init.type=normal", None),
        ("input.size=[8,16]", lambda spec: spec.input.size == (8, 16)),
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
    ]
    assert message(load_spec, write(SPEC), overrides) == golden("overrides.txt")


def test_every_problem_of_a_spec_is_reported_once(write):
    assert message(load_spec, write(golden("problems.yaml"))) == golden("problems.txt")


@pytest.mark.parametrize("overrides", [(), ("stages.0.g=null", "stages.1.f={type: conv, kernel: [1, 3]}", "init=null")])
def test_round_trip(write, overrides):
    spec = load_spec(write(SPEC + "init: {type: normal, std: 0.02}\nexpect: {parameters: 3, stream_shape: [4, 8]}"), overrides)
    again = load_spec(write(spec.to_yaml(), "run/spec.yaml"))

    assert again == spec
    assert again.to_yaml() == spec.to_yaml()
    assert again.digest == spec.digest
    assert load_spec("run") == spec


def test_digest_is_of_the_architecture_alone(write):
    digest = load_spec(write(SPEC)).digest
    assert len(digest) == 64

    child = "base: toy.yaml\nname: other\nsources: []\nhead: {outputs: 10, type: linear}\nblock: {g: {ratio: 4.0, type: mlp}}"
    assert load_spec(write(child, "child.yaml")).digest == digest

    others = ["family=f", "input.size=[32, 33]", "block.drop_path.max=0.2", "stages.1.f.heads=2", "head.outputs=11"]
    others += ["block.coupling={type: momentum, m: 0.9}", "init={type: normal, std: 1}", "stages.0.g=null", "split=halves"]
    assert len({digest, *(load_spec("toy.yaml", [other]).digest for other in others)}) == len(others) + 1

    whole, same = (load_spec("toy.yaml", [f"block.g={{type: mlp, gain: {gain}}}"]) for gain in ("2", "2.0"))
    assert [type(spec.stages[0].g.arguments["gain"]) for spec in (whole, same)] == [int, float]
    assert whole.digest == same.digest


def test_base_maps_merge_lists_replace_and_another_type_replaces(write):
    write(SPEC)
    write("base: toy.yaml\nname: middle\nhead: {outputs: 5}\nblock: {f: {bias: no}}", "sub/../middle.yaml")
    leaf = write(
        """
        base: ../middle.yaml
        name: leaf
        stages: [{depth: 1, width: 4}]
        block: {coupling: {type: momentum, m: 0.9}, g: {type: conv}}
        """,
        "sub/leaf.yaml",
    )
    spec = load_spec(leaf)

    assert (spec.name, spec.file) == ("leaf", "sub/leaf.yaml")
    assert spec.head.arguments == {"outputs": 5}
    assert spec.coupling == Part("momentum", {"m": 0.9})
    assert spec.stages == (StageSpec(1, 4, Part("attention", {"heads": 2, "bias": False}), Part("conv")),)


def test_inherited_problem_names_the_file_it_stands_in(write):
    write(SPEC.replace("outputs: 10", "outputs: ten").replace("name: toy\n", ""))
    child = write("base: toy.yaml\nstem: {patch: 0.5}", "child.yaml")
    with pytest.raises(SpecError) as caught:
        load_spec(child, ["split=thirds"])
    assert [(problem.file, problem.path) for problem in caught.value.problems] == [
        ("child.yaml", "name"), ("child.yaml", "stem.patch"), ("override", "split"), ("toy.yaml", "head.outputs"),
    ]  # fmt: skip


def test_base_by_name(write, monkeypatch):
    write(SPEC, "root/specs/models/toys/toy.yaml")
    monkeypatch.setattr(names, "data_root", lambda: Path("root"))
    child = write("base: toy\nname: child", "child.yaml")
    assert load_spec(child).stages == load_spec("toy").stages
    assert message(load_spec, write("base: toyy", "child.yaml")) == (
        "1 problem found:\n  child.yaml: base: found 'toyy'; allowed: a path ending in .yaml, or one of toy. "
        "Did you mean 'toy'?"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# nothing\n---\n", r"\(top level\): found an empty file"),
        ("- a\n- b", r"\(top level\): found a list; allowed: a mapping"),
        ("block: {f: a, f: b}", r"line 1, column 15: found invalid YAML \(found duplicate key f\)"),
        ("name: &a [*a]", "line 1, column 7: found invalid YAML"),
        ("name: !!python/name:os.system x", "line 1, column 7: found invalid YAML"),
        ("name: \x00", r"\(top level\): found an unreadable file"),
        ("name: x", "block: found nothing"),
        ("base: no", "base: found false; .* quote it"),
        ("base: no.yaml", "there is no file no.yaml"),
        ("base: bad.yaml", "base: found bad.yaml -> bad.yaml"),
    ],
)
def test_unreadable_file(write, text, problem):
    with pytest.raises(SpecError, match=rf"bad\.yaml: .*{problem}"):
        load_spec(write(text, "bad.yaml"))


def test_unknown_source(write, monkeypatch):
    write(SPEC, "root/specs/models/toys/toy.yaml")
    monkeypatch.setattr(names, "data_root", lambda: Path("root"))
    assert message(load_spec, "toyy") == "Unknown model or spec file 'toyy'. Did you mean 'toy'? Allowed: toy."
    assert message(load_spec, "root") == (
        "There is no spec.yaml in the folder root; a model's spec was expected. revzoo list prints the names that need no file."
    )


def test_names(write, monkeypatch):
    for path in ["models/a/x_s", "models/a/x_b", "models/b/y", "recipes/quick"]:
        write(SPEC, f"root/specs/{path}.yaml")
    monkeypatch.setattr(names, "data_root", lambda: Path("root"))

    assert list_models() == ["x_b", "x_s", "y"]
    assert list_models("x_*") == ["x_b", "x_s"]
    assert names.list_recipes() == ["quick"]
    assert names.model_files()["y"] == Path("root/specs/models/b/y.yaml")

    write(SPEC, "root/specs/models/b/x_s.yaml")
    assert message(list_models) == (
        "1 problem found:\n  root/specs/models/b/x_s.yaml: (file name): found x_s;"
        " allowed: a name of its own: root/specs/models/a/x_s.yaml has this one. Rename the file."
    )


def test_a_name_that_ships_stays_with_the_file_that_ships(write, monkeypatch, tmp_path):
    file = write(SPEC, f"{tmp_path}/rev_vit_b.yaml")
    monkeypatch.setenv("REVZOO_SPECS", str(tmp_path))
    assert message(list_models).startswith(
        f"1 problem found:\n  {file}: (file name): found rev_vit_b; allowed: a name of its own"
    )


def test_what_is_beside_a_missing_file(tmp_path, monkeypatch):
    (tmp_path / "vit").mkdir()
    for missing in ("vitt", "vitt/"):
        assert names.find_beside(f"{tmp_path}/{missing}") == f" Did you mean '{tmp_path}/vit'?"
    for missing in ("vitt/run", "resnet", "vit\0/run"):
        assert names.find_beside(f"{tmp_path}/{missing}") == ""

    def refuse(folder):
        raise PermissionError(folder)

    monkeypatch.setattr("os.listdir", refuse)
    assert names.find_beside(f"{tmp_path}/vitt") == ""


def test_saved_yaml_says_once_what_stages_share_so_that_overrides_of_the_block_reach_them(write):
    spec = load_spec(write(SPEC), ["stages.1.f.heads=4"])
    saved = write(spec.to_yaml(), "run/spec.yaml")
    plain = yaml.safe_load(spec.to_yaml())
    assert [{key: stage.get(key) for key in "fg"} for stage in plain["stages"]] == [
        {"f": None, "g": None}, {"f": {"heads": 4}, "g": None},
    ]  # fmt: skip
    changed = load_spec(saved, ["block.f.heads=8", "block.g.ratio=2"])
    assert [stage.f.arguments["heads"] for stage in changed.stages] == [8, 4]
    assert [stage.g.arguments["ratio"] for stage in changed.stages] == [2, 2]


@pytest.mark.parametrize("override", ["block.f.heads=8", "block.f={type: attention, heads: 8}"])
def test_an_override_that_no_stage_takes_is_refused(write, override):
    stages = ["stages.0.f.heads=2", "stages.1.f.heads=4"]
    with pytest.raises(
        SpecError, match=r"override: block.f.heads: found 8; allowed: stages.N.f.heads: every stage has a value"
    ):
        load_spec(write(SPEC), [*stages, override])
