"""Analysis of networks for texts: a batch may be ids with a mask, as a tuple or a dict."""

import pytest
import torch

import revzoo
from revzoo.display.tables.memory import tabulate_memory

LENGTHS = (64, 40, 1)


def padded(model: revzoo.Model) -> torch.Tensor:
    """Return texts of three lengths in one batch."""
    ids = model.example_input(len(LENGTHS))
    for row, length in zip(ids, LENGTHS, strict=True):
        row[length:] = model.spec.input.padding
    return ids


@pytest.mark.parametrize("name", ["rev_bert_mini", pytest.param("rev_roberta_mini", marks=pytest.mark.slow)])
def test_analysis_takes_ids_with_a_mask(name):
    model = revzoo.create(name)
    ids = padded(model)
    mask = ids != model.spec.input.padding
    for batch in ((ids, mask), {"x": ids, "attention_mask": mask}):
        report = revzoo.verify(model, batch)
        assert report.ok, report
        assert report.gradient_error < 1e-6
    measured = revzoo.measure_memory(model, (ids, mask))
    table = tabulate_memory(model, (ids, mask)).reports
    assert measured == table["invert"]
    assert measured.batch_bytes == 3 * 64 * (8 + 1)
    assert measured.weight_bytes == 4 * model.spec.expect["parameters"]
    assert table["invert"].after_forward_bytes < table["store"].after_forward_bytes / 5
    unread = revzoo.create(name, device="meta")
    assert revzoo.measure_memory(unread, ids.to("meta")) == revzoo.measure_memory(model, ids)
