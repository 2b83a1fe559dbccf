"""What trackers get of a run: settings and metrics, and nothing that ends training."""

import pytest
from accelerate import Accelerator

from revzoo.errors import SpecError
from revzoo.training.loop import train
from tests.training.runs import make_recipe, read_records


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's own code
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    train(make_recipe("train.track=[tensorboard]"), run)
    events = EventAccumulator(str(run / "tensorboard" / "revzoo"))
    events.Reload()
    records = read_records(run)
    assert len(records) == 2
    for name in records[0]:
        points = [(event.step, event.value) for event in events.Scalars(name)]
        assert points == [(record["updates"], pytest.approx(record[name])) for record in records]
    (settings,) = (run / "tensorboard" / "revzoo").glob("*/hparams.yml")
    assert "optimizer.lr: 0.003" in settings.read_text()


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("revzoo.training.processes.get_available_trackers", list)
    with pytest.raises(SpecError, match=r"train.track: found \['comet_ml'\]; .* python -m pip install comet-ml"):
        train(make_recipe("train.track=[comet_ml]"), tmp_path / "run")


def test_training_goes_on_without_a_tracker_that_fails(tmp_path, monkeypatch, caplog):
    def fail(accelerator, values, step):
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(Accelerator, "log", fail)
    train(make_recipe(), tmp_path / "run")
    assert len(read_records(tmp_path / "run")) == 2
    assert "A tracker fails (ConnectionError: nobody answers)" in caplog.text
