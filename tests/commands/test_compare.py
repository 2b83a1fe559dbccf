"""`revzoo compare`: rows that are counts of real steps, with and without the logits, and mistakes."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import revzoo
from revzoo.analysis.step_memory import measure_modes
from revzoo.on_card import compare_losses

SMALL = ["input.length=16", "stages.0.depth=1", "input.vocabulary=4096"]
WAYS = {"stored": "store", "checkpointed": "recompute", "reversible": "invert"}


def compute_loss(logits):
    return cross_entropy(logits.flatten(0, 1), torch.zeros(len(logits) * 16, dtype=torch.int64, device=logits.device))


def test_rows_are_counts_of_a_step():
    """A chunked loss keeps gradients of its input and weights for logits and labels."""
    model = revzoo.create("rev_gpt_mini", overrides=SMALL, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    answer, times = compare_losses(model, 32, "1MB", optimizer=optimizer)
    rows, labels, logits, hidden, weights = (
        {m.name: m for m in answer.methods},
        32 * 16 * 8,
        *(4 * n for n in (32 * 16 * 4096, 32 * 16 * 128, 4096 * 128)),
    )
    assert times == {}
    assert list(rows) == [f"{way}{loss}" for way in WAYS for loss in ("", ", chunked loss")]
    counted, _ = measure_modes(model, model.example_input(32), optimizer, loss=compute_loss)
    for way, mode in WAYS.items():
        assert rows[way].kept_bytes == counted[mode].after_forward_bytes
        assert rows[way].peak_bytes == counted[mode].peak_bytes
    saved = {rows[way].kept_bytes - rows[f"{way}, chunked loss"].kept_bytes for way in WAYS}
    assert len(saved) == 1
    assert logits - hidden - weights <= saved.pop() <= logits + labels
    assert [rows[f"{way}, chunked loss"].work for way in WAYS] == [rows[way].work for way in WAYS]  # no product runs twice


@pytest.mark.slow
def test_students_counts_on_a_t4():
    """They print 110 stored, 182 checkpointed and 191 reversible, each with a step of its own making."""
    model = revzoo.create("rev_gpt_20m", device="meta")
    answer, _ = compare_losses(model, 8, "14.5GiB", optimizer=torch.optim.AdamW(model.parameters()))
    assert [method.largest for method in answer.methods] == [78, 111, 178, 546, 213, 1023]


def test_the_table(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = run("compare", f"model.overrides=[{','.join(SMALL)}]", "data.batch_size=2", "--card=1MB")
    assert "rev_gpt_mini at batch 2 takes" in out
    assert "tokens/s" in out
    assert len([line for line in out.splitlines() if line.strip().startswith((*WAYS,))]) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits"], "data.name=digits, data.batch_size=48. Name the recipe lm"),
        (["lm", "data.batch_size=auto"], "data.batch_size=auto. Name the recipe lm, and a batch size"),
        (["lm", "--meta", "train.mixed_precision=bf16"], "Autocast has no meta device"),
        (["lm", "digits"], "One recipe is compared. Received: lm, digits"),
    ],
)
def test_mistakes(refused, words, message):
    assert message in refused("compare", *words)
