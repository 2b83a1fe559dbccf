"""What the names of units say."""

import pytest

from revzoo.display.unit_name import UnitName, parse_unit_name


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("stem", UnitName("stem")),
        ("stages.1.transition", UnitName("stages.1.transition", stage=1)),
        ("stages.0.blocks.13.f", UnitName("stages.0.blocks.", 13, ".f", stage=0)),
        ("stages.2.blocks.3", UnitName("stages.2.blocks.", 3, stage=2)),
        ("steps.4", UnitName("steps.", 4)),
    ],
)
def test_names_have_parts(name, parts):
    assert parse_unit_name(name) == parts
