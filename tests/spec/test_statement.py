"""What a spec inherits of `expect`, `twin` and `sources` ends where it changes what they are about."""

import pytest

from revzoo import create
from revzoo.spec import load_spec

TWIN = {"library": "timm", "name": "vit_small_patch16_224"}
EXPECT = {"flops": None, "parameters": 302794, "stream_shape": (16, 64), "reversible_steps": 12}
ALL = set(EXPECT)


@pytest.mark.parametrize(
    ("override", "ended"),
    [
        ("block.drop_path.max=0.3", set()),
        ("stages.0.depth=6", set()),  # as it is
        ("head.outputs=11", ALL),
        ("block.coupling=momentum", ALL),
        ("expect=null", ALL),
        ("expect={parameters: 3}", set()),
    ],
)
def test_an_override_ends_what_it_changes(override, ended):
    kept = {key: value for key, value in EXPECT.items() if key not in ended}
    if override.startswith("expect={"):
        kept |= {"parameters": 3}
    assert load_spec("rev_vit_digits", [override]).expect == kept


def test_a_spec_states_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("base: rev_vit_digits\nname: a\nhead: {outputs: 11}\nexpect: {parameters: 302859}\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\nname: b\n")
    (tmp_path / "c.yaml").write_text("base: b.yaml\nname: c\nexpect: null\n")
    stated = {"parameters": 302859}
    assert load_spec("a.yaml").expect == load_spec("b.yaml").expect == stated
    assert load_spec("b.yaml", ["head.outputs=12", "expect.parameters=5"]).expect == {"parameters": 5}
    assert load_spec("c.yaml").expect == {}


@pytest.mark.parametrize(
    ("override", "left"),
    [
        ("name=other", TWIN | {"parameters": 22050664}),
        ("split=channel", TWIN | {"parameters": 22050664}),  # how streams begin is nothing that a twin has
        ("input.size=[384, 384]", TWIN),  # it is built with it
        ("head.dropout=0.5", None),
        ("stages.0.depth=11", None),
        ("stem.patch=32", None),
        ("twin.arguments={depth: 6}", TWIN | {"arguments": {"depth": 6}}),
        ("twin={name: vit_base_patch16_224, parameters: 3}", TWIN | {"name": "vit_base_patch16_224", "parameters": 3}),
        ("twin.parameters=3", TWIN | {"parameters": 3}),
    ],
)
def test_a_twin_is_the_ordinary_network_of_this_one(override, left):
    assert load_spec("rev_vit_s", [override]).twin == left


def test_sources_say_what_is_not_from_them(tmp_path):
    published = load_spec("rev_vit_s").sources
    assert load_spec("rev_vit_s", ["name=other", "stages.0.depth=12"]).sources == published
    (tmp_path / "mine.yaml").write_text("base: rev_vit_s\nname: mine\nstages: [{depth: 6, width: 384}]\n")
    mine = {"of": "stages.0.depth", "cite": "not from these sources: set by mine"}
    assert load_spec(tmp_path / "mine.yaml").sources == (*published, mine)
    typed = {"of": "stages.0.depth, head.outputs", "cite": "not from these sources: set by an override"}
    overrides = ["head.outputs=5", "stages.0.depth=7"]
    assert {each["of"] for each in load_spec(tmp_path / "mine.yaml", overrides).sources[-2:]} == {"stages.0.depth", typed["of"]}
    (tmp_path / "cited.yaml").write_text((tmp_path / "mine.yaml").read_text() + "sources: [{of: depth, cite: a guess}]\n")
    assert load_spec(tmp_path / "cited.yaml").sources == ({"of": "depth", "cite": "a guess"},)


def test_a_new_head_has_the_same_rules():
    model = create("rev_vit_digits", num_outputs=11, device="meta")
    assert model.spec.expect == {}
    assert create("rev_vit_s", num_outputs=11, device="meta").spec.twin == TWIN
    assert create("rev_vit_s", num_outputs=1000, device="meta").spec.twin == TWIN | {"parameters": 22050664}
