"""Wrong inputs of every kind: status 2, one message without a traceback that names the culprit and the remedy."""

import shlex
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import revzoo
from revzoo import plugin
from revzoo.checkpoint.files import save_weights
from revzoo.errors import RevzooError
from revzoo.registry import branches
from revzoo.training.recipe import load_recipe

OWN_PARTS = """
from torch import nn
from revzoo.registry import branches

@branches.register("unbuilt")
class Unbuilt(nn.Module):
    def __init__(self, context):
        self.linear = nn.Linear(5, 5)

@branches.register("listed")
def make_listed(context, *, widths: list[int]): ...
"""
FILES = {
    "table.csv": "text,label\n" + "a cat,cat\na dog,dog\n" * 12,
    "other.csv": "review,stars\ngood,5\n",
    "headless.csv": "a cat purrs,cat\na dog barks,dog\n",
    "uneven.csv": "text,label\na cat, asleep,cat\n",
    "letter.txt": "a cat",
    "failing_parts.py": "1 / 0\n",
    "own_parts.py": OWN_PARTS,
    "own_data.py": "number = 3\n\ndef raises(options, input):\n    return {}['images']\n",
    "open.yaml": "name: [a\n",
    "loop.yaml": "base: loop.yaml\n",
    "recipe.yaml": "base: digits\ntrain: {epochs: 1}\n",
    "spec.yaml": "base: rev_vit_s\n",
    "no.safetensors": "weights",
    "file": "",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder of pictures, tables, specs, weights and runs that are damaged or of another kind than they should be."""
    place = tmp_path_factory.mktemp("place")
    for name, text in FILES.items():
        (place / name).write_text(text)
    classes = {"photos": "cat dog", "one_class": "cat", "split/train": "cat dog", "split/val": "cat cow", "flat": "."}
    for folder, names in classes.items():
        for name in names.split(" "):
            (place / folder / name).mkdir(parents=True, exist_ok=True)
            for i in range(1 if folder == "split/val" else 6):
                Image.effect_noise((8, 8), 50).save(place / folder / name / f"{i}.png")
    (place / "empty").mkdir()
    Image.effect_noise((8, 8), 50).save(place / "photo.png")
    (place / "broken.png").write_bytes((place / "photo.png").read_bytes()[:60])
    torch.save({"epoch": 3}, place / "state.pth")
    write_models(place)
    return place


def write_models(place: Path) -> None:
    """Write a run, as training leaves it, without weights and with damaged ones; and a model of texts."""
    small = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"])
    small.save_pretrained(place / "saved")
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


DASHES = "Settings are overrides without dashes: "
WRONG = {
    # commands and options
    "lits": ("'lits'", "'list'"),
    "rev_vit_s": ("revzoo show rev_vit_s",),
    "show": ("required: name",),
    "show a b": ("a, b", "head.outputs=10"),
    "train --ot=runs": ("'--ot'", "'--out'"),
    "train digits --epochs 3": (f"{DASHES}train.epochs=",),
    "train --learning-rate=1": (f"{DASHES}optimizer.lr=1",),
    "show rev_vit_s --num-classes=5": (f"{DASHES}num_classes=5",),
    "list a b": ("'b'",),
    "train --resume runs/run --out x": ("not allowed with argument --resume",),
    "train --resume runs/run digits": ("--resume and digits",),
    "predict runs/run photo.png --csv --json": ("not allowed with argument --csv",),
    "show rev_vit_s --batch=0": ("--batch", "from 1 to", "'0'"),
    "verify rev_vit_s --dtype int8": ("'int8'", "'float64'"),
    "verify rev_vit_digits --device gpu": ("'gpu'", "cpu"),
    "train --out ''": ("empty word",),
    # models
    "show rev_vit_dgits": ("'rev_vit_dgits'", "'rev_vit_digits'"),
    "list rev_vti*": ("'rev_vti*'", "'rev_vit_ti'"),
    "show runs/rum": ("runs/rum", "'runs/run'"),
    "show runs": ("no spec.yaml", "'runs/damaged'"),
    "show resnet18": ("'resnet18'", "revzoo convert NAME"),
    "show digits": ("'digits'", "revzoo train digits"),
    "verify small.pth": ("small.pth", "model.checkpoint=small.pth"),
    "show open.yaml": ("open.yaml: line 2", "invalid YAML"),
    "show loop.yaml": ("loop.yaml -> loop.yaml",),
    "show recipe.yaml": ("recipe.yaml: base", "digits is a recipe"),
    "show rev_vit_s heads=2": ("'heads'", "'block.f.heads'"),
    "show rev_vit_s img_size=65": ("stem.patch: found 16", "65x65"),
    "show rev_vit_s block.f.heads=5": ("found 5", "a divisor of the width 384"),
    "show rev_vit_s block.f.type=atention": ("'atention'", "'attention'"),
    "show rev_vit_s stages.7.depth=3": ("stages.7.depth", "0 to 0"),
    "show rev_vit_s 'block.f={type:attention}'": ("type: attention",),
    "show rev_vit_digits stem.type=resnet": ("stem={type: resnet, ...}",),
    # files to write
    "show rev_vit_s --plot nowhere/x.png": ("There is no folder nowhere",),
    "show rev_vit_s --plot x.pdf": ("x.pdf", "network.png"),
    f"train --out {'x' * 3000}": ("Name a shorter one",),
    # plans
    "plan rev_vit_digits --budget 8XB": ("'8XB'", "'8GiB'"),
    "plan rev_vit_digits --budget 0%": ("'0%'", "above 0 %"),
    "plan rev_vit_digits --budget 8MiB --batch auto:64-16": ("auto:64-16", "auto:16-256"),
    "plan rev_vit_digits --budget 8MiB --optimizer adamm": ("'adamm'", "'adam'"),
    "plan rev_vit_digits --budget 8MiB --meta --device cpu": ("--meta", "--device cpu"),
    "plan rev_vit_digits --budget 8MiB --shard full": ("--shard", "--ranks N"),
    "plan timm:resnet1 --budget 1GiB": ("'resnet1'", "'resnet18'"),
    "plan no_such:net --budget 1GiB": ("no_such",),
    "plan own_data:number --budget 1GiB": ("'number'", "raises"),
    "plan timm:resnet18 --budget 1GiB --lookahead 1": ("--lookahead", "models of the zoo"),
    # packages of one's own
    "show rev_vit_s --import failing_parts": ("division by zero", "line 1 of"),
    "show rev_vit_s --import my-parts.py": ("my-parts.py", "my_parts for my_parts.py"),
    **{
        f"show rev_vit_digits --import own_parts 'block.f={{type: {part}}}'": expected
        for part, expected in {
            "unbuilt": ("stages.0.f", "AttributeError", "line 8 of "),
            "listed, widths: [3]": ("widths", "list[int]", "tuple[int, ...]"),
        }.items()
    },
    # recipes and settings
    "train digts": ("'digts'", "'digits'"),
    "train rev_vit_s": ("'rev_vit_s'", "revzoo train digits model=rev_vit_s"),
    "train photos": ("revzoo train images data.root=photos",),
    "train images photos": ("images, photos", "data.root=DIR"),
    "train spec.yaml": ("'rev_vit_s'", "revzoo train digits model=spec.yaml"),
    "train optimizer.rl=1 train.epochs=many": ("2 problems", "'rl'", "'lr'", "'many'", "an integer >= 1"),
    "train img_size=16": ("'img_size'", "model.overrides=[img_size=...]"),
    "train optimizer.lr=nan": ("'nan'", "a finite number > 0"),
    "train model.overrides=[input.size=[9,9]]": ("1 channels and 9x9",),
    "train data.name=imagefolder": ("'imagefolder'", "'folder'"),
    "train train.freeze=[steem]": ("'steem'", "such as stem"),
    "train memory.budget=12Q": ("'12Q'", "'8GiB'"),
    "train finetune model=rev_vit_s data.root=photos": ("rev_vit_s", "revzoo train images model=rev_vit_s"),
    "train finetune model=reader data.root=photos": ("model.name=rev_vit_digits",),
    "train model.checkpoint=small.pht": ("small.pht", "'small.pth'"),
    "train model.checkpoint=state.pth": ("no state dict", "epoch"),
    "train model.checkpoint=no.safetensors": ("no.safetensors", "Copy it again"),
    # data
    "train images": ("data.root: found nothing", "data.root=DIR"),
    "train images data.root=table.csv": ("table.csv", "revzoo train texts"),
    "train images data.root=phots": ("phots", "photos'"),
    "train images data.root=empty": ("empty", "one folder of images per class"),
    "train images data.root=flat": ("flat", "a folder of its own"),
    "train images data.root=one_class": ("one class: cat",),
    "train images data.root=split": ("cow",),
    "train images data.root=photos": ("data.batch_size=32", "data.batch_size=10"),
    "train data.name=own_data:raises": ("KeyError: 'images'", "line 4 of"),
    "train texts data.root=headless.csv": ("headless.csv", "names its columns"),
    "train texts data.root=other.csv": ("review, stars", "data.text.column=review"),
    "train texts data.root=uneven.csv": ("uneven.csv", "quotation marks"),
    "train texts data.root=table.csv model=rev_vit_digits": ("model.name=rev_roberta_mini",),
    "tokenizer table.csv --vocabulary 3 --out t.json": ("3 tokens", "261"),
    # runs, predictions, exports, conversions
    "eval": ("--pretrained NAME",),
    "eval photos": ("no best.safetensors",),
    "eval rev_vit_s": ("No weights ship for rev_vit_s", "rev_vit_digits"),
    "eval saved": ("revzoo eval saved data.root=IMAGES",),
    "eval runs/damaged": ("best.safetensors", "Copy it again"),
    "train --resume photos": ("no config.yaml",),
    "predict runs/run phot.png": ("phot.png", "'photo.png'"),
    "predict runs/run table.csv": ("table.csv", "takes images"),
    "predict runs/run broken.png": ("broken.png", "Replace or remove it"),
    "predict photo.png runs/run": ("photo.png", "The model comes first"),
    "predict runs/weightless photo.png": ("revzoo train --resume runs/weightless",),
    "predict reader photo.png": ("photo.png", "Name a text file"),
    "predict reader hello": ("hello", "tables or text files"),
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


@pytest.mark.usefixtures("_inside")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: revzoo.build("rev_vit_s"), r"revzoo.create\(name\)"),
        (lambda: revzoo.transform(torch.nn.Linear(2, 2)), "Received: Linear"),
        (lambda: revzoo.transform(revzoo.create("saved"))("broken.png"), "broken.png"),
        (lambda: revzoo.verify(torch.nn.Linear(2, 2), torch.rand(2, 2)), "no revzoo.Model or ReversibleChain"),
        (lambda: revzoo.reversible_(torch.nn.Linear(2, 2)), "Name a ModuleList"),
        (lambda: revzoo.convert(torch.nn.Linear(2, 2)), "Linear.*timm ViT"),
    ],
)  # fmt: skip
def test_arguments_in_python(call, message):
    with pytest.raises(RevzooError, match=message):
        call()


def test_system_errors_are_reported_without_a_traceback(refused, monkeypatch):
    def list_models(pattern):
        raise PermissionError(13, "Permission denied", "specs/a.yaml")

    monkeypatch.setattr("revzoo.spec.list_models", list_models)
    message = refused("list")
    assert "specs/a.yaml" in message
    assert "Change its permissions" in message
