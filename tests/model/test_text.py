"""Networks for texts: padding, masks, tied embeddings, and what they say to ids they cannot take."""

import copy
import re

import pytest
import torch

import revzoo
from revzoo.checkpoint.files import load_weights, read_tensors, save_weights
from revzoo.errors import InputError

MASKED_LM, CLASSIFIER = "rev_roberta_mini", "rev_bert_mini"
WIDE = "init={type: normal, std: 0.2}"
POST = ["block.f.norm_position=post", "block.g.norm_position=post", "fuse.norm=none"]
LENGTHS = (64, 40, 1)


def padded(model: revzoo.Model) -> torch.Tensor:
    """Return texts of three lengths in one batch."""
    ids = model.example_input(len(LENGTHS))
    for row, length in zip(ids, LENGTHS, strict=True):
        row[length:] = model.spec.input.padding
    return ids


@pytest.mark.parametrize(("name", "overrides"), [(MASKED_LM, POST), (CLASSIFIER, [])])
def test_padding_changes_nothing(name, overrides):
    model = revzoo.create(name, overrides=[*overrides, WIDE]).eval()
    ids = padded(model)
    with torch.no_grad():
        together = model(ids)
        alone = [model(text[None, :length])[0] for text, length in zip(ids, LENGTHS, strict=True)]
        for given in (ids != model.spec.input.padding, (ids != model.spec.input.padding).long()):
            assert torch.equal(model(ids, attention_mask=given), together)
    assert together.shape == ((3, 64, 260) if name == MASKED_LM else (3, 2))
    for logits, text, length in zip(together, alone, LENGTHS, strict=True):
        torch.testing.assert_close(logits[:length] if name == MASKED_LM else logits, text, rtol=0, atol=1e-5)


@pytest.mark.parametrize("overrides", [[], POST], ids=["own", "post"])
def test_padding_in_front_changes_no_class(overrides):
    """Where positions are counted behind padding; learned ones are shifted by it."""
    head = "head={type: sequence_classification, outputs: 3}"
    model = revzoo.create(MASKED_LM, overrides=[*overrides, head, WIDE]).eval()
    ids = padded(model)
    front = torch.stack([text.roll(-length) for text, length in zip(ids, LENGTHS, strict=True)])
    assert (front[1:, 0] == model.spec.input.padding).all()
    with torch.no_grad():
        alone = torch.cat([model(text[None, :length]) for text, length in zip(ids, LENGTHS, strict=True)])
        torch.testing.assert_close(model(front), alone, rtol=0, atol=1e-5)
    learned = revzoo.create(MASKED_LM, overrides=[head, WIDE, "stem.position=learned"]).eval()
    with torch.no_grad():
        assert (learned(front)[1] - learned(ids[1:2, :40])).abs().max() > 0.01


def test_a_mask_hides_what_is_no_padding():
    model = revzoo.create(CLASSIFIER, overrides=[WIDE]).eval()
    ids = model.example_input(2)
    mask = torch.ones(2, 64, dtype=torch.bool)
    mask[:, 30:] = False
    other = ids.clone()
    other[:, 30:] = model.example_input(2)[:, 30:]
    torch.testing.assert_close(model(other, mask), model(ids, mask), rtol=0, atol=1e-5)
    assert (model(other) - model(ids)).abs().max() > 0.1


@pytest.mark.parametrize(("name", "overrides"), [(MASKED_LM, []), (CLASSIFIER, POST)])
def test_gradients_of_padded_texts_under_dropout_equal_stored_ones(name, overrides, gradients):
    model = revzoo.create(name, overrides=overrides, dtype=torch.float64)
    gradients.make_streams_unequal(model)
    ids = padded(model)
    expected = gradients.compute(model, "store", ids)
    with_mask = gradients.compute(model, "store", ids, ids != model.spec.input.padding)
    assert gradients.differing(with_mask, expected) == []
    for schedule in ("invert", "recompute", "selective"):
        assert gradients.largest_error(gradients.compute(model, schedule, ids), expected) < 1e-10, schedule
    model.eval()
    without = gradients.compute(model, "store", ids)
    change = without["stem.word_embeddings.weight"] - expected["stem.word_embeddings.weight"]
    assert change.norm() > 0.1 * expected["stem.word_embeddings.weight"].norm(), "dropout drew"


def tied(model: revzoo.Model) -> bool:
    return model.head.weight is model.stem.word_embeddings.weight


def test_the_embedding_is_one_parameter_wherever_it_goes(tmp_path):
    model = revzoo.create(MASKED_LM)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(names) == len(list(model.parameters())) + 1 == 61
    assert model.num_outputs == 260
    assert model.stem.word_embeddings.weight[1].abs().max() == 0, "the head has not drawn it again"
    save_weights(model, path := tmp_path / "tied.safetensors")
    kept = read_tensors(path)
    assert len(kept) == 60
    assert kept["stem.word_embeddings.weight"].shape == (260, 64)
    assert "head.weight" not in kept

    other = revzoo.create(MASKED_LM)
    load_weights(other, path)
    on_meta = revzoo.create(MASKED_LM, device="meta", checkpoint=path)
    ids = padded(model)
    model.eval()
    for loaded in (other, on_meta, copy.deepcopy(model)):
        assert tied(loaded)
        assert len(list(loaded.parameters())) == 60
        assert torch.equal(loaded.eval()(ids), model(ids))
    assert tied(model.double())


def test_both_uses_of_the_embedding_reach_its_gradient():
    model = revzoo.create(MASKED_LM).eval()
    ids = torch.tensor([[4, 5, 6]])
    model(ids)[0, 0, 7].backward()
    rows = model.stem.word_embeddings.weight.grad.norm(dim=1)
    assert rows.nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_exact_gradients_of_padded_texts_are_bit_identical(gradients):
    model = revzoo.create(MASKED_LM, exact=True)
    ids = padded(model)
    assert gradients.differing(gradients.compute(model, "invert", ids), gradients.compute(model, "store", ids)) == []


@pytest.mark.parametrize(
    ("name", "overrides", "parameters"),
    [("rev_roberta_base_mlm", POST, 124_697_433), ("rev_roberta_base", ["head.outputs=3"], 124_648_706 + 769)],
)
def test_parameters_are_as_many_as_in_transformers(name, overrides, parameters):
    model = revzoo.create(name, overrides=overrides, device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_num_outputs_are_classes_and_not_a_vocabulary():
    assert revzoo.create(CLASSIFIER, num_outputs=5)(torch.tensor([[2, 3]])).shape == (1, 5)
    with pytest.raises(InputError, match=r"scores the 260 ids of its vocabulary\. Received: 5 outputs"):
        revzoo.create(MASKED_LM, num_outputs=5)


IDS = torch.full((2, 5), 7)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([IDS.float()], "Received: torch.float32"),
        ([IDS.tolist()], "Received: list"),
        ([IDS[0]], "Received: (5,). One text is ids[None]"),
        ([IDS[:, :0]], "Received: (2, 0)"),
        ([IDS.repeat(1, 13)], "Received: (2, 65). One text is ids[None]; truncate"),
        ([IDS + 253], "Received: id 260"),
        ([IDS - 8], "Received: id -1"),
        ([IDS * torch.tensor([[1], [0]]) + torch.tensor([[0], [1]])], "Example 1 of the batch has no token"),
        ([IDS, IDS[:, :4]], "Received: (2, 4)"),
        ([IDS, [[1] * 5] * 2], "Received: list"),
        ([IDS, torch.tensor([[0.0] * 4 + [-1e9]] * 2)], "Received: other numbers"),
        ([IDS, torch.zeros(2, 5)], "Example 0 of the batch has no token"),
    ],
)
def test_texts_that_a_model_cannot_take_are_named(batch, message):
    with pytest.raises(InputError, match=re.escape(message)):
        revzoo.create(MASKED_LM)(*batch)


def test_images_have_no_mask():
    model = revzoo.create("rev_vit_digits")
    with pytest.raises(InputError, match="rev_vit_digits takes images, which have no attention mask"):
        model(model.example_input(2), torch.ones(2, 16))


def test_short_texts_int32_and_no_padding_id():
    model = revzoo.create(CLASSIFIER).eval()
    assert torch.equal(model(IDS.int()), model(IDS))
    assert model(IDS[:0]).shape == (0, 2)
    without = revzoo.create(CLASSIFIER, overrides=["input.padding=null"]).eval()
    without.load_state_dict(model.state_dict())
    torch.testing.assert_close(without(IDS), model(IDS), rtol=0, atol=1e-6)
