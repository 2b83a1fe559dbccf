"""Analysis of networks for texts: a batch may be ids with a mask, as a tuple or a dict."""

import pytest
import torch

import revzoo
from revzoo.analysis.step_memory import measure_modes

LENGTHS = (64, 40, 1)


def padded(model: revzoo.Model) -> torch.Tensor:
    """Return texts of three lengths in one batch."""
    ids = model.example_input(len(LENGTHS))
    for row, length in zip(ids, LENGTHS, strict=True):
        row[length:] = model.spec.input.padding
    return ids


@pytest.mark.parametrize("name", ["rev_bert_mini", pytest.param("rev_roberta_mini", marks=pytest.mark.slow)])
def test_analysis_takes_ids_with_a_mask(name):
    model = revzoo.create(name, overrides=["stages.0.depth=1"])
    ids = padded(model)
    mask = ids != model.spec.input.padding
    for batch in ((ids, mask), {"x": ids, "attention_mask": mask}):
        report = revzoo.verify(model, batch)
        assert report.ok, report
        assert report.gradient_error < 1e-6
    measured = revzoo.measure_memory(model, (ids, mask))
    reports, _ = measure_modes(model, (ids, mask))
    assert measured == reports["invert"]
    assert measured.batch_bytes == 3 * 64 * (8 + 1)
    assert measured.weight_bytes == 4 * sum(p.numel() for p in model.parameters())
    on_meta = revzoo.create(name, overrides=["stages.0.depth=1"], device="meta")
    assert revzoo.measure_memory(on_meta, ids.to("meta")) == revzoo.measure_memory(model, ids)
