"""What is being done is said in a line on a terminal, next to the results and not among them."""

import io
import sys

import pytest

import zoo_cli

COMMANDS = {
    "show": ("counting memory and FLOPs", ["show", "rev_vit_digits"]),
    "profile": ("counting and timing every unit", ["profile", "rev_vit_digits", "--batch", "1", "--meta"]),
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_says_what_is_done(command, capsys, monkeypatch):
    words, arguments = COMMANDS[command]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert zoo_cli.main(arguments) == 0
    shown, printed = sys.stderr.getvalue(), capsys.readouterr().out
    assert words in shown
    assert "rev_vit_digits" not in shown  # results are on the standard output
    assert words not in printed
    assert printed != ""


def test_without_a_terminal_nothing_is_said(capsys):
    assert zoo_cli.main(COMMANDS["profile"][1]) == 0
    assert capsys.readouterr().err == ""
