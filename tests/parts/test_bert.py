"""Rev-BERT's and Rev-RoBERTa's parts against Transformers' own modules: same weights, same seed, same result."""

import pytest
import torch
import transformers
from torch import nn
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer, BertPooler
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings, RobertaLayer

import revzoo
from revzoo.errors import InputError
from revzoo.parts.branches.attention import SelfAttentionBranch
from revzoo.parts.branches.mlp import FeedForwardBranch
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.heads.text import TextFeatures
from revzoo.parts.stems.text import TokenStem

SIZES = {
    "vocab_size": 50,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-5,
    "attn_implementation": "sdpa",
}
ROBERTA = transformers.RobertaConfig(**SIZES, max_position_embeddings=18, type_vocab_size=1, pad_token_id=1)
BERT = transformers.BertConfig(**SIZES, max_position_embeddings=16, type_vocab_size=2, pad_token_id=0)
TOKENS = BuildContext(Shape(12, (16,), "tokens"), 12)


def text_context(padding: int | None) -> BuildContext:
    return BuildContext(Shape(50, (16,), "text"), 50, padding=padding)


def make_ids(padding: int) -> torch.Tensor:
    """Return three texts of 11, 7 and 2 tokens."""
    ids = torch.randint(2, 50, (3, 11))
    ids[1, 7:] = ids[2, 2:] = padding
    return ids


def redraw(module: nn.Module) -> None:
    """Draw every parameter anew, so that none is 0 or 1 by initialisation."""
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)


def run_seeded(function, *arguments):
    torch.manual_seed(1)
    return function(*arguments)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("embeddings", "config", "position"), [(RobertaEmbeddings, ROBERTA, "after_padding"), (BertEmbeddings, BERT, "learned")]
)
def test_token_stem_is_transformers_embeddings(embeddings, config, position, training):
    original = embeddings(config).train(training)
    redraw(original)
    padding = config.pad_token_id
    stem = TokenStem(text_context(padding), width=12, position=position, types=config.type_vocab_size, dropout=0.1).train(
        training
    )
    stem.load_state_dict(original.state_dict())
    ids = make_ids(padding)
    torch.testing.assert_close(run_seeded(stem, ids), run_seeded(original, ids), rtol=0, atol=0)
    assert stem.out_shape == Shape(12, (16,), "tokens")
    assert stem.embedding is stem.word_embeddings.weight


def test_positions_of_padding_are_rows_of_zeros_and_stay_so():
    stem = TokenStem(text_context(1), width=12, position="after_padding", norm="none")
    ids = make_ids(1)
    absent = ids == 1
    assert stem(ids)[absent].abs().max() == 0
    stem(ids).square().sum().backward()
    for table in (stem.word_embeddings, stem.position_embeddings):
        assert table.weight.grad[1].abs().max() == 0
    assert stem.position_embeddings.weight.shape == (18, 12)


def test_sinusoidal_positions_are_the_formula():
    stem = TokenStem(text_context(None), width=12, position="sinusoidal", norm="none").double()
    assert [k for k, _ in stem.named_parameters()] == ["word_embeddings.weight"]
    positions = stem(torch.zeros(1, 16, dtype=torch.long))[0] - stem.word_embeddings.weight[0]
    for n in range(16):
        for i in range(6):
            angle = torch.tensor(n / 10000 ** (2 * i / 12))
            torch.testing.assert_close(
                positions[n, 2 * i : 2 * i + 2], torch.stack((angle.sin(), angle.cos())).double(), atol=1e-6, rtol=0
            )
    plain = TokenStem(text_context(None), width=12, position="none", norm="none")
    ids = torch.arange(16)[None]
    torch.testing.assert_close(plain(ids)[0], plain.word_embeddings.weight[:16], rtol=0, atol=0)


def branch_weights(layer: nn.Module) -> tuple[dict, dict]:
    weights = layer.state_dict()
    f = {k.removeprefix("attention."): w for k, w in weights.items() if k.startswith("attention.")}
    return f, {k: w for k, w in weights.items() if not k.startswith("attention.")}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("layer_class", "config"), [(RobertaLayer, ROBERTA), (BertLayer, BERT)])
def test_post_branches_in_a_row_are_transformers_layer(layer_class, config, training):
    layer = layer_class(config).train(training)
    redraw(layer)
    f = SelfAttentionBranch(TOKENS, heads=3, attention_dropout=0.1, dropout=0.1).train(training)
    g = FeedForwardBranch(TOKENS, dropout=0.1).train(training)
    for branch, weights in zip((f, g), branch_weights(layer), strict=True):
        branch.load_state_dict(weights)
    x = torch.randn(3, 11, 12)
    mask = make_ids(1) != 1
    torch.testing.assert_close(
        run_seeded(lambda: g(f(x, mask), mask)), run_seeded(layer, x, mask[:, None, None, :]), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(run_seeded(lambda: g(f(x))), run_seeded(layer, x), rtol=0, atol=1e-5)


def test_attention_is_the_formula_and_ignores_padding():
    f = SelfAttentionBranch(TOKENS, heads=3, norm_position="pre").double()
    redraw(f)
    x, mask = torch.randn(3, 11, 12, dtype=torch.float64), make_ids(1) != 1
    h = f.output["LayerNorm"](x)
    parts = []
    for head in range(3):
        q, k, v = (f.self[name](h)[:, :, 4 * head : 4 * head + 4] for name in ("query", "key", "value"))
        scores = (q @ k.mT / 2).masked_fill(~mask[:, None, :], -torch.inf)
        parts.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(f(x, mask), f.output["dense"](torch.cat(parts, -1)))


def test_features_are_berts_pooler_or_all_tokens():
    pooler, head = BertPooler(BERT), TextFeatures(TOKENS)
    redraw(pooler)
    head.load_state_dict(pooler.state_dict())
    x, mask = torch.randn(3, 11, 12), make_ids(1) != 1
    for attention_mask in (None, mask):
        torch.testing.assert_close(head(x, attention_mask), pooler(x), rtol=0, atol=0)
    shifted = torch.stack([text.roll(n, 0) for n, text in enumerate(x)])  # padding in front of the second and the third
    behind = torch.arange(11) >= torch.arange(3)[:, None]
    torch.testing.assert_close(head(shifted, behind), pooler(x), rtol=0, atol=0)
    every = TextFeatures(TOKENS, of="tokens")
    assert every(x, mask) is x
    assert [head.outputs, every.outputs, len(list(every.parameters()))] == [12, 12, 0]
    for refusing in (head, every):
        with pytest.raises(
            InputError, match=r"12 features of a text .*Received: 5 outputs\. .*sequence_classification, outputs: 5"
        ):
            refusing.reset(5)


def rename_weights(original: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Return Transformers' weights under the names they have in revzoo; the tensors stay as they are."""
    weights = {}
    for key, weight in original.state_dict().items():
        key = key.removeprefix(prefix)
        if key.startswith("encoder.layer."):
            i, _, rest = key.removeprefix("encoder.layer.").partition(".")
            rest = rest.replace("attention.LayerNorm", "attention.output.LayerNorm")  # in front, in the pre-norm variant
            rest = rest.replace("intermediate.LayerNorm", "output.LayerNorm")
            branch = "f" if rest.startswith("attention.") else "g"
            weights[f"stages.0.blocks.{i}.{branch}.{rest.removeprefix('attention.')}"] = weight
            continue
        for original_prefix, own in {"embeddings.": "stem.", "LayerNorm.": "fuse.norm.", "classifier.": "head."}.items():
            if key.startswith(original_prefix):
                key = own + key.removeprefix(original_prefix)
                break
        weights[key] = weight
    return weights


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_the_steps_of_a_model_in_a_row_are_transformers_network(norm_position):
    pre = norm_position == "pre"
    kind = "RobertaPreLayerNorm" if pre else "Roberta"
    config = getattr(transformers, f"{kind}Config").from_dict(ROBERTA.to_dict())
    original = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    redraw(original)
    model = revzoo.create(
        "rev_roberta_base" if pre else "rev_roberta_base_post",
        overrides=[
            "input.length=16",
            "input.vocabulary=50",
            "stem.width=12",
            "block.f.heads=3",
            "stages=[{depth: 2, width: 12}]",
        ],
    ).eval()
    model.load_state_dict(rename_weights(original, "roberta_prelayernorm." if pre else "roberta."))
    ids = make_ids(1)
    mask = ids != 1
    with torch.no_grad():
        x = model.stem(ids)
        for step in model.steps:
            x = x + step(x, mask) if pre else step(x, mask)
        expected = original(ids, attention_mask=mask.long()).logits
        torch.testing.assert_close(model.head(model.fuse(x, x)), expected, rtol=1e-5, atol=1e-5)
