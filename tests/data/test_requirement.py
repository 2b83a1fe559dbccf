"""Models that do not fit a data set: the other kind of input, the other kind of head, attention that sees what it predicts."""

import pytest

import revzoo
from revzoo.data.loading import load_data
from revzoo.data.options import DataOptions
from revzoo.data.requirement import count_required_outputs
from revzoo.errors import DataError
from revzoo.spec.schema import ImageInput, TextInput

BYTES = TextInput("text", 16, 256)
MASKED = TextInput("text", 48, 260, 1)
LATER = "stages=[{depth: 1, width: 64}, {depth: 1, width: 64, f: {type: self_attention, heads: 2}}]"


def test_inputs_of_the_other_kind(story, options, refusal):
    assert refusal(DataOptions("digits", 4), MASKED).startswith(
        "data.name=digits is images. Received: a model for text. Use da"
    )
    assert refusal(options("masked_lm"), ImageInput("image", 1, (8, 8))).startswith(
        "data.name=masked_lm is text. Received: a model for images. Use data.name=digits or folder, or a model for text such "
    )
    assert refusal(options("causal_lm", story, batch_size=99), BYTES) == (
        "The 57 training texts are too few for one batch. Received: data.batch_size=99. Use data.batch_size=57 or less."
    )


@pytest.fixture
def outputs(causal, story, options):
    """Return a function from a model and a data set to the number of outputs that the data set requires."""

    def require(model, name, *overrides):
        source = causal if model == "causal" else model
        spec = revzoo.load_spec(source, overrides)
        root = story if name == "causal_lm" else None
        return count_required_outputs(spec, load_data(options(name, root), spec.input, 0), name)

    return require


def test_required_outputs(outputs):
    assert outputs("causal", "causal_lm") == 256
    assert outputs("causal", "causal_lm", "block.coupling={type: momentum, m: 0.0}") == 256  # which nothing inverts
    assert outputs("rev_roberta_mini", "masked_lm") == 260
    for own in (0, 9):
        assert outputs("rev_bert_mini", "text_classification", f"head.outputs={own}") == 4
    digits = revzoo.load_spec("rev_vit_digits")
    assert count_required_outputs(digits, load_data(DataOptions("digits", 4), digits.input, 0), "digits") == 10


@pytest.mark.parametrize(
    ("model", "name", "overrides", "message"),
    [
        ("rev_bert_mini", "masked_lm", ["head.outputs=4"], r"predicts an id per token.* another head: .*\{type: masked_lm\}"),
        ("rev_bert_mini", "text_classification", ["head={type: text_features}"], "returns 64 features and predicts nothing"),
        ("rev_roberta_mini", "causal_lm", [], "rev_roberta_mini, whose attention is not causal"),
        ("causal", "causal_lm", ["block.f.causal=false"], "causal, whose attention is not causal"),
        ("reformer_mini", "causal_lm", [LATER, "input.length=64"], "reformer_mini, whose attention is not causal"),
    ],
)
def test_models_that_do_not_fit(outputs, model, name, overrides, message):
    with pytest.raises(DataError, match=message):
        outputs(model, name, *overrides)
