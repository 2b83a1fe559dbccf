import math
import shutil
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import revzoo
from revzoo.checkpoint import files, index
from revzoo.data.base import IGNORED
from revzoo.errors import CheckpointError, InputError, SpecError
from revzoo.training.class_report import ClassReport
from revzoo.training.evaluate_checkpoint import evaluate_checkpoint, evaluate_pretrained
from revzoo.training.evaluation import Scores, evaluate
from revzoo.training.loop import train
from tests.training.runs import make_image_recipe, make_recipe, read_records
from zoo_cli import main


def test_scores_by_hand():
    logits = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3]] * 7)
    labels = torch.tensor([0, 0, 1, 4, 4, 5, 6])  # two hits, five among the first five
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(list(zip(logits, labels, strict=True)), batch_size=3))
    model = nn.Identity().train()  # the images are the logits
    scores = evaluate(model, loader, accelerator)
    loss = nn.functional.cross_entropy(logits.double(), labels).item()
    assert scores == Scores({"top1": 200 / 7, "top5": 500 / 7}, pytest.approx(loss), 7)
    assert model.training
    assert str(scores) == f"top-1 28.57 %, top-5 71.43 %, loss {loss:.4f} on 7 images"
    assert str(Scores({"top1": 0.0, "top5": 0.0}, 0.5, 1)).endswith("loss 0.5000 on 1 image")


def test_five_of_five_classes_are_no_news():
    scores = evaluate(nn.Identity(), [(torch.eye(5), torch.zeros(5, dtype=torch.int64))], Accelerator())
    assert scores.metrics == {"top1": 20.0, "top5": 100.0}  # as metrics.jsonl has them
    assert str(scores).startswith("top-1 20.00 %, loss ")


def test_classes_by_hand():
    """A class that is never guessed has no precision, one without examples no recall."""
    guesses = [(0, 0, 0.9), (0, 1, 0.4), (1, 1, 0.8), (2, 1, 0.7), (2, 1, math.nan)]
    report = ClassReport(torch.tensor(guesses), ["a", "b", "c", "d"], "row {}".format)
    assert [[*row.values()] for row in report.list_classes()] == [
        ["a", 2, 1.0, 0.5, pytest.approx(2 / 3)], ["b", 1, 0.25, 1.0, 0.4], ["c", 2, None, 0.0, 0.0], ["d", 0, *[None] * 3],
    ]  # fmt: skip
    assert report.average() == pytest.approx({"precision": 0.625, "recall": 0.5, "f1": (2 / 3 + 0.4) / 3})
    assert report.count_guesses() == [[1, 1, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0]]
    assert [[*row.values()] for row in report.list_errors()] == [
        ["row 3", "c", "b", 0.7], ["row 1", "a", "b", 0.4], ["row 4", "c", "b", None],
    ]  # fmt: skip


def test_what_training_saved(whole, tmp_path):
    records = read_records(whole)
    best = max(records, key=lambda record: record["top1"])
    for path, record in ((whole, best), (whole / "last.safetensors", records[-1])):
        assert evaluate_checkpoint(path) == Scores({key: record[key] for key in ("top1", "top5")}, record["loss"], 355)
    alone = shutil.copy(whole / "best.safetensors", tmp_path / "alone.safetensors")  # it says what it is of, and of which data
    assert evaluate_checkpoint(alone, ["data.batch_size=6"]).metrics["top1"] == best["top1"]


def test_images_that_changed_sides_are_noticed(image_folder, tmp_path):
    """Where every fifth image is held out, new ones shift the others, and some of those held out now were trained on."""
    images = image_folder / "train"
    train(make_image_recipe(images), tmp_path / "run")
    split = f"{images} has no images for validation: every fifth of each class is held out, 2 in all"
    assert evaluate_checkpoint(tmp_path / "run").notes == (split,)
    (tmp_path / "run" / "best.safetensors").rename(tmp_path / "alone.safetensors")
    for i in range(4):
        shutil.copy(images / "cat" / "0.png", images / "cat" / f"0-{i}.png")  # 0.png is the fifth now, and was trained on
    note = evaluate_checkpoint(tmp_path / "alone.safetensors").notes[-1]
    assert note.startswith("the images held out now are not those that were held out in training (training examples: 6 at the ")


def test_remarks_on_the_data_are_printed(image_folder, tmp_path, capsys):
    """Other images that were given for testing are none."""
    train(make_image_recipe(image_folder), tmp_path / "run")
    for split in ("train", "val"):
        shutil.copy(image_folder / "val" / "cat" / "0.png", image_folder / split / "cat" / "0-0.png")
    (image_folder / "val" / "notes.txt").touch()
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run")]) == 0
    note, scores, *_ = capsys.readouterr().out.splitlines()
    assert note == f"Note: skipped in {image_folder}/val: 1 .txt."
    assert scores.startswith(f"{tmp_path / 'run'}: top-1 ")


def test_a_part_that_is_not_there_is_placed_in_the_checkpoint(tmp_path):
    spec = revzoo.load_spec("rev_vit_digits").to_yaml().replace("type: mlp", "type: my_mlp")
    facts = {"revzoo.spec": spec, "revzoo.recipe": make_recipe().to_yaml()}
    file = tmp_path / "w.safetensors"
    files.save_weights(revzoo.create("rev_vit_digits"), file, facts)
    with pytest.raises(SpecError, match=rf" {file}: spec.yaml: block.g.type: found 'my_mlp'; allowed: one of "):
        evaluate_checkpoint(file)


def test_foreign_checkpoints(tmp_path):
    model = revzoo.create("rev_vit_digits")
    files.save_weights(model, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="w.safetensors was not saved by `revzoo train`"):
        evaluate_checkpoint(tmp_path / "w.safetensors")
    torch.save({"a": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="w.pt was not saved by `revzoo train`"):
        evaluate_checkpoint(tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="is not the folder of a run with weights: there is no best.safetensors in it"):
        evaluate_checkpoint(tmp_path)
    (tmp_path / "best.safetensors").write_bytes(b"half a file")
    with pytest.raises(CheckpointError, match="best.safetensors cannot be read"):
        evaluate_checkpoint(tmp_path)


def test_the_command_of_the_index(monkeypatch):
    """The default recipe needs no name, and a batch for training needs not be filled."""
    command = "accelerate launch -m zoo_cli train data.batch_size=2000"
    entries = {name: replace(entry, command=command) for name, entry in index.read_index().items()}
    monkeypatch.setattr("revzoo.training.evaluate_checkpoint.read_index", lambda: entries)
    scores, entry = evaluate_pretrained("rev_vit_digits")
    assert round(scores.metrics["top1"], 2) == entry.metric["top1"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.exact=true", "Received: model.exact=true"),
        ("data.root=photos", r"data\.root has no effect .*data.name=folder data.root=IMAGES"),
        ("data.augment.mean=[0.5]", r"data\.augment has no effect .*data.name=folder data.root=IMAGES"),
    ],
)
def test_overrides_without_an_effect(setting, message):
    """Nobody takes the scores for those of other data."""
    with pytest.raises(InputError, match=message):
        evaluate_pretrained("rev_vit_digits", [setting])


def test_shipped_weights_repeat_their_metric():
    names = ["irevnet_digits", "rev_mvit_digits", "rev_swin_digits", "rev_vit_digits", "revnet_digits"]
    assert sorted(index.read_index()) == sorted([*names, "rev_gpt_mini", "revnet_mnist"])
    for name in names:
        scores, entry = evaluate_pretrained(name)
        assert round(scores.metrics["top1"], 2) == entry.metric["top1"]
        assert scores.metrics["top1"] >= 96
    scores, entry = evaluate_pretrained("rev_gpt_mini", ["data.batch_size=64"])  # of a text that each Python changes a little
    assert scores.metrics["top1"] == pytest.approx(entry.metric["top1"], abs=2)


@torch.no_grad()
def test_shipped_weights_for_mnist_read_other_digits():
    """Scikit-learn's, enlarged to 20x20 pixels in 28x28 as MNIST's are; where MNIST is, `revzoo eval` repeats the metric."""
    model = revzoo.create("revnet_mnist", pretrained=True).eval()
    pixels, labels = load_digits(return_X_y=True)
    prepare, answers = revzoo.transform(model), []
    for each in pixels[:200].reshape(-1, 8, 8):
        image = Image.new("L", (28, 28))
        image.paste(Image.fromarray((each * 15).astype("uint8")).resize((20, 20)), (4, 4))
        answers.append(int(model(prepare(image)[None]).argmax()))
    assert (torch.tensor(answers) == torch.tensor(labels[:200])).float().mean() > 0.8
    with pytest.raises(SpecError, match=r"data\.root: found nothing.*Add data\.root=DIR"):
        evaluate_pretrained("revnet_mnist")


def test_scores_of_ids_by_hand():
    logits = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    batches = [
        (torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[1, IGNORED, 3], [IGNORED, 0, 0]])),
        (torch.tensor([[6, 7]]), torch.tensor([[8, IGNORED]])),
    ]
    scores = evaluate(nn.Embedding.from_pretrained(logits), batches, Accelerator(), "tokens")
    pairs = [(0, 1), (2, 3), (4, 0), (5, 0), (6, 8)]
    losses = [-logits[i].log_softmax(0)[label].item() for i, label in pairs]
    ranks = [int((logits[i] > logits[i, label]).sum()) for i, label in pairs]
    assert (scores.count, scores.loss) == (5, pytest.approx(sum(losses) / 5))
    assert scores.metrics == {"top1": 20 * ranks.count(0), "top5": 20 * sum(rank < 5 for rank in ranks)}
    assert f"loss {scores.loss:.4f}, perplexity {math.exp(scores.loss):.4g} on 5 tokens" in str(scores)


def test_a_saved_model_is_evaluated_on_data_that_are_named(tmp_path, image_folder):
    """With its own preprocessing, and as prediction has it."""
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"], num_outputs=2).eval()
    model.class_names, model.data_config = (
        ("cat", "dog"),
        {"mean": (0.2,), "std": (0.1,), "interpolation": "lanczos", "crop_pct": 0.5, "crop_mode": "squash"},
    )
    model.save_pretrained(tmp_path / "saved: #1 😀")
    data = [f"data.root={image_folder}", "data.num_workers=0"]
    scores = evaluate_checkpoint(tmp_path / "saved: #1 😀", data)
    prepare, files = revzoo.transform(model), sorted((image_folder / "val").rglob("*.png"))
    logits = model(torch.stack([prepare(file) for file in files]))
    labels = torch.tensor([model.class_names.index(file.parent.name) for file in files])
    assert "interpolation=lanczos" in scores.notes[0]
    assert scores.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    with pytest.raises(
        CheckpointError, match="does not say on which data to evaluate it. Name them: revzoo eval .* data.root=IMA"
    ):
        evaluate_checkpoint(tmp_path / "saved: #1 😀", data[1:])
