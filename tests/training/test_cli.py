import subprocess
import sys
from pathlib import Path

import pytest
import torch

from revzoo import list_models
from revzoo.analysis.verify import VerifyReport
from revzoo.training.evaluation import Scores
from zoo_cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
MODELS = ", ".join(list_models()[:3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "lits",
            "Unknown command 'lits'. Did you mean 'list'? Allowed: check, convert, eval, export, list, plan, profile, show, "
            "tokenizer, train.",
        ),
        (
            "train --ot=runs",
            "Unknown option of revzoo train '--ot'. Did you mean '--out'? Allowed: --help, --out, ",
        ),
        (f"train --out {__file__}/run", f"The run folder {__file__}/run cannot be made: {__file__} is a file."),
        ("train train-epochs=3", "1 problem found:\n  override: 'train-epochs=3': found no PATH=VALUE; allowed: a dotted path"),
        ("train model.overrides=[head.outputs=3]", "1 problem found:\n  override: model.overrides: found ['head.outputs=3']; "),
        ("train --out", "Argument --out: expected one argument. See revzoo train --help."),
        ("list a b", "Unexpected argument 'b'. See revzoo list --help."),
        ("check rev_vit_digits --dtype=int8", "Argument --dtype: invalid choice: 'int8' (choose from 'float64', 'float32', "),
        (
            "show rev_vit_digits --batch=0",
            "Argument --batch: expected an integer from 1 to 10^9. Received: '0'. See revzoo show --help.",
        ),
        ("list rev_vti*", f"Unknown model 'rev_vti*'. Did you mean 'rev_vit_ti'? Allowed: {MODELS}"),
        ("show rev_vit_dgits", f"Unknown model or spec file 'rev_vit_dgits'. Did you mean 'rev_vit_digits'? Allowed: {MODELS}"),
        ("check nothing", f"Unknown model or spec file 'nothing'. Allowed: {MODELS}"),
        ("train digts", "Unknown recipe 'digts'. Did you mean 'digits'? Allowed: digits, digits_"),
        ("train digits more", "One run has one recipe. Received: digits, more. Overrides look like train.epochs=3."),
        (
            "train --resume runs/1 digits",
            "A resumed run keeps its recipe. Received: --resume with more. Use revzoo ",
        ),
        ("train --resume nowhere", "nowhere is not the folder of a run: there is no config.yaml in it."),
        (
            "train optimizer.rl=1 train.epochs=many",
            "2 problems found:\n"
            "  override: optimizer.rl: found the unknown key 'rl'; allowed: opt, lr, weight_decay, momentum, betas, eps, "
            "layer_decay. Did you mean 'lr'?\n"
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
        ("eval nowhere", "No weights file at nowhere."),
        ("eval --pretrained rev_vit_s", "Unknown shipped weights 'rev_vit_s'."),
    ],
)
def test_mistakes(arguments, message, capsys, tmp_path, monkeypatch):
    """Status 2 and one message, without a traceback, and nothing written."""
    if "nowhere" not in arguments and "pyproject" not in arguments:
        monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"revzoo: {message}"), err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_without_arguments_the_commands_are_listed(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(f"  {name}" in out and command.summary in out for name, command in COMMANDS.items())


def test_list(capsys):
    assert main(["list", "revnet_1*_cifar100"]) == 0
    assert capsys.readouterr().out.split() == ["revnet_110_cifar100", "revnet_164_cifar100"]


def test_list_does_without_torch():
    code = "import sys, zoo_cli; zoo_cli.main(['list']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_show_and_check(capsys):
    assert main(["show", "rev_vit_digits", "--batch", "2"]) == 0
    assert "302,794" in capsys.readouterr().out
    assert main(["check", "rev_vit_digits", "--batch", "2"]) == 0
    assert "Safe to train in float32" in capsys.readouterr().out


def test_a_failed_check_is_status_1(capsys, monkeypatch):
    report = VerifyReport(torch.float32, {}, problems=("The gradients are wrong.",))
    monkeypatch.setattr("revzoo.verify", lambda model, batch: report)
    assert main(["check", "rev_vit_digits"]) == 1
    assert capsys.readouterr().out == f"{report}\n"


def test_train_eval_resume(fast, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *fast]) == 0
    assert main(["train", "digits", "train.seed=1", *fast]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("top-1"))
    assert first.endswith("runs/digits")
    assert second.endswith("runs/digits-2")
    assert main(["train", "--resume", "runs/digits"]) == 0
    assert first in capsys.readouterr().out
    assert main(["eval", "runs/digits/last.safetensors", "data.batch_size=50"]) == 0
    top1 = first.split(" after")[0]
    assert f"runs/digits/last.safetensors: {top1}, top-5 " in capsys.readouterr().out
    assert main(["train", *fast, "--out", "runs/digits"]) == 2
    assert "runs/digits is not empty. Go on with that run (--resume runs/digits)" in capsys.readouterr().err
    assert main(["eval", "runs/digits", "train.epochs=3"]) == 2
    assert "Received: train.epochs=3. Evaluation takes data.... and train.mixed_precision" in capsys.readouterr().err


def test_system_errors_are_said_without_a_traceback(capsys, monkeypatch):
    def list_models(pattern):
        raise PermissionError(13, "Permission denied", "specs/a.yaml")

    monkeypatch.setattr("revzoo.spec.list_models", list_models)
    assert main(["list"]) == 2
    assert capsys.readouterr().err == "revzoo: cannot read or write specs/a.yaml: Permission denied\n"


def test_scores_that_are_no_numbers_are_status_1(capsys, monkeypatch):
    scores = Scores(10.0, 50.0, float("nan"), 355)
    monkeypatch.setattr("revzoo.training.evaluation.evaluate_checkpoint", lambda path, overrides: scores)
    assert main(["eval", "run"]) == 1
    assert "the loss is not finite" in capsys.readouterr().err
