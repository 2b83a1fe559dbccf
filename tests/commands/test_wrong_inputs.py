"""Wrong inputs of every kind: status 2, one message without a traceback, which says what to type or to change."""

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

OWN_DATA = """
def raises(options, input):
    return {}["images"]

def without_arguments():
    return 1

def one_set(options, input):
    return ([1],)

number = 3
"""
BROKEN_PARTS = """
from torch import nn
from revzoo.registry import branches

@branches.register("unbuilt")
class Unbuilt(nn.Module):
    def __init__(self, context):
        self.linear = nn.Linear(5, 5)

@branches.register("narrow")
class Narrow(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return self.linear(x)

@branches.register("linear")
def make_linear(context):
    return nn.Linear(5, 5)

@branches.register("unfinished")
class Unfinished(nn.Module):
    def __init__(self, context):
        super().__init__()

@branches.register("importing")
class Importing(nn.Module):
    def __init__(self, context):
        super().__init__()

    def forward(self, x):
        import no_such_package
"""
UNREADABLE_PARTS = """
from __future__ import annotations
from typing import TYPE_CHECKING
from revzoo.registry import branches
if TYPE_CHECKING:
    from revzoo.parts import Activation

@branches.register("listed")
def make_listed(context, *, widths: list[int]): ...

@branches.register("unknown")
def make_unknown(context, *, act: Activation): ...

@branches.register("positional")
def make_positional(context, hidden=3): ...
"""
TABLES = {
    "table.csv": "text,label\n" + "a cat,cat\na dog,dog\n" * 12,
    "other.csv": "review,stars\ngood,5\n",
    "headless.csv": "a cat purrs,cat\na dog barks,dog\n",
    "short.csv": "text,label\na cat,cat\na dog,dog\n",
    "oneclass.csv": "text,label\n" + "a cat,cat\n" * 12,
    "head.csv": "text,label\n",
    "empty.csv": "",
    "uneven.csv": "text,label\na cat, asleep,cat\n",
    "broken.jsonl": '{"text": "a"\n',
    "letter.txt": "a cat",
    "parts_of_nothing.py": "import no_such_package\n",
    "parts_unfinished.py": "def (:\n",
    "parts_failing.py": "1 / 0\n",
    "parts_broken.py": BROKEN_PARTS,
    "parts_unnamed.py": "import revzoo\n@revzoo.registry.branches.register\nclass Mine: ...\n",
    "parts_unreadable.py": UNREADABLE_PARTS,
    "own_data.py": OWN_DATA,
    "list.yaml": "- a\n",
    "open.yaml": "name: [a\n",
    "empty.yaml": "",
    "loop.yaml": "base: loop.yaml\n",
    "recipe.yaml": "base: digits\ntrain: {epochs: 1}\n",
    "spec.yaml": "base: rev_vit_s\n",
    "orphan.yaml": "base: nothing.yaml\n",
    "tokenizer.json": "{}",
    "no.safetensors": "weights",
    "file": "",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder of pictures, tables, specs, weights and runs that are damaged or of another kind than they should be."""
    place = tmp_path_factory.mktemp("place")
    for name, text in TABLES.items():
        (place / name).write_text(text)
    (place / "latin.csv").write_bytes("text,label\ncaf\xe9,cat\n".encode("latin1"))
    classes = {"photos": "cat dog", "one_class": "cat", "split/train": "cat dog", "split/val": "cat cow", "flat": ""}
    for folder, names in classes.items():
        for name in names.split(" "):
            (place / folder / name).mkdir(parents=True, exist_ok=True)
            for i in range(1 if folder == "split/val" else 6):
                Image.effect_noise((8, 8), 50).save(place / folder / name / f"{i}.png")
    for name in ("empty", "empty_classes/cat", "empty_classes/dog", "one_image/cat", "one_image/dog", "runs"):
        (place / name).mkdir(parents=True)
    for name in ("cat", "dog"):
        Image.effect_noise((8, 8), 50).save(place / "one_image" / name / "0.png")
    Image.effect_noise((8, 8), 50).save(place / "photo.png")
    (place / "broken.png").write_bytes((place / "photo.png").read_bytes()[:60])
    torch.save({"epoch": 3}, place / "state.pth")
    write_models(place)
    return place


def write_models(place: Path) -> None:
    """Write a run, as training leaves it, without weights and with damaged ones; and a model for texts that has no classes."""
    small = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"])
    small.save_pretrained(place / "saved")
    torch.save(small.state_dict(), place / "small.pth")
    recipe = load_recipe("digits", ["model.overrides=[stages.0.depth=1]"]).to_yaml()
    for name in ("run", "weightless", "damaged", "stateless"):
        (place / "runs" / name).mkdir()
        (place / "runs" / name / "config.yaml").write_text(recipe)
        (place / "runs" / name / "spec.yaml").write_text(small.spec.to_yaml())
    for name in ("run", "stateless"):
        save_weights(small, place / "runs" / name / "best.safetensors", {"revzoo.recipe": recipe})
    (place / "runs" / "stateless" / "last.safetensors").write_bytes(
        (place / "runs" / "stateless" / "best.safetensors").read_bytes()
    )
    (place / "runs" / "damaged" / "best.safetensors").write_text("weights")
    (place / "runs" / "stateless" / "state").mkdir()
    (place / "runs" / "stateless" / "state" / "lock").touch()
    language = revzoo.create("rev_roberta_mini", overrides=["stages.0.depth=1", "head={type: masked_lm}"])
    language.save_pretrained(place / "language")
    reader = revzoo.create("rev_bert_mini", overrides=["stages.0.depth=1"])
    reader.class_names, reader.data_config = ("cat", "dog"), {"tokenizer": "bytes"}
    reader.save_pretrained(place / "reader")


@pytest.fixture
def _inside(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(plugin, "_imported", [])
    monkeypatch.setattr(branches, "_entries", dict(branches._load()))
    yield
    for name in ("parts_broken", "parts_unreadable"):
        sys.modules.pop(name, None)


SETTINGS = "Settings are overrides without dashes: "
SHIPPED = "irevnet_digits, rev_mvit_digits, rev_swin_digits, rev_vit_digits, revnet_digits"
WRONG = [
    # models
    ("show runs/rum", "There is no file or folder runs/rum; a model's spec was expected. Did you mean 'runs/run'?"),
    ("show runs", "There is no spec.yaml in the folder runs; a model's spec was expected. Did you mean 'runs/damaged' or "),
    ("show photo.png", "photo.png is not a model's spec, which is a .yaml file. Weights go with the name of their model: "),
    ("verify small.pth", "model=NAME model.checkpoint=small.pth in training, checkpoint= in Python, --weights small.pth of "),
    ("show digits", "Unknown model or spec file 'digits'. digits is a recipe, which trains a model: revzoo train digits."),
    ("show resnet18", "A network of timm or Transformers becomes reversible first: revzoo convert NAME --out DIR."),
    ("show /dev/null", "/dev/null is not a model's spec, which is a .yaml file."),
    ("train --out ''", "An empty word was typed, such as that of a shell variable that is not set."),
    ("show REV_VIT_S", "Unknown model or spec file 'REV_VIT_S'. Did you mean 'rev_vit_s'?"),
    ("show open.yaml", "open.yaml: line 2, column 1: found invalid YAML (did not find expected ',' or ']'); allowed: valid"),
    ("show list.yaml", "list.yaml: (top level): found a list; allowed: a mapping from keys to values."),
    ("show empty.yaml", "empty.yaml: (top level): found an empty file; allowed: a mapping from keys to values."),
    ("show loop.yaml", "found loop.yaml -> loop.yaml; allowed: a base that does not inherit from this file."),
    ("show orphan.yaml", "base: found 'nothing.yaml', but there is no file nothing.yaml; allowed: an existing file."),
    ("show recipe.yaml", "recipe.yaml: base: found 'digits'", "digits is a recipe, and so is a file that inherits from it: "),
    ("train spec.yaml", "base: found 'rev_vit_s'", "that inherits from it: revzoo train digits model=spec.yaml."),
    ("train optimizer.name=adam", "override: optimizer.name: found the unknown key 'name'", "Did you mean 'optimizer.opt'?"),
    ("show rev_vit_s img_size=65", "stem.patch: found 16; allowed: a divisor of both sides of the 65x65 image."),
    ("show rev_vit_s img_size=-5", "input.size: found -5; allowed: a list of 2 integers >= 1."),
    ("show rev_vit_s block.f.heads=5", "stages.0.f.heads: found 5; allowed: a divisor of the width 384."),
    ("show rev_vit_s block.f.type=atention", "found 'atention'; allowed: one of attention, ", "Did you mean 'attention'?"),
    ("show rev_vit_s block.coupling.m=0.9", "To have another part there: block.coupling={type: NAME, m: 0.9}."),
    ("show rev_vit_s stages.7.depth=3", "stages.7.depth: found index 7 into a list of 1; allowed: 0 to 0."),
    ("show rev_vit_s 'block.f={type:attention}'", "YAML wants a blank after the colon: type: attention."),
    ("train 'schedule={sched:step}'", "YAML wants a blank after the colon: sched: step."),
    ("show rev_vit_s global_pool=avg", "override: global_pool: found the unknown key", "Did you mean 'head.pool'?"),
    ("show hf-hub:nobody", "A repository of the hub is OWNER/NAME. Received: 'nobody'. Use for example 'me/rev_vit'."),
    (f"show {'x' * 3000}", f"Unknown model or spec file '{'x' * 80}'. A network of timm"),
    # files to write
    ("show rev_vit_s --plot nowhere/x.png", "No such file or directory. There is no folder nowhere: make it first."),
    ("show rev_vit_s --plot file/x.png", "Not a directory. Name another place: a folder in it is a file."),
    ("show rev_vit_s --plot x.pdf", "A picture is written as PNG. Received: --plot x.pdf. Use --plot network.png."),
    (f"train --out {'x' * 3000}", "File name too long. Name a shorter one."),
    # plans
    ("plan rev_vit_digits --budget 8XB", "A budget is bytes, a size such as '8GiB', a share such as '60%', or 'auto'."),
    ("plan rev_vit_digits --budget -8MiB", "A budget is bytes, a size such as '8GiB'", "Received: '-8MiB'."),
    ("plan rev_vit_digits --budget 0%", "A share of the memory is above 0 % and at most 100 %. Received: '0%'."),
    ("plan rev_vit_digits --budget 8MiB --batch auto:64-16", "a range goes from low to high, such as auto:16-256."),
    ("plan rev_vit_digits --budget 8MiB --optimizer adamm", "Unknown optimizer 'adamm'. Did you mean 'adam'?"),
    ("plan rev_vit_digits --budget 8MiB --meta --device cpu", "--meta runs on no device: leave one of them out."),
    ("plan timm:resnet1 --budget 1GiB", "Unknown timm model 'resnet1'. Did you mean 'resnet18'?"),
    ("plan no_such:net --budget 1GiB", "no_such cannot be imported (No module named 'no_such'). It is a module that is"),
    ("plan own_data:number --budget 1GiB", "own_data has no function 'number'. It has: raises, without_arguments, one_set."),
    ("plan own_data:raises --budget 1GiB", "TypeError: raises() missing 2", "It takes no arguments, and returns a module"),
    ("plan own_data:without_arguments --budget 1GiB", "has to return a module and a batch. Received: int."),
    ("verify rev_vit_digits --device gpu", "device is one that torch can use here, such as cpu or meta. Received: 'gpu' ("),
    # packages of one's own
    ("show rev_vit_s --import parts_of_nothing", "Install no_such_package, or remove its import."),
    ("show rev_vit_s --import parts_unfinished", "invalid syntax (parts_unfinished.py, line 1)). Correct it there."),
    ("show rev_vit_s --import parts_failing", "ZeroDivisionError: division by zero, in line 1 of ", "Correct it there."),
    ("show rev_vit_s --import my-parts.py", "my_parts for my_parts.py or my_parts/__init__.py."),
    ("show rev_vit_s --import parts_unnamed", 'registered with its name: .register("NAME"). Received: <class ', "line 2 of "),
    *(
        (f"show rev_vit_digits --import parts_unreadable 'block.f={{type: {part}}}'", *expected)
        for part, expected in {
            "listed, widths: [3]": ["block.f.widths is annotated with list[int], which no ", "tuple[int, ...] for a list, "],
            "unknown, act: gelu": ["of act in the branch 'unknown' cannot be read (", "Received: Activation. Import the names"],
            "positional, hidden: 3": ["found the parameter 'hidden' without a * before it; allowed: none. A spec sets"],
        }.items()
    ),
    ("show rev_vit_digits input.kind=text input.length=9 input.vocabulary=9", "Replace all of it: input={kind: text, ...}."),
    ("show rev_vit_s block.coupling.type=momentum", "To have another part there: block.coupling=momentum."),
    ("show rev_vit_digits 'input={kind: text}'", "input.length: found nothing; allowed: an integer >= 1."),
    ("show rev_vit_digits stem.type=resnet", "It was written for another type. Replace all of it: stem={type: resnet, ...}."),
    *(
        (f"{command} rev_vit_digits --import parts_broken 'block.f={{type: {part}}}'", *expected)
        for command in ("show", "verify")
        for part, expected in {
            "unbuilt": ["a part that can be built (AttributeError: cannot assign module before", "line 8 of ", "stages.0.f"],
            "narrow": ["stages.0.f (type narrow) raises RuntimeError: ", "in line 17 of ", "Correct it there."],
            "unfinished": ['is missing the required "forward" function. Correct it there.'],
            "linear": ["stages.0.f (type linear) raises RuntimeError: "],
            "importing": ["raises ModuleNotFoundError: No module named 'no_such_package', in line 34 of "],
        }.items()
    ),
    # recipes and settings
    ("train photos", "To train on the images in it: revzoo train images data.root=photos."),
    ("train images data.root=~nobody-has-this-name", "There is no folder ", "Set data.root to where the data are."),
    ("train images photos", "One run has one recipe. Received: images, photos. Overrides look like data.root=photos."),
    ("train photo.png", "photo.png is not a recipe, which is a .yaml file. revzoo list --recipes prints the names"),
    ("train zzz", "Unknown recipe 'zzz'. Your own is a .yaml file: revzoo train zzz.yaml."),
    ("predict runs/run photo.png --out a.csv", "Predictions are printed: add > FILE behind --csv or --json."),
    ("train --data photos", f"{SETTINGS}data.root=photos."),
    ("train --model rev_vit_s", f"{SETTINGS}model.name=rev_vit_s."),
    ("train --device cuda", "CUDA_VISIBLE_DEVICES=0 in front of the command chooses it, ACCELERATE_USE_CPU=true the CPU."),
    ("train --output x", "Unknown option of revzoo train '--output'. Did you mean '--out'?"),
    ("train --find-lr --dry-run", "not allowed with argument --find-lr"),
    ("train model.overrides=[input.size=[9,9]", "found '[input.size=[9,9]'; allowed: a YAML value, such as 3, text, [1, 2] or"),
    ("train model.overrides=[input.size=[9,9]]", "Received: a model for 1 channels and 9x9."),
    ("train train.track=mlflow", "Write a list: [mlflow]."),
    ("train train.track=[tensorbord]", "Did you mean 'tensorboard'?"),
    ("train data.name=imagefolder", "or a function of your own, package.module:function. Did you mean 'folder'?"),
    ("train optimizer.lr=nan", "optimizer.lr: found 'nan'; allowed: a finite number > 0."),
    ("train train.class_weights=[1,2]", "override: train.class_weights: found [1.0, 2.0]; allowed: a list of 10 numbers, "),
    ("train model.num_outputs=3 --dry-run", "override: model.num_outputs: found 3; allowed: at least 10, "),
    ("train train.freeze=[x]", "override: train.freeze: found 'x'; allowed: parts of the model, such as stem, "),
    ("train optimizer.lr=-1", "optimizer.lr: found -1; allowed: a finite number > 0."),
    ("train memory.budget=12Q", "found '12Q'; allowed: null or bytes, a size such as '8GiB', a share such as '60%', or"),
    ("train train.mixed_precision=no train.epochs=no", "1 problem found:", "train.epochs: found false", "YAML reads"),
    ("train finetune model=rev_vit_s data.root=photos", "From scratch: revzoo train images model=rev_vit_s (or texts)."),
    ("train finetune data.root=photos", "the name of a model or its folder, such as model=runs/images."),
    ("train finetune model=runs/rum data.root=photos", "There is no file or folder runs/rum", "Did you mean 'runs/run'?"),
    ("train finetune model=reader data.root=photos", "or a model for images such as model.name=rev_vit_digits."),
    ("train model=small.pht", "Unknown model or spec file 'small.pht'."),
    ("train model.checkpoint=small.pht", "No weights file at small.pht. Did you mean 'small.pth'?"),
    ("train model.checkpoint=state.pth", "holds no state dict (names to tensors). Received: a dict of epoch. Save the model"),
    ("train model.checkpoint=no.safetensors", "Copy it again, or take another, such as last.safetensors of a run."),
    ("train images data.root=photos data.batch_size=4 model.checkpoint=small.pth", "Create the model it was saved from"),
    ("train train.freeze=[steem]", "train.freeze: found 'steem'; allowed: parts of the model, such as stem, "),
    # images
    ("train images", "data.root: found nothing; allowed: the folder of the data, for name: folder. Add data.root=DIR."),
    ("train images data.root=table.csv", "table.csv", "Texts are trained on by revzoo train texts."),
    ("train images data.root=photo", "Set data.root to where the data are."),
    ("train images data.root=photo.png", "photo.png is a file, and data.name=folder needs a folder."),
    ("train images data.root=phots", "Did you mean '", "photos'? Set data.root to where the data are."),
    ("train images data.root=empty", "looked for a folder called train or training with one folder of images per class, or"),
    ("train images data.root=empty_classes", "without images in them: ", "Images end with .apng, "),
    ("train images data.root=flat", "Put the images of each class into a folder of its own, such as "),
    ("train images data.root=one_class", "has one class: cat. Add a folder with images of another."),
    ("train images data.root=one_image", "have one image each: none can be held out for validation. Add some."),
    ("train images data.root=split", "does not have: cow. Remove them, or add images of them for training."),
    ("train images data.root=photos", "too few for one batch. Received: data.batch_size=32. Use data.batch_size=10 or less."),
    ("train data.name=own_data:raises", "own_data:raises raises KeyError: 'images', in line 3 of "),
    ("train data.name=own_data:without_arguments", "TypeError: without_arguments() takes 0 "),
    ("train data.name=own_data:one_set", "has to return two data sets, ", "return train, test. Received: "),
    ("train data.name=own_data:nothing", "has no attribute 'nothing'"),
    # texts
    ("train texts data.root=headless.csv", "The first row of a table names its columns.", "data.text.column='a cat purrs'"),
    ("train texts data.root=other.csv", "Received: review, stars.", "data.text.column=review"),
    ("train texts data.root=short.csv", "has 2 rows, too few to hold one of ten of each label out. Add rows, or a test "),
    ("train texts data.root=oneclass.csv", "has one label: cat. Classification needs two or more: add texts of another."),
    ("train texts data.root=head.csv", "has no rows. Add some below the names of the columns."),
    ("train texts data.root=uneven.csv", "put texts that contain these in quotation marks."),
    ("train texts data.root=latin.csv", "convert it: iconv -f latin1 -t utf-8."),
    ("train texts data.root=photo.png", "is not a table: the name of one ends with .csv or .tsv", "Save it as CSV; texts"),
    ("train texts data.root=tabel.csv", "table.csv'? Set data.root to where the texts are."),
    ("train texts data.root=table.csv data.text.tokenizer=tokenizer.json", "Make one with revzoo tokenizer."),
    ("train texts data.root=table.csv model=rev_vit_digits", "or a model for text such as model.name=rev_roberta_mini."),
    ("tokenizer other.csv --vocabulary 300 --out t.json", "data.text.column=review"),
    ("tokenizer empty.csv --vocabulary 300 --out t.json", "empty.csv is empty. Remove it, or name another file of texts."),
    ("tokenizer table.csv --vocabulary 3 --out t.json", "Received: 3 tokens. Use 261 or more."),
    # runs
    ("eval runs", "there is no best.safetensors in it. Did you mean 'runs/damaged' or "),
    ("eval photos", "there is no best.safetensors in it. Name one that revzoo train has written."),
    ("eval rev_vit_s", f"No weights ship for rev_vit_s; they do for {SHIPPED}. Train it (revzoo train images model=rev_vit_s "),
    ("eval saved", "saved does not say on which data to evaluate it. Name them: revzoo eval saved data.root=IMAGES."),
    ("eval reader", "revzoo eval reader data.root=TABLE.csv."),
    ("eval saved data.root=photos", "Fine-tune it first: revzoo train finetune model="),
    ("eval reader data.root=photos", "No train texts in ", "looked for train or training with the ending .csv"),
    ("eval runs/run data.root=photos", "data.root has no effect with digits. For other data name their kind, too:"),
    ("eval runs/damaged", "Copy it again, or take another, such as last.safetensors of a run."),
    ("eval --pretrained runs/run", "runs/run is a folder: leave --pretrained out."),
    ("eval runs/run --device cpu", "ACCELERATE_USE_CPU=true the CPU."),
    ("train --resume photos", "there is no config.yaml in it. Name one that revzoo train has written."),
    ("train --resume runs", "there is no config.yaml in it. Did you mean 'runs/damaged' or "),
    ("train --resume runs/stateless", "revzoo train runs/stateless/config.yaml"),
    # predictions and exports
    ("predict runs/run phot.png", "There is no file phot.png. Did you mean 'photo.png'? Name images or folders of them."),
    ("predict runs/run table.csv", "rev_vit_digits takes images. Received: table.csv. Name images or folders of them."),
    ("predict runs/run empty", "There are no images in empty: looked for .apng, "),
    ("predict runs/run broken.png", "The image broken.png cannot be read (", "Replace or remove it."),
    ("predict photo.png runs/run", "The model comes first, and then the files. Received: photo.png. Type revzoo predict"),
    ("predict runs photo.png", "There is no spec.yaml in the folder runs", "Did you mean 'runs/damaged' or "),
    ("predict runs/weightless photo.png", "gets them at the end of an epoch: revzoo train --resume runs/weightless"),
    ("predict reader photo.png", "photo.png is no text"),
    ("predict reader hello", "There is no file hello. Texts are in tables or text files, a text in each line."),
    ("predict saved photo.png --column review", "takes images, which have no column. Received: --column review. Leave it out."),
    ("predict language letter.txt", "Fine-tune it on labelled texts first: revzoo train finetune model=language data.name="),
    ("export runs/run --out x.safetensors", "Convert again, or write any other network with --onnx FILE.onnx."),
    ("export runs/run --onnx nowhere/x.onnx", "in a folder that exists. Received: nowhere/x.onnx. Use --onnx network.onnx."),
    # conversions
    ("convert small.pth --out x", "Use revzoo convert NAME --weights small.pth."),
    ("convert test_vit --weights state.pth --out x", "holds no state dict (names to tensors). Received: a dict of epoch."),
    ("convert test_vit --weights small.pth --out photos", "photos exists and is not an empty folder. Name another (--out)."),
    ("convert test_efficientnet --weights small.pth --out x", "A module becomes reversible in place, as it is, with"),
]  # fmt: skip


def list_files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts)


def test_there_are_many():
    assert len(WRONG) >= 120
    assert len({words[0] for words in WRONG}) == len(WRONG)


@pytest.mark.usefixtures("_inside")
@pytest.mark.parametrize("words", WRONG, ids=lambda words: words[0][:60])
def test_the_message_says_what_to_type(words, refused, place):
    command, *expected = words
    before = list_files(place)
    message = refused(*shlex.split(command))
    assert [part for part in expected if part not in message] == [], message
    assert list_files(place) == before


@pytest.mark.usefixtures("_inside")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: revzoo.create(3), "A model is a name (revzoo.list_models()), a spec file or a folder. Received: 3. Use"),
        (lambda: revzoo.create(None), "Received: None."),
        (lambda: revzoo.load_spec(["rev_vit_s"]), "Received: ['rev_vit_s']."),
        (lambda: revzoo.create("rev_vit_s", overrides=[3]), "overrides is a list of strings, such as ['head.outputs=10']."),
        (lambda: revzoo.create("rev_vit_s", pretrain=True), "create takes no 'pretrain'. Did you mean 'pretrained'?"),
        (lambda: revzoo.create("rev_vit_s", dtype="float32"), "Received: 'float32'. Use dtype=torch.float32."),
        (lambda: revzoo.build("rev_vit_s"), "Use revzoo.create(name), or revzoo.build(revzoo.load_spec(name))."),
        (lambda: revzoo.transform(torch.nn.Linear(2, 2)), "transform takes a model of revzoo.create. Received: Linear."),
        (lambda: revzoo.transform(revzoo.create("saved"))(3), "An image is a file or an image of Pillow. Received: int."),
        (lambda: revzoo.transform(revzoo.create("saved"))("broken.png"), "The image broken.png cannot be read ("),
        (lambda: revzoo.create("saved")(torch.rand(2, 3, 8, 8)), "takes images (B, 1, 8, 8). Received: (2, 3, 8, 8)."),
        (lambda: revzoo.create("reader")(torch.rand(2, 5)), "takes a tensor of token ids (int64 or int32). Received:"),
        (lambda: revzoo.verify(torch.nn.Linear(2, 2), torch.rand(2, 2)), "There is no revzoo.Model or ReversibleChain in"),
        (lambda: revzoo.reversible_(torch.nn.Linear(2, 2)), "Name a ModuleList or Sequential: reversible_(model,"),
        (lambda: revzoo.convert(torch.nn.Linear(2, 2)), "Linear (Linear) cannot be converted. What can: timm ViT, "),
    ],
)  # fmt: skip
def test_arguments_in_python(call, message):
    with pytest.raises(RevzooError) as caught:
        call()
    assert message in str(caught.value)
