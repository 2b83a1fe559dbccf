"""What trackers get of a run: settings, metrics, texts and pictures, once for every epoch although it was resumed."""

import importlib.util
from pathlib import Path

import pytest

from revzoo.display.figures.curves import plot_curves
from revzoo.errors import CheckpointError, RevzooError, SpecError
from revzoo.training import epochs
from revzoo.training.loop import resume, train
from revzoo.training.tracking import Tracking


@pytest.fixture
def drawn(monkeypatch) -> None:
    monkeypatch.setattr(epochs, "plot_curves", plot_curves)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's own code
def test_tensorboard(recipe, tmp_path, drawn, read_records):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    train(recipe("train.track=[tensorboard]", "train.epochs=1", "schedule.sched=constant", "memory.budget=1GB"), run)
    resume(run, ["train.epochs=2"])
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    records = read_records(run)
    assert len(records) == 2
    for name in records[0]:
        points = [(event.step, event.value) for event in events.Scalars(name)]
        assert points == [(record["epoch"], pytest.approx(record[name])) for record in records]
    assert {"seconds", "images_per_second", "memory_bytes"} < set(events.Tags()["scalars"])
    assert [picture.step for picture in events.Images("curves")] == [1, 2]
    (spec,) = events.Tensors("spec.yaml/text_summary")
    assert b"    name: rev_vit_digits" in spec.tensor_proto.string_val[0]
    (plan,) = events.Tensors("plan.json/text_summary")
    assert b'"budget_bytes": 1000000000' in plan.tensor_proto.string_val[0]
    (settings,) = run.glob("tensorboard/*/hparams.yml")
    assert "optimizer.lr: 0.003" in settings.read_text()


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="MLflow is not installed")
@pytest.mark.filterwarnings("ignore")  # of MLflow's own code
def test_mlflow_on_a_local_folder(recipe, tmp_path, drawn, read_records, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    train(recipe("train.track=[mlflow]", "train.epochs=1", "schedule.sched=constant", "memory.budget=1GB"), tmp_path / "run")
    resume(tmp_path / "run", ["train.epochs=2"])
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'revzoo'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["optimizer.lr"]) == ("run", "FINISHED", "0.003")
    points = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "top1")]
    assert points == [(record["epoch"], record["top1"]) for record in read_records(tmp_path / "run")]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        "config.yaml",
        "curves.png",
        "plan.json",
        "spec.yaml",
    }


def test_a_tracker_that_is_not_installed(recipe, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("revzoo.training.tracking.get_available_trackers", list)
    with pytest.raises(SpecError, match=r"train.track: found \['comet_ml'\]; .* python -m pip install comet-ml"):
        train(recipe("train.track=[comet_ml]"), tmp_path / "run")


def test_a_damaged_list_of_trackers_is_refused(recipe, tmp_path):
    (tmp_path / "tracking.json").write_text("{")
    tracking = Tracking(recipe("train.track=[tensorboard]"), tmp_path, shown=True)
    with (
        pytest.raises(CheckpointError, match=r"tracking.json is damaged. Delete it: the trackers then begin a new run"),
        tracking.open(0),
    ):
        pass


class _Failing:
    """A tracker that raises an error in one of its methods."""

    name = "aim"

    def __init__(self, method: str):
        self.method, self.called = method, list[str]()

    def __getattr__(self, method: str):
        def call(*arguments, **options) -> None:
            self.called.append(method)
            if method == self.method:
                raise ConnectionError("nobody answers")

        return call


def test_a_tracker_that_cannot_begin_is_an_error(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(Tracking, "_make", lambda self, *arguments: _Failing("start"))
    tracking = Tracking(recipe("train.track=[aim]"), tmp_path, shown=True)
    with pytest.raises(RevzooError) as caught, tracking.open(0):
        pass
    assert str(caught.value) == (
        "The tracker aim cannot begin: ConnectionError: nobody answers. Correct its settings, and resume: "
        f"revzoo train --resume {tmp_path}. Or train without it: revzoo train --resume {tmp_path} 'train.track=[]'"
    )
    (tmp_path / "tracking.json").write_text('{"aim": "7"}')
    with pytest.raises(RevzooError, match=r"settings, delete .*tracking.json to begin a new run there, and"), tracking.open(1):
        pass


@pytest.mark.parametrize("method", ["log", "finish"])
def test_training_goes_on_without_a_tracker_that_fails(recipe, tmp_path, monkeypatch, caplog, method):
    tracker = _Failing(method)
    monkeypatch.setattr(Tracking, "_make", lambda self, *arguments: tracker)
    tracking = Tracking(recipe("train.track=[aim]"), tmp_path, shown=True)
    with tracking.open(0):
        tracking.log({"epoch": 1})
        tracking.log({"epoch": 2})
    warning = f"The tracker aim fails (ConnectionError: nobody answers) and gets nothing more: {tmp_path}/metrics.jsonl has it."
    assert [record.getMessage() for record in caplog.records] == [warning]
    after = {"log": ["log"], "finish": ["log", "log", "finish"]}[method]
    assert tracker.called == ["start", "store_init_configuration", *after]
