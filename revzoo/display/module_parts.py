"""Names for the parts of a module, from the paths of the submodules that make its calls."""

from collections.abc import Sequence


def name_parts(paths: Sequence[str], most: int) -> list[str]:
    """Return the name of every call's part: `layer1.0`, or `layer1` where there would be more than `most` parts.

    Args:
        paths: of the submodules, call by call, such as `layer1.0.conv2`. A call of the module itself, whose path is empty,
            belongs to the part before it.
        most: number of parts.
    """
    for with_number in (True, False):
        names = [_shorten(path, with_number) for path in paths]
        if len(set(names)) <= most:
            break
    first = next((name for name in names if name), "all")
    named: list[str] = []
    for name in names:
        named.append(name or (named[-1] if named else first))
    return named


def _shorten(path: str, with_number: bool) -> str:
    """Return a path up to its first number, with it or without; without a number, its first name."""
    parts = path.split(".")
    number = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    if number is None:
        return parts[0]
    return ".".join(parts[: number + 1] if with_number else parts[:number])
