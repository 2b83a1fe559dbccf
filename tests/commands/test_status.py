"""What is being done is said in a line on a terminal, beside the results and not among them."""

import io
import sys

import pytest

import zoo_cli

COMMANDS = {
    "show": ("counting memory and FLOPs", ["show", "rev_vit_digits"]),
    "verify": ("comparing gradients", ["verify", "rev_vit_digits", "--batch", "1"]),
    "profile": ("counting and timing every unit", ["profile", "rev_vit_digits", "--batch", "1", "--meta"]),
    "eval": ("evaluating", ["eval", "rev_vit_digits"]),
    "tokenizer": ("training the tokenizer", ["tokenizer", __file__, "--vocabulary", "300", "--out", "tokenizer.json"]),
    "train": ("comparing gradients", ["train", "data.batch_size=512", "model.overrides=[stages.0.depth=1]", "--dry-run"]),
    "plan": ("planning", ["plan", "rev_vit_digits", "--batch", "1", "--budget", "9MiB", "--meta"]),
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_says_what_is_done(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words, arguments = COMMANDS[command]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert zoo_cli.main(arguments) == 0
    shown, printed = sys.stderr.getvalue(), capsys.readouterr().out
    assert words in shown
    assert "rev_vit_digits" not in shown  # results are on the standard output
    assert words not in printed
    assert printed != ""


def test_training_says_what_it_does_before_its_first_line(monkeypatch, tmp_path):
    """Results and lines that vanish go to one terminal here, and show the order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", sys.stderr)
    assert zoo_cli.main(COMMANDS["train"][1]) == 0
    shown = sys.stderr.getvalue()
    steps = ["reading the recipe", "loading the libraries", "loading data and model", "images for training",
             "counting the memory of every mode", "peak of everything", "comparing gradients", "Dry run: "]  # fmt: skip
    assert [shown.index(step) for step in steps] == sorted(shown.index(step) for step in steps)


def test_without_a_terminal_nothing_is_said(capsys):
    assert zoo_cli.main(COMMANDS["verify"][1]) == 0
    assert capsys.readouterr().err == ""
