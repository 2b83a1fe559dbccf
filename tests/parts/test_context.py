"""Where parts lie, and the checks that the build context makes for them."""

import pytest

from revzoo import registry
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape

ROLES = ("stems", "splits", "branches", "transitions", "fuses", "heads", "inits")
IMAGE = BuildContext(Shape(3, (6, 4), "image"), 12)
GRID = BuildContext(Shape(8, (4, 6), "tokens"), 12)
ROW = BuildContext(Shape(8, (24,), "tokens"), 12)
TEXT = BuildContext(Shape(100, (16,), "text"), 100)


@pytest.mark.parametrize("role", ROLES)
def test_parts_lie_in_the_folder_or_file_of_their_role(role):
    table = getattr(registry, role)
    assert all(f"{table[name].__module__}.".startswith(f"revzoo.parts.{role}.") for name in table)


def test_shapes_of_each_kind():
    shapes = [context.shape for context in (IMAGE, GRID, ROW, TEXT)]
    assert [shape.dims for shape in shapes] == [(3, 6, 4), (24, 8), (24, 8), (16,)]
    assert [shape.channel_dim for shape in shapes[:3]] == [1, 2, 2]
    assert (IMAGE.sides, GRID.sides) == ((6, 4), (4, 6))


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: GRID.require_kind("image", "conv_unit"), "found 'conv_unit'; allowed: a stem that gives images"),
        (lambda: TEXT.require_kind("image", "conv"), "found 'conv'; allowed: an input of kind image"),
        (lambda: ROW.require_kind("grid", "w"), "found 'w'; allowed: a stem that gives a 2-dimensional grid"),
        (lambda: IMAGE.require_kind("text", "t"), "found 't'; .* input.kind: text"),
        (lambda: IMAGE.require_kind("tokens", "h", "another head"), "found 'h'; allowed: another head"),
        (lambda: GRID.require_divisor("heads", 5), "heads: found 5; allowed: a divisor of the width 12"),
        (lambda: GRID.require_divisor("heads", 3, width=8), "heads: found 3; allowed: a divisor of the width 8"),
        (lambda: GRID.require_stride("stride", 4), "stride: found 4; .* 4x6 grid"),
        (lambda: IMAGE.require_stride("patch", 4), "patch: found 4; .* 6x4 image"),
        (lambda: GRID.require_hidden_channel("r", 0.1, width=8), "r: found 0.1; .* of the width 8"),
    ],
)
def test_what_does_not_fit_is_named(check, message):
    with pytest.raises(PartArgumentError, match=message):
        check()
