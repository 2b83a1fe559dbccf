"""Format bytes, FLOPs, counts, seconds, shapes and losses for people to read."""

from math import log


def format_bytes(size: float) -> str:
    """Return a size such as "17.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_flops(flops: int) -> str:
    """Return a number of operations such as "17.6 GFLOP"."""
    return _scale(flops, "FLOP")


def format_count(count: int) -> str:
    """Return a number of parameters such as "87.3 M"."""
    return _scale(count, "").rstrip()


def format_seconds(seconds: float) -> str:
    """Return a duration such as "1.23 ms"."""
    if not seconds:
        return "0 s"
    for scale, unit in ((1, "s"), (1e3, "ms")):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_shape(shape: tuple[int, ...] | None) -> str:
    """Return the dimensions of a shape, such as "56 x 8 x 8", or an empty string for None."""
    return "" if shape is None else " x ".join(map(str, shape))


def format_bits(loss: float, unit: str, prefix: str) -> str:
    """Return a loss in nats as bits, such as "1.234 bits per byte", after `prefix`; empty unless `unit` is tokens or bytes."""
    return f"{prefix}{loss / log(2):.3f} bits per {unit[:-1]}" if unit in ("tokens", "bytes") else ""


def _scale(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.4g} T{unit}"
