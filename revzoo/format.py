"""Format bytes, FLOPs, counts, seconds, shapes, dtypes and losses for people to read."""

from math import exp, inf, log

BYTE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def format_bytes(size: float) -> str:
    """Return a size such as "17.5 MiB"."""
    name, unit = choose_byte_unit(size)
    return f"{size:.0f} B" if name == "B" else f"{size / unit:.1f} {name}"


def format_flops(flops: int) -> str:
    """Return a number of operations such as "17.6 GFLOP"."""
    return _scale(flops, "FLOP")


def format_macs(macs: int) -> str:
    """Return a number of multiply-adds such as "17.5 GMACs"."""
    return _scale(macs, "MACs")


def format_count(count: int) -> str:
    """Return a number of parameters such as "87.3 M"."""
    return _scale(count, "").rstrip()


def count_noun(count: int, noun: str, ending: str = "s") -> str:
    """Return a number with what is counted, in the plural but for 1: "1 epoch", "2 batches"."""
    return f"{count} {noun}{'' if count == 1 else ending}"


def format_seconds(seconds: float) -> str:
    """Return a duration such as "1.23 ms"."""
    if not seconds:
        return "0 s"
    for scale, unit in ((1, "s"), (1e3, "ms")):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_spread(spread: float | None) -> str:
    """Return by how much a number may differ, to print after it, such as " +- 2.5 %"; "" where it is not known."""
    return "" if spread is None else f" +- {100 * spread:.2g} %"


def format_ratio(ratio: float) -> str:
    """Return a ratio of any size to two digits, such as "0.15", "83" or "3e+11"; "exact" for an infinite one."""
    return "exact" if ratio == inf else f"{ratio:.2g}" if ratio < 1000 else f"{ratio:.0e}"


def format_shape(shape: tuple[int, ...] | None) -> str:
    """Return the dimensions of a shape, such as "56 x 8 x 8", or an empty string for None."""
    return "" if shape is None else " x ".join(map(str, shape))


def format_dtype(dtype: object) -> str:
    """Return the name of a torch dtype without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")


def format_loss(loss: float, label_noun: str) -> str:
    """Return a loss in nats; that of a language model also as perplexity, and of bytes in bits, to compare tokenizers."""
    words = f"{loss:.4f}"
    if label_noun in ("tokens", "bytes"):
        words += f", perplexity {exp(min(loss, 700)):.4g}"
    return f"{words}, {loss / log(2):.3f} bits per byte" if label_noun == "bytes" else words


def choose_byte_unit(size: float) -> tuple[str, int]:
    """Return the largest unit that the size is one of at least, or "B", and how many bytes it has."""
    return next((name, unit) for name, unit in reversed(BYTE_UNITS.items()) if name == "B" or abs(size) >= unit)


def _scale(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.4g} T{unit}"
