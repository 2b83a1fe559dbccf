"""Tables on terminals of 80 and 120 columns: nothing is cut, names wrap at dots."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

import revzoo
from revzoo import list_models
from revzoo.analysis.counting import report_model
from revzoo.analysis.numerics import NumericsReport, RebuiltState
from revzoo.display.tables.base import DottedName
from revzoo.display.tables.memory import MemoryTable
from revzoo.display.tables.model import tabulate_model
from revzoo.display.tables.numerics import tabulate_numerics
from revzoo.display.tables.plan import tabulate_batches, tabulate_plan
from revzoo.display.tables.prediction import tabulate_predictions
from revzoo.display.tables.profile import tabulate_profile
from revzoo.display.tables.zoo import tabulate_recipes, tabulate_zoo
from revzoo.planning.batch import BatchPlan, BatchRow
from revzoo.planning.profiling.profile import profile
from revzoo.spec.names import data_root


def render(renderable, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def list_words(text: str) -> set[str]:
    """Return the words of a table, and the pieces of its names, which wrap behind dots and the like."""
    return {piece for word in re.sub("[─-╿]", " ", text).split() for piece in re.findall(r"[^._/-]+", word)}


def make_rows(name: str) -> dict:
    predictions = [{"class": f"{name}_{k}", "probability": 0.25} for k in range(4)]
    return {"input": f"photographs/2024/holidays/{name}/IMG_20240714_173055.jpeg", "predictions": predictions}


@pytest.fixture(scope="module")
def measured():
    model = revzoo.create("revnet_digits", overrides=[f"stages.{k}.depth=1" for k in range(3)], device="meta")
    return report_model(model, 3), profile(model, model.example_input(2))


@pytest.fixture(scope="module")
def tables(measured):
    """One table of each kind that the commands print, with long names."""
    report, counted = measured
    plan = replace(revzoo.solve(counted, "1TB"), seconds=1.25)
    beside = {"all stored": {"peak_bytes": 4 << 20, "seconds": 1.0, "extra_flops": 0}}
    rows = tuple(BatchRow(size, 0.125, None, 0.25, 3 << 30, ("store",)) for size in (16, 1024))
    states = (RebuiltState("stages.10.blocks.17.f", False, 3.0, 1e-12, 7e13),)
    large = replace(report.memory["store"], **dict.fromkeys(("weight_bytes", "after_forward_bytes", "peak_bytes"), 1023 << 20))
    modes = ("store", "selective", "recompute", "invert", "stage_inputs", "twin: vit_base_patch16_224")
    return {
        "show": tabulate_model(report),
        "memory": MemoryTable(dict.fromkeys(modes, large), "invert"),
        "profile": tabulate_profile(counted),
        "plan": tabulate_plan(plan, beside),
        "batches": tabulate_batches(BatchPlan(1024, plan, 0.125, rows)),
        "predict": tabulate_predictions([make_rows(name) for name in ("golden_retriever", "Indian elephant")]),
        "list": tabulate_zoo(list_models(), json.loads((data_root() / "docs" / "zoo.json").read_text())),
        "recipes": tabulate_recipes({"rev_mvit_b_imagenet": "Rev-MViT-B on ImageNet with the numbers of the authors. " * 3}),
        "numerics": tabulate_numerics("a title", NumericsReport(states, 1e-5)),
    }


KINDS = ["show", "memory", "profile", "plan", "batches", "predict", "list", "recipes", "numerics"]


@pytest.mark.parametrize("kind", KINDS)
def test_words_and_numbers_stay_whole(kind, tables):
    wide = list_words(render(tables[kind], 400))
    assert len(wide) >= 10
    for width in (80, 120):
        text = render(tables[kind], width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        assert wide <= list_words(text)


def test_a_name_wraps_at_dots():
    assert [line.rstrip() for line in render(DottedName("stages.0.blocks.10-12.f"), 9).splitlines()] == [
        "stages.0.",
        "blocks.",
        "10-12.f",
    ]
    assert render(DottedName("stem"), 3).split() == ["ste", "m"]
