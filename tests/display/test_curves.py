"""The curves of a training run."""

from revzoo.display.figures import curves


def test_curves_show_the_records(tmp_path, monkeypatch):
    figures = []
    save = curves.save

    def keep(figure, path):
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(curves, "save", keep)
    records = [{"epoch": i + 1, "train_loss": 3.0 - i, "loss": 2.0 - i, "top1": 10.0 * i} for i in range(2)]
    curves.plot_curves(records, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    lines = [[[*line.get_ydata()] for line in axes.lines] for axes in figure.axes]
    assert lines == [[[3.0, 2.0], [2.0, 1.0]], [[0.0, 10.0]]]
