"""`revzoo check`: everything that is wrong with images and texts, each with what to do, and the exit status."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from zoo_cli import main


@pytest.fixture
def photos(tmp_path) -> Path:
    """Two classes of six sound images, the sixth of each for validation."""
    for split, numbers in (("train", range(5)), ("val", [5])):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for i in numbers:
                Image.effect_noise((12 + i, 9), 50).save(tmp_path / "photos" / split / name / f"{i}.png")
    return tmp_path / "photos"


def check(capsys, *arguments) -> tuple[int, dict, dict[str, dict]]:
    """Return the status, everything that is printed as JSON, and the findings by their kind."""
    status = main(["check", *map(str, arguments), "--json"])
    printed = json.loads(capsys.readouterr().out)
    return status, printed, {finding["kind"]: finding for finding in printed["findings"]}


def test_sound_images(photos, capsys):
    status, printed, findings = check(capsys, photos)
    assert (status, findings) == (0, {})
    assert printed["classes"] == {name: {"training": 5, "validation": 1} for name in ("cat", "dog")}
    assert (printed["sizes"], printed["modes"]) == ([[12, 9], [15, 9], [17, 9]], {"L": 12})


def test_images_with_every_fault(photos, capsys):
    train, val = photos / "train", photos / "val"
    cut, empty = train / "cat/0.png", train / "dog/0.png"
    cut.write_bytes(cut.read_bytes()[:-40])  # its header is sound
    empty.write_bytes(b"")
    shutil.copy(train / "cat/1.png", train / "dog/mislabelled.png")
    Image.open(train / "cat/2.png").convert("RGB").save(val / "cat/leaked.bmp")  # other bytes, the same pixels
    shutil.copy(train / "cat/3.png", train / "cat/again.png")
    (train / "cow").mkdir()
    Image.effect_noise((8, 8), 50).save(train / "cow/0.png")
    status, _, findings = check(capsys, photos)
    assert status == 1
    assert list(findings) == ["unreadable", "labels", "leak", "repeated", "single"]
    assert [finding["is_serious"] for finding in findings.values()] == [True, True, True, False, False]
    assert sorted(findings["unreadable"]["examples"]) == [[str(cut)], [str(empty)]]
    assert findings["labels"]["examples"] == [[str(train / "cat/1.png"), str(train / "dog/mislabelled.png")]]
    assert findings["leak"]["examples"] == [[str(train / "cat/2.png"), str(val / "cat/leaked.bmp")]]
    assert findings["repeated"]["examples"] == [[str(train / "cat/3.png"), str(train / "cat/again.png")]]
    assert findings["single"]["examples"] == [["cow"]]


def test_folders_that_cannot_be_trained_on_are_looked_through(photos, capsys):
    (photos / "train/cow").mkdir()
    (photos / "train/cat/0.png").write_bytes(b"")
    status, _, findings = check(capsys, photos)
    assert (status, list(findings)) == (1, ["structure", "unreadable"])
    assert "without images in them: cow. Fill or remove them" in findings["structure"]["text"]


def test_texts(tmp_path, capsys):
    table = tmp_path / "texts.csv"
    rows = [f"text {i},{'spam' if i == 20 else 'ham'}" for i in range(31)]  # the tenth of each label is held out
    rows[9] = "text  2,ham"
    rows += ['" ",ham', "no label,", "text 5,spam", "text 6,ham"]
    table.write_text("\n".join(["text,label", *rows]))
    status, printed, findings = check(capsys, table)
    assert status == 1
    assert list(findings) == ["unreadable", "labels", "leak", "repeated", "uneven"]
    assert findings["unreadable"]["examples"] == [[f"{table}:32"], [f"{table}:33"]]
    assert findings["labels"]["examples"] == [[f"{table}:6", f"{table}:34"]]
    assert findings["leak"]["examples"] == [[f"{table}:3", f"{table}:10"]]
    assert findings["repeated"]["examples"] == [[f"{table}:7", f"{table}:35"]]
    assert printed["sizes"] == [[6], [7], [7]]


def test_what_is_printed(photos, tmp_path, capsys):
    assert main(["check", str(photos)]) == 0
    assert "Nothing here would stop or spoil training." in capsys.readouterr().out
    (photos / "val/cat/5.png").write_bytes(b"")
    assert main(["check", str(photos)]) == 1
    assert "Problem: 1 image of no use (the first: cannot identify image file" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "fotos")]) == 2
    assert f"Did you mean '{photos}'?" in capsys.readouterr().err
