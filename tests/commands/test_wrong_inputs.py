"""Wrong inputs of every kind: status 2, one message without a traceback that names the culprit and the remedy."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import revzoo
from revzoo import plugin
from revzoo.checkpoint.files import save_weights
from revzoo.registry import branches
from revzoo.training.recipe import load_recipe

OWN_PARTS = """
from torch import nn
from revzoo.registry import branches

@branches.register("unbuilt")
class Unbuilt(nn.Module):
    def __init__(self, context):
        self.linear = nn.Linear(5, 5)
"""
FILES = {
    "table.csv": "text,label\n" + "a cat,cat\na dog,dog\n" * 12,
    "headless.csv": "a cat purrs,cat\na dog barks,dog\n",
    "failing_parts.py": "1 / 0\n",
    "own_parts.py": OWN_PARTS,
    "own_data.py": "number = 3\n\ndef raises(options, input):\n    return {}['images']\n",
    "uneven.csv": "text,label\na cat, asleep,cat\n",
    "loop.yaml": "base: loop.yaml\n",
    "recipe.yaml": "base: digits\ntrain: {epochs: 1}\n",
    "spec.yaml": "base: rev_vit_s\n",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder of pictures, tables, specs, weights and runs that are damaged or of another kind than they should be."""
    place = tmp_path_factory.mktemp("place")
    for name, text in FILES.items():
        (place / name).write_text(text)
    classes = {"photos": "cat dog", "split/train": "cat dog", "split/val": "cat cow"}
    for folder, names in classes.items():
        for name in names.split(" "):
            (place / folder / name).mkdir(parents=True, exist_ok=True)
            for i in range(1 if folder == "split/val" else 6):
                Image.effect_noise((8, 8), 50).save(place / folder / name / f"{i}.png")
    Image.effect_noise((8, 8), 50).save(place / "photo.png")
    (place / "broken.png").write_bytes((place / "photo.png").read_bytes()[:60])
    write_models(place)
    return place


def write_models(place: Path) -> None:
    """Write a run, as training leaves it, without weights and with damaged ones; and a model of texts."""
    small = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"])
    torch.save(small.state_dict(), place / "small.pth")
    recipe = load_recipe("digits", ["model.overrides=[stages.0.depth=1]"]).to_yaml()
    for name in ("run", "weightless", "damaged"):
        (place / "runs" / name).mkdir(parents=True)
        (place / "runs" / name / "config.yaml").write_text(recipe)
        (place / "runs" / name / "spec.yaml").write_text(small.spec.to_yaml())
    save_weights(small, place / "runs" / "run" / "best.safetensors", {"revzoo.recipe": recipe})
    (place / "runs" / "damaged" / "best.safetensors").write_text("weights")
    reader = revzoo.create("rev_bert_mini", overrides=["stages.0.depth=1"])
    reader.class_names, reader.data_config = ("cat", "dog"), {"tokenizer": "bytes"}
    reader.save_pretrained(place / "reader")


@pytest.fixture
def _inside(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(plugin, "_imported", [])
    monkeypatch.setattr(branches, "_entries", dict(branches._load()))
    yield
    sys.modules.pop("own_parts", None)


WRONG = {
    # commands and options
    "lits": ("'lits'", "'list'"),
    "show": ("required: name",),
    "train digits --epochs 3": ("'--epochs'", "overrides without dashes"),
    "train --resume runs/run --out x": ("not allowed with argument --resume",),
    "train --resume runs/run digits": ("--resume and digits",),
    "train images photos": ("images, photos", "data.root=DIR"),
    "list a b": ("'b'",),
    "numerics a b": ("Name one model. Received: a, b.",),
    "numerics stages.0.depth=2": ("Name one model. Received: none.",),
    "verify rev_vit_digits --device gpu": ("'gpu'", "cpu"),
    "train --out ''": ("empty word",),
    # models
    "show rev_vit_dgits": ("'rev_vit_dgits'", "'rev_vit_digits'"),
    "list rev_vti*": ("'rev_vti*'", "'rev_vit_ti'"),
    "show runs/rum": ("runs/rum", "'runs/run'"),
    "show runs": ("no spec.yaml", "'runs/damaged'"),
    "show resnet18": ("'resnet18'", "revzoo convert timm:resnet18"),
    "show openai/gpt": ("'hf:openai/gpt'",),
    "plan gpt2 --budget 1GiB": ("hf:gpt2",),
    "show timm:resnet18": ("revzoo convert timm:resnet18",),
    "show digits": ("'digits'", "revzoo train digits"),
    "verify small.pth": ("small.pth", "model.checkpoint=small.pth"),
    "show recipe.yaml": ("recipe.yaml: base", "digits is a recipe"),
    "show loop.yaml": ("loop.yaml -> loop.yaml",),
    "show rev_vit_s stages.7.depth=3": ("stages.7.depth", "0 to 0"),
    "show rev_vit_digits stem.type=resnet": ("stem={type: resnet, ...}",),
    "show rev_vit_s heads=2": ("'heads'", "'block.f.heads'"),
    # files to write
    f"train --out {'x' * 3000}": ("Name a shorter one",),
    # plans
    "plan rev_vit_digits --budget 8MiB --meta --device cpu": ("--meta", "--device cpu"),
    "plan no_such:net --budget 1GiB": ("no_such",),
    "plan own_data:number --budget 1GiB": ("'number'", "raises"),
    # packages of one's own
    "show rev_vit_s --import failing_parts": ("division by zero", "line 1 of"),
    "show rev_vit_digits --import own_parts 'block.f={type: unbuilt}'": ("stages.0.f", "AttributeError", "line 8 of "),
    # recipes and settings
    "train digts": ("'digts'", "'digits'"),
    "train photos": ("revzoo train images data.root=photos",),
    "train rev_vit_s": ("'rev_vit_s'", "revzoo train digits model=rev_vit_s"),
    "train img_size=16": ("'img_size'", "model.overrides=[img_size=...]"),
    "train finetune model=rev_vit_s data.root=photos": ("rev_vit_s", "revzoo train images model=rev_vit_s"),
    "train optimizer.rl=1 train.epochs=many": ("2 problems", "'rl'", "'lr'", "'many'", "an integer >= 1"),
    "train model.overrides=[input.size=[9,9]]": ("1 channels and 9x9",),
    "train train.freeze=[steem]": ("'steem'", "such as stem"),
    "train model.checkpoint=small.pht": ("small.pht", "'small.pth'"),
    # data
    "train images": ("data.root: found nothing", "data.root=DIR"),
    "train images data.root=table.csv": ("table.csv", "revzoo train texts"),
    "train images data.root=split": ("cow",),
    "train data.name=own_data:raises": ("KeyError: 'images'", "line 4 of"),
    "train texts data.root=headless.csv": ("headless.csv", "names its columns"),
    "train texts data.root=uneven.csv": ("uneven.csv", "quotation marks"),
    "train texts data.root=table.csv model=rev_vit_digits": ("model.name=rev_roberta_mini",),
    "tokenizer table.csv --vocabulary 3 --out t.json": ("3 tokens", "261"),
    # runs, predictions, exports, conversions
    "eval": ("a model whose weights ship",),
    "eval rev_vit_s": ("No weights ship for rev_vit_s", "rev_vit_digits"),
    "eval runs/damaged": ("best.safetensors", "Copy it again"),
    "predict runs/run phot.png": ("phot.png", "'photo.png'"),
    "predict runs/run table.csv": ("table.csv", "takes images"),
    "predict runs/run broken.png": ("broken.png", "Replace or remove it"),
    "predict runs/weightless photo.png": ("revzoo train --resume runs/weightless",),
    "predict reader photo.png": ("photo.png", "Name a text file"),
    "export runs/run --out x.safetensors": ("--onnx FILE.onnx",),
    "convert small.pth --out x": ("revzoo convert NAME --weights small.pth",),
    "convert test_vit --weights small.pth --out photos": ("photos", "--out"),
}


def list_files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.usefixtures("_inside")
@pytest.mark.parametrize("command", WRONG, ids=lambda command: command[:60])
def test_the_message_names_culprit_and_remedy(command, refused, place):
    before = list_files(place)
    message = refused(*shlex.split(command))
    assert [part for part in WRONG[command] if part not in message] == [], message
    assert list_files(place) == before


def test_system_errors_are_reported_without_a_traceback(refused, monkeypatch):
    def list_models(pattern):
        raise PermissionError(13, "Permission denied", "specs/a.yaml")

    monkeypatch.setattr("revzoo.spec.list_models", list_models)
    message = refused("list")
    assert "specs/a.yaml" in message
    assert "Change its permissions" in message


def test_typos_are_answered_before_torch_is_imported():
    commands = (
        "train image",
        "train digits train.epoch=3",
        "train digits train.epochs=0",
        "train digits model=rev_vit_digit",
        "train digits memory.budget=lots",
        "train rev_vit_b_imagenet model.overrides=[stages.0.widht=3] data.root=.",
        "train finetune train.epoch=3",
        "train lm coupling=leapfrg",
        "train images data.root=nothing",
        "train texts data.root=nothing.csv",
        "show rev_vit_digit",
        "show rev_vit_b block.f.heds=3",
        "show rev_vit_b block.f.type=atention",
        "verify rev_vit_digit",
        "profile rev_vit_digit",
        "plan rev_vit_digit --budget 1GiB",
        "fits rev_vit_digit",
        "fits rev_vit_digits --card lots",
        "eval nothing",
        "generate rev_gpt_minj prompt",
    )
    code = f"import sys, zoo_cli\nfor words in {commands}: print(zoo_cli.main(words.split()), 'torch' in sys.modules, words)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [f"2 False {words}" for words in commands]
