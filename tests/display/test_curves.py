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
