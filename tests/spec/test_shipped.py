"""Every shipped spec is checked against the real parts, names its sources, and survives being written and read."""

from functools import cache

import pytest

from revzoo.spec import Spec, list_models, load_spec
from revzoo.spec.names import model_files

MODELS = list_models()


@cache
def load(name: str) -> Spec:
    return load_spec(name)


def test_no_spec_is_overlooked():
    assert len(MODELS) == 77


@pytest.mark.parametrize("name", MODELS)
def test_a_shipped_spec_says_what_it_is_and_where_its_numbers_are_from(name):
    spec = load(name)
    file = model_files()[name]

    assert (spec.name, spec.family) == (file.stem, file.parent.name)
    assert spec.sources


@pytest.mark.parametrize("name", [*list_models("*_digits"), *list_models("*_mini"), "rev_mvit_b", "rev_swin_t_mlp"])
def test_the_yaml_of_a_shipped_spec_is_the_same_spec(name, tmp_path):
    spec = load(name)
    (tmp_path / "spec.yaml").write_text(spec.to_yaml(), encoding="utf-8")
    again = load_spec(tmp_path)
    assert (again, again.digest) == (spec, spec.digest)


def test_no_two_models_are_the_same_network():
    assert len({load(name).digest for name in MODELS}) == len(MODELS)


def test_models_for_texts_are_as_large_as_their_twins():
    specs = [spec for name in list_models() if (spec := load(name)).twin is not None and spec.input.kind == "text"]
    assert len(specs) == 15
    assert [spec.name for spec in specs if spec.twin["parameters"] != spec.expect["parameters"]] == []
