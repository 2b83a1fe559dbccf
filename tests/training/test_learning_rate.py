"""The range test: what it suggests of given losses, and what it finds and leaves for a small network."""

import numpy as np
import pytest

import zoo_cli
from revzoo.training.learning_rate import RangeTest, find_learning_rate


def test_the_suggestion_is_the_middle_of_the_longest_fall():
    lrs = np.logspace(-6, 0, 61)
    falling = np.interp(np.log10(lrs), [-4, -2, -1, 0], [2.0, 1.0, 1.5, 9.0])  # flat to 1e-4, least at 1e-2
    assert RangeTest(lrs.tolist(), falling.tolist()).suggest() == pytest.approx(1e-3)
    cliff = falling - np.where(np.isclose(lrs, 1e-2), 0.5, 0)  # a steep last step is noise
    assert RangeTest(lrs.tolist(), cliff.tolist()).suggest() == pytest.approx(1e-3)
    bumpy = falling + np.where(np.arange(61) % 5 == 0, 0.2, 0)
    assert RangeTest(lrs.tolist(), bumpy.tolist()).suggest() == pytest.approx(1e-3, rel=1)
    assert RangeTest(lrs.tolist(), (1 + lrs).tolist()).suggest() is None
    assert RangeTest([1e-7], [2.0]).suggest() is None


@pytest.mark.parametrize("more", [[], ["train.optimizer_in_backward=true", "train.clip_grad=null"], ["train.accumulate=2"]])
def test_a_rate_is_found_and_only_the_picture_is_left(recipe, tmp_path, monkeypatch, more):
    monkeypatch.setattr("revzoo.training.learning_rate._UPDATES", 25)
    monkeypatch.chdir(tmp_path)
    assert 1e-5 < find_learning_rate(recipe("data.batch_size=96", *more), tmp_path / "lr.png") < 3
    assert [path.name for path in tmp_path.iterdir()] == ["lr.png"]
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_command_refuses(capsys):
    for arguments, message in (
        (["--find-lr", "--out", "run"], "--find-lr keeps nothing but a picture"),
        (["--plot", "lr.png"], "--plot is the picture of --find-lr"),
        (["--find-lr", "--plot", "lr.jpg"], "A picture is written as PNG"),
    ):
        assert zoo_cli.main(["train", *arguments]) == 2
        assert message in capsys.readouterr().err
