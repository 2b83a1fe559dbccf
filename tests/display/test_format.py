"""Numbers as text for people."""

import pytest

from revzoo.display.figures.base import mark_bytes, new_figure
from revzoo.format import format_bytes, format_count, format_flops, format_macs, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5e-6, "2.5 us"), (9.9999e-4, "1 ms"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (250, "250 s")],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 1024**2 // 2, "1.5 MiB"), (2**41, "2.0 TiB"), (2**50, "1024.0 TiB")],
)
def test_bytes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("number", "flops", "count"),
    [
        (0, "0 FLOP", "0"),
        (999, "999 FLOP", "999"),
        (4_917_888, "4.92 MFLOP", "4.92 M"),
        (17_463_000_000, "17.5 GFLOP", "17.5 G"),
        (999_999, "1 MFLOP", "1 M"),
        (1_234_000_000_000, "1.234 TFLOP", "1.234 T"),
    ],
)
def test_flops_and_counts(number, flops, count):
    assert (format_flops(number), format_count(number)) == (flops, count)
    assert format_macs(number) == flops.replace("FLOP", "MACs")


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 1500 << 20, ["0 B", "0.5 GiB", "1 GiB"]),
        (1200 << 20, 1500 << 20, ["1.2 GiB", "1.25 GiB", "1.3 GiB", "1.35 GiB", "1.4 GiB", "1.45 GiB"]),
        (0, 9 << 20, ["0 B", "2 MiB", "4 MiB", "6 MiB", "8 MiB"]),
        (100 << 30, 300 << 30, ["100 GiB", "150 GiB", "200 GiB", "250 GiB", "300 GiB"]),
    ],
)
def test_ticks_are_short_and_of_one_unit(low, high, labels):
    axes = new_figure(4, 4).subplots()
    axes.set_xlim(low, high)
    mark_bytes(axes.xaxis, low, high)
    assert [label.get_text() for label in axes.get_xticklabels()] == labels
