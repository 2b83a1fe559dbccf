"""The order in which people expect names: 2 before 10, and lower-case and upper-case letters together."""

import re


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Return what sorts names in natural order; no two names have the same, as those of timm's function have, "a" and "A".

    So the order of names does not depend on the order that they come in, that of a folder or a set.
    """
    parts = re.split(r"([0-9]+)", name.lower())  # every second one is a number
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name
