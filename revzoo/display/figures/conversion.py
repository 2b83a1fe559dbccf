"""A conversion as a picture: what became of the tensors, and the logits of both networks against each other."""

from pathlib import Path

from matplotlib.figure import Figure

from revzoo.conversion.report import ConvertReport

_INK, _PALE, _BLUE, _ORANGE = "#222222", "#c9c9c9", "#2f6db3", "#d9822b"


def plot_conversion(report: ConvertReport, path: str | Path) -> None:
    """Draw a report; write a PNG."""
    count = 1 + len(report.comparisons)
    figure = Figure(figsize=(4.2 * count, 4.4), dpi=120, facecolor="white", layout="constrained")
    figure.suptitle(f"{report.source} as a reversible network, {report.coupling['type']}", color=_INK, fontsize=12)
    bars, *others = figure.subplots(1, count, squeeze=False)[0]
    counts = dict(sorted(report.counts.items(), key=lambda item: -item[1]))
    bars.barh(list(counts)[::-1], list(counts.values())[::-1], color=_BLUE)
    bars.set_xlabel("tensors", fontsize=9, color=_INK)
    for axes, found in zip(others, report.comparisons, strict=True):
        theirs, ours = zip(*found.points, strict=True)
        low, high = min(theirs), max(theirs)
        axes.plot([low, high], [low, high], color=_PALE, lw=1, zorder=0)
        axes.plot(theirs, ours, ".", ms=4, color=_ORANGE)
        axes.set_xlabel("logits of the original", fontsize=9, color=_INK)
        axes.set_ylabel("logits of the converted network", fontsize=9, color=_INK)
        title = f"{found.what.removeprefix('the original and ')}\ncosine {found.cosine:.6f}, same answer {found.agreement:.1%}"
        axes.set_title(title, fontsize=8, color=_INK)
    for axes in (bars, *others):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.savefig(path)
