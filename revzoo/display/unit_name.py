"""What the name of a unit says: its stage, and the number of its block or step."""

import re
from dataclasses import dataclass

_NAME = re.compile(r"((?:stages\.(\d+)\.)?(?:blocks|steps)\.)(\d+)(.*)|(?:stages\.(\d+)\.)?.*")


@dataclass(frozen=True)
class UnitName:
    """The name of a unit, in parts that make it up when they are joined.

    Args:
        start: what precedes the number of the block or step, or the whole name if it has none.
        number: of the block in its stage, or of the step in a chain; None for other units.
        end: what follows the number, such as ".f".
        stage: index of the stage; None outside of stages.
    """

    start: str
    number: int | None = None
    end: str = ""
    stage: int | None = None


def parse_unit_name(name: str) -> UnitName:
    """Return the parts of a name such as "stages.0.blocks.3.f", "stages.1.transition", "steps.4" or "stem"."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    start, block_stage, number, end, node_stage = match.groups()
    stage = block_stage or node_stage
    return UnitName(start or name, None if number is None else int(number), end or "", None if stage is None else int(stage))
