"""The curves of a training run."""

import pytest

from revzoo.display.figures import curves


@pytest.mark.parametrize("coupling", [{}, {"kept_bits": (6, 4)}, {"alpha": (1.0, 0.5), "beta": (0.0, 0.5)}])
def test_curves_show_the_records(coupling, tmp_path, monkeypatch):
    figures = []
    save = curves.save

    def keep(figure, path):
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(curves, "save", keep)
    records = [
        {"epoch": i + 1, "train_loss": 3.0 - i, "loss": 2.0 - i, "top1": 10.0 * i} | {k: v[i] for k, v in coupling.items()}
        for i in range(2)
    ]
    curves.plot_curves(records, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    lines = [[[*line.get_ydata()] for line in axes.lines] for axes in figure.axes]
    assert lines[:2] == [[[3.0, 2.0], [2.0, 1.0]], [[0.0, 10.0]]]
    assert lines[2:] == ([[[*values] for values in coupling.values()]] if coupling else [])


@pytest.mark.parametrize(("epochs", "marked", "ticks"), [(1, True, [1]), (2, True, [1, 2]), (100, False, None)])
def test_few_epochs_are_points_at_whole_numbers(epochs, marked, ticks, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(curves, "save", lambda figure, path: figures.append(figure))
    records = [{"epoch": i + 1, "train_loss": 3.0, "loss": 2.0, "top1": 10.0, "kept_bits": 6} for i in range(epochs)]
    curves.plot_curves(records, tmp_path / "curves.png")
    for axes in figures[0].axes:
        assert all((line.get_marker() != "None") == marked for line in axes.lines)
    for axes in figures[0].axes[:2]:
        shown = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
        assert shown == ticks if ticks else all(tick in range(1, epochs + 1) for tick in shown)
