"""The heading of a figure."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from revzoo.display.figures.base import draw_heading, new_figure


@pytest.mark.parametrize("width", [6.2, 14.0])
def test_long_lines_stay_in_the_figure(width):
    figure = new_figure(width, 5)
    lines = ["activations at the peak of a training step, with every mode of every unit " * 3, "the second line"]
    draw_heading(figure, "title", lines)
    text = figure.texts[-1]
    renderer = FigureCanvasAgg(figure).get_renderer()
    assert text.get_window_extent(renderer).x1 <= 120 * width
    assert text.get_text().split() == " ".join(lines).split()
    assert text.get_text().splitlines()[-1] == lines[-1]
