"""What a user mistypes is refused with status 2 and one message, and nothing is written."""

from pathlib import Path

import pytest

from revzoo import list_models

MODELS = ", ".join(list_models()[:3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lits", "Unknown command 'lits'. Did you mean 'list'? Allowed: convert, "),
        ("bench --full", "Unknown command 'bench'. Other packages are compared in a checkout: python benchmarks/peers.py. "),
        ("check --device=cuda", "Unknown command 'check'. Did you mean 'verify'? Allowed: convert, "),
        ("rev_vit_s", "Unknown command 'rev_vit_s'. rev_vit_s is a model: revzoo show rev_vit_s. Allowed: "),
        ("help lits", "Unknown command 'lits'. Did you mean 'list'?"),
        ("list --all", "Unknown option of revzoo list '--all'. revzoo list without a pattern prints the names of all models. "),
        (
            "train digits --epochs 3",
            "Unknown option of revzoo train '--epochs'. Settings are overrides without dashes: train.epochs=3. Allowed: ",
        ),
        (
            "train --learning-rate",
            "Unknown option of revzoo train '--learning-rate'. Settings are overrides without dashes: optimizer.lr=",
        ),
        (
            "show rev_vit_s --num-classes=5",
            "Unknown option of revzoo show '--num-classes'. Settings are overrides without dashes: num_classes=5.",
        ),
        (
            "plan rev_vit_s --depth 3 --budget 1GB",
            "Unknown option of revzoo plan '--depth'. Settings are overrides without dashes: stages.0.depth=3.",
        ),
        (
            "show rev_vit_s --device cpu",
            "Unknown option of revzoo show '--device'. Nothing is run, so no device is needed: leave it out.",
        ),
        (
            "train lr=1e-3 train.batch_size=8 optimizer.learning_rate=1 img_size=16 epoch=3",
            "5 problems found:\n"
            "  override: lr: found the unknown key 'lr'; allowed: model, data, optimizer, train, schedule, mixup, ema, memory, "
            "coupling. Did you mean 'optimizer.lr'?\n"
            "  override: img_size: found the unknown key 'img_size'; allowed: model, data, optimizer, train, schedule, mixup, "
            "ema, memory, coupling. Of the model it is set by model.overrides=[img_size=...].\n"
            "  override: epoch: found the unknown key 'epoch'; allowed: model, data, optimizer, train, schedule, mixup, ema, "
            "memory, coupling. Did you mean 'train.epochs'?\n"
            "  override: optimizer.learning_rate: found the unknown key 'learning_rate'; allowed: opt, lr, weight_decay, "
            "weight_decay_of, momentum, betas, eps, layer_decay, foreach, fused. Did you mean 'optimizer.lr'?\n"
            "  override: train.batch_size: found the unknown key 'batch_size'; allowed: ",
        ),
        (
            "train rev_vit_s",
            "Unknown recipe 'rev_vit_s'. rev_vit_s is a model, which a recipe trains: revzoo train digits model=rev_vit_s.",
        ),
        (
            "train ./nofile.yaml",
            "There is no file ./nofile.yaml; a recipe was expected. revzoo list --recipes prints the names that need no file.",
        ),
        (
            "show ./nofile.yaml",
            "There is no file ./nofile.yaml; a model's spec was expected. revzoo list prints the names that need no file.",
        ),
        (
            f"show {Path(__file__).parent}",
            f"There is no spec.yaml in the folder {Path(__file__).parent}; a model's spec was expected.",
        ),
        (f"show {__file__}l", f"There is no file {__file__}l; a model's spec was expected. Did you mean '{__file__}'?"),
        ("show", "The following arguments are required: name. See revzoo show --help."),
        ("show a b", "Name one model. Received: a, b. Overrides look like head.outputs=10."),
        (
            "show rev_vit_digits heads=2",
            "1 problem found:\n  override: heads: found the unknown key 'heads'; allowed: name, family, input, "
            "stem, split, block, stages, fuse, head, init, sources, twin, expect. Did you mean 'block.f.heads'?",
        ),
        (
            "list --table docs",
            "Unknown option of revzoo list '--table'. Allowed: --docs, --help, --import, --long, --recipes, -h.",
        ),
        (
            "train --ot=runs",
            "Unknown option of revzoo train '--ot'. Did you mean '--out'? Allowed: --accept-changes, --dry-run, ",
        ),
        (f"train --out {__file__}/run", f"The run folder {__file__}/run cannot be made: {__file__} is a file."),
        ("train train-epochs=3", "1 problem found:\n  override: 'train-epochs=3': found no PATH=VALUE; allowed: a dotted path"),
        ("train model.overrides=[head.outputs=3]", "1 problem found:\n  override: model.overrides: found ['head.outputs=3']; "),
        ("train --out", "Argument --out: expected one argument. See revzoo train --help."),
        ("list a b", "Unexpected argument 'b'. See revzoo list --help."),
        ("verify rev_vit_digits --dtype=int8", "Argument --dtype: invalid choice: 'int8' (choose from 'float64', 'float32', "),
        (
            "show rev_vit_digits --batch=0",
            "Argument --batch: expected an integer from 1 to 10^9. Received: '0'. See revzoo show --help.",
        ),
        ("list rev_vti*", f"Unknown model 'rev_vti*'. Did you mean 'rev_vit_ti'? Allowed: {MODELS}"),
        ("show rev_vit_dgits", f"Unknown model or spec file 'rev_vit_dgits'. Did you mean 'rev_vit_digits'? Allowed: {MODELS}"),
        (
            "verify nothing",
            "Unknown model or spec file 'nothing'. A network of timm or Transformers becomes reversible first: ",
        ),
        (
            "train --resume runs/1 --dry-run",
            "Argument --dry-run: not allowed with argument --resume. See revzoo train --help.",
        ),
        (
            "train digits --dry-run --out runs/1",
            "Only training writes a folder. Received: --out with --print-config or --dry-run. ",
        ),
        ("train digts", "Unknown recipe 'digts'. Did you mean 'digits'? Allowed: digits, digits_"),
        ("train digits more", "One run has one recipe. Received: digits, more. Overrides look like train.epochs=3."),
        (
            "train --resume runs/1 digits",
            "A resumed run keeps its recipe and its folder. Received: --resume with a recipe or --out. ",
        ),
        ("train --resume nowhere", "nowhere is not the folder of a run: there is no config.yaml in it."),
        (
            "train optimizer.rl=1 train.epochs=many",
            "2 problems found:\n"
            "  override: optimizer.rl: found the unknown key 'rl'; allowed: opt, lr, weight_decay, weight_decay_of, "
            "momentum, betas, eps, "
            "layer_decay, foreach, fused. Did you mean 'lr'?\n"
            "  override: train.epochs: found 'many'; allowed: an integer >= 1.\n",
        ),
        ("train model.name=rev_vit_digit", "Unknown model or spec file 'rev_vit_digit'. Did you mean 'rev_vit_digits'?"),
        (
            "train model.overrides=[stages.0.dpth=3]",
            "1 problem found:\n  override: stages.0.dpth: found the unknown key ",
        ),
        ("train data.name=folder data.root=nowhere data.shift=0", f"There is no folder {Path.cwd()}/nowhere. Set data.root to"),
        (
            "train model.name=revnet_38",
            "Digits are images of 1 channel and 8x8 pixels. Received: a model for 3 channels and ",
        ),
        ("eval", "Name one thing to evaluate: the folder of a run, a checkpoint in it, or --pretrained NAME."),
        (
            "eval nowhere",
            "There is no file or folder nowhere; a checkpoint or the folder of a run was expected. Name one that ",
        ),
        ("eval --pretrained rev_vit_s", "Unknown shipped weights 'rev_vit_s'."),
    ],
)
def test_mistakes(arguments, message, refused, tmp_path, monkeypatch):
    if "nowhere" not in arguments:
        monkeypatch.chdir(tmp_path)
    received = refused(*arguments.split())
    assert received.startswith(message), received
    assert list(tmp_path.iterdir()) == []


def test_system_errors_are_reported_without_a_traceback(refused, monkeypatch):
    def list_models(pattern):
        raise PermissionError(13, "Permission denied", "specs/a.yaml")

    monkeypatch.setattr("revzoo.spec.list_models", list_models)
    allowed = "Change its permissions, or name another place."
    assert refused("list") == f"cannot read or write specs/a.yaml: Permission denied. {allowed}\n"


def test_what_to_type_has_quotation_marks_where_a_shell_needs_them(refused, tmp_path):
    folder = tmp_path / "my photos"
    folder.mkdir()
    assert f"overrides without dashes: 'data.root={folder}'." in refused("train", "--data", folder)
    assert f"Overrides look like 'data.root={folder}'." in refused("train", "images", folder)
