"""Every shipped spec loads with the real parts, says what it is and where its numbers are from."""

import pytest

from revzoo.spec import list_models, load_spec, spec_file

MODELS = list_models()


def test_all_are_found():
    assert len(MODELS) == 61


@pytest.mark.parametrize("name", MODELS)
def test_shipped_spec(name, tmp_path):
    spec = load_spec(name)
    file = spec_file(name)

    assert (spec.name, spec.family) == (file.stem, file.parent.name)
    assert spec.sources
    assert spec.expect.keys() >= {"parameters", "stream_shape", "reversible_steps"}
    steps = sum(stage.depth * (1 if stage.g is None else 2) for stage in spec.stages)
    assert spec.expect["reversible_steps"] == steps

    (tmp_path / "spec.yaml").write_text(spec.to_yaml(), encoding="utf-8")
    again = load_spec(tmp_path)
    assert (again, again.digest) == (spec, spec.digest)


def test_no_two_models_are_the_same_network():
    assert len({load_spec(name).digest for name in MODELS}) == len(MODELS)
