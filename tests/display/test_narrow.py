"""Tables on terminals of 80 and 120 columns: nothing is cut, names wrap at dots."""

import io

import pytest
from rich.console import Console, Group
from rich.table import Table

import revzoo
from revzoo.analysis.report import report_model
from revzoo.display.console import print_renderable
from revzoo.display.tables.base import DottedName, Fitted, make_table
from revzoo.display.tables.model import tabulate_model
from revzoo.display.tables.profile import tabulate_profile
from revzoo.planning.profiling.profile import profile


def render(renderable, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def layouts():
    model = revzoo.create("revnet_digits", overrides=[f"stages.{k}.depth=1" for k in range(3)], device="meta")
    report = report_model(model, 3)
    names = [part.name for part in report.parts]
    return names, {
        "show": tabulate_model(report),
        "profile": tabulate_profile(profile(model, model.example_input(2))),
    }


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ["show", "profile"])
def test_nothing_is_cut(command, width, layouts):
    names, tables = layouts
    text = render(tables[command], width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    shown = text if command == "show" else text.replace("blocks.", "")
    for name in names if command == "show" else ["stages.1.transition", "stages.1.0.f"]:
        assert name in shown, name
    for mode in ("store", "selective", "recompute", "invert"):
        assert f" {mode} " in text


def test_a_name_wraps_at_dots():
    assert [line.rstrip() for line in render(DottedName("stages.0.blocks.10-12.f"), 9).splitlines()] == [
        "stages.0.",
        "blocks.",
        "10-12.f",
    ]
    assert render(DottedName("stem"), 3).split() == ["ste", "m"]


def test_the_wide_layout_is_taken_where_numbers_stay_whole():
    def build(narrow: bool) -> Group | Table:
        table = make_table(narrow)
        table.add_column("name", min_width=None if narrow else 10)
        table.add_column("size", no_wrap=True)
        table.add_row(DottedName("a.b"), "123.0 KiB")
        return table

    assert "│ a.b        │ 123.0 KiB │" in render(Fitted(build), 26)
    narrow = render(Fitted(build), 25)
    assert "│" not in narrow
    assert "a.b   123.0 KiB" in narrow


def test_columns_say_how_wide_what_is_printed_to_a_file_is(monkeypatch, capsys):
    for columns, width in (("30", 30), ("many", 140)):
        monkeypatch.setenv("COLUMNS", columns)
        print_renderable("word " * 40)
        assert width - 5 <= max(map(len, capsys.readouterr().out.splitlines())) <= width
