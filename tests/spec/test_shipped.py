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
    assert len(MODELS) == 71


@pytest.mark.parametrize("name", MODELS)
def test_a_shipped_spec_says_what_it_is_and_where_its_numbers_are_from(name):
    spec = load(name)
    file = model_files()[name]

    assert (spec.name, spec.family) == (file.stem, file.parent.name)
    assert spec.sources
    assert spec.expect.keys() >= {"parameters", "stream_shape", "reversible_steps"}
    branches = 0 if spec.coupling.type == "none" else 1
    steps = branches * sum(stage.depth * (1 if stage.g is None else 2) for stage in spec.stages)
    assert spec.expect["reversible_steps"] == steps


@pytest.mark.parametrize(
    "name", [name if name.endswith(("_digits", "_mini")) else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_the_yaml_of_a_shipped_spec_is_the_same_spec(name, tmp_path):
    spec = load(name)
    (tmp_path / "spec.yaml").write_text(spec.to_yaml(), encoding="utf-8")
    again = load_spec(tmp_path)
    assert (again, again.digest) == (spec, spec.digest)


def test_no_two_models_are_the_same_network():
    assert len({load(name).digest for name in MODELS}) == len(MODELS)


def test_models_for_texts_are_as_large_as_their_twins():
    specs = [spec for name in list_models("rev_*bert*") if (spec := load(name)).twin is not None]
    assert len(specs) == 11
    assert [spec.name for spec in specs if spec.twin["parameters"] != spec.expect["parameters"]] == []


def cite(name: str, of: str) -> str:
    """Return what a spec cites for what a word is in, or in whose citation it is."""
    return "\n".join(source["cite"] for source in load(name).sources if of in f"{source}")


def test_revnets_parameters_are_in_its_table_2_and_errors_in_tables_3_and_4():
    for name, millions in (("revnet_38", "0.46"), ("revnet_110", "1.73"), ("revnet_164", "1.70")):
        assert f"RevNet, table 2; its parameters by arithmetic over revnet-public, {millions} M in the table" in cite(
            name, "twin"
        )
        assert "RevNet, table 3: " in cite(name, "error on CIFAR-10")
    assert "45.2 M in RevNet, table 2" in cite("revnet_104", "widths")
    assert "44.5 M in table 2" in cite("revnet_104", "twin")
    assert "RevNet, table 4: 23.10 %" in cite("revnet_104", "error on ImageNet")


def test_reformers_differences_from_its_code_are_in_its_sources():
    assert "rotary ones by default since April 2021" in cite("reformer_enwik8", "position")
    assert "The first chunk has no previous one" in cite("reformer_enwik8", "attention")
    assert "The number of buckets follows the input's length" in cite("reformer_enwik8", "attention")


def test_transformers_sources_say_how_weights_start():
    for name in ("rev_vit_s", "rev_mvit_b", "rev_swin_t"):
        assert "start with std 0.02, cut at +-2, biases of linear layers and norms at 0.02" in cite(name, "init")
