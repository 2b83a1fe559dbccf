"""What a spec inherits of `expect` ends where it changes what an expectation is about."""

import pytest

from revzoo.spec import load_spec

EXPECT = {"flops": None, "parameters": 302794, "stream_shape": (16, 64), "reversible_steps": 12}


@pytest.mark.parametrize(
    ("override", "ended"),
    [
        ("name=other", set()),
        ("block.drop_path.max=0.3", set()),
        ("twin=null", set()),
        ("stages.0.depth=6", set()),  # as it is
        ("head.outputs=11", {"parameters", "flops"}),
        ("block.coupling=momentum", {"parameters", "flops"}),
        ("stages.0.depth=5", {"parameters", "flops", "reversible_steps"}),
        ("stages.0.width=32", {"parameters", "flops", "stream_shape"}),
        ("input.size=[16, 16]", {"parameters", "flops", "stream_shape"}),
        ("expect=null", set(EXPECT)),
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
    stated = EXPECT | {"parameters": 302859}
    del stated["flops"]
    assert load_spec("a.yaml").expect == load_spec("b.yaml").expect == stated
    assert load_spec("b.yaml", ["head.outputs=12", "expect.parameters=5"]).expect == stated | {"parameters": 5}
    assert load_spec("c.yaml").expect == {}
