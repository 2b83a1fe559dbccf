"""What is being done is said in a line on a terminal, next to the results and not among them."""

import io
import sys

import zoo_cli

WORDS, COMMAND = "counting and timing every unit", ["profile", "rev_vit_digits", "stages.0.depth=1", "--batch", "1", "--meta"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_what_is_done(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert zoo_cli.main(COMMAND) == 0
    shown, printed = sys.stderr.getvalue(), capsys.readouterr().out
    assert WORDS in shown
    assert "rev_vit_digits" not in shown  # results are on the standard output
    assert WORDS not in printed
    assert printed != ""


def test_without_a_terminal_a_line_is_printed_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr("revzoo.display.console.TELL_SECONDS", 0.01)
    assert zoo_cli.main(COMMAND) == 0
    assert f"{WORDS} ...\n" in capsys.readouterr().err
