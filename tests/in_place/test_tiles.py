"""`reversible_` with tiles: gradients of storing, an inside that is cut, and blocks that cannot be cut."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import revzoo
from revzoo.block_steps import block_chain
from revzoo.errors import InputError, RecoveryError
from tests.in_place.networks import (
    IDS,
    NETWORKS,
    ONE_BIT,
    SPLIT,
    TEXT,
    Tanh,
    Toy,
    X,
    assert_equal,
    count_bytes,
    llama,
    measure_long_text,
    train_step,
)

SPLITTABLE = ("llama", "gpt2", "vit")


@pytest.mark.parametrize("options", [{"kept_bits": 8}, ONE_BIT], ids=["8 bits", "random bit"])
@pytest.mark.parametrize(
    ("name", "split"), [*((name, None) for name in NETWORKS), ("llama", SPLIT), ("gpt2", SPLIT), ("vit", SPLIT)]
)
def test_gradients_are_those_of_storing_the_same_tiles(name, split, options):
    make, path, batch = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    keys = [*model.state_dict()]
    report = revzoo.reversible_(model, path, batch=batch, split=split, tiles=2, **options)
    assert report.chains[0].tiles == [2] * report.steps
    stored, _ = train_step(model, batch, "store")
    for schedule in ("invert", "recompute", (3 * ["invert", "store", "selective", "invert"])[: report.steps]):
        assert_equal(train_step(model, batch, schedule)[0], stored)
    assert [*model.state_dict()] == keys


@pytest.mark.parametrize("split", [None, SPLIT])
def test_gradients_are_those_of_whole_blocks(split):
    gradients = []
    for tiles in (1, 2):  # with more tiles than texts the heads are added up on the grid
        torch.manual_seed(0)
        model = llama(4).double()
        model.config._attn_implementation = "eager"
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0
        report = revzoo.reversible_(model, "model.layers", batch=TEXT, split=split, tiles=tiles)
        assert report.similarity.least_cosine > 0.99
        gradients.append(train_step(model, TEXT)[0])
    for name, whole in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], whole, rtol=1e-10, atol=1e-14)


def test_evaluation_and_generate_are_those_of_whole_blocks():
    model = llama(4).eval()
    ids = TEXT["input_ids"]
    revzoo.reversible_(model, kept_bits=8)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    logits, continued = model(ids).logits, model.generate(ids, **options)
    revzoo.ordinary_(model)
    report = revzoo.reversible_(model, kept_bits=8, tiles=2)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, **options), continued)
    report.chains[0].tiles = 1
    assert torch.equal(model(ids).logits, logits)


def test_the_peak_falls_with_the_number_of_tiles_and_what_is_kept_stays():
    wide = IDS.repeat(4, 8)  # 8 texts of 96 tokens
    batch = {"input_ids": wide, "labels": wide}
    kept, peaks = {}, {}
    for tiles in (1, 2, 4, 8):
        model = llama(4)
        revzoo.reversible_(model, batch=batch, split=SPLIT, tiles=tiles)
        kept[tiles], peaks[tiles] = count_bytes(model, batch)
    # A cut step keeps the bits of its first state, too, where it is the first: not here, since nobody asks for that state.
    assert len(set(kept.values())) == 1
    assert peaks[1] > peaks[2] > peaks[4] >= peaks[8]
    assert peaks[4] < 0.6 * peaks[1]


def test_blocks_that_mix_examples_are_refused():
    class Normed(Tanh):
        def __init__(self):
            super().__init__(lambda m, x: x + m.norm(m.layer(x)))
            self.norm = torch.nn.BatchNorm1d(6)

    model = Toy(*(Normed() for _ in range(3)))
    revzoo.reversible_(model, tiles=2)
    with pytest.raises(InputError, match=r"blocks\.0 cannot be cut into tiles along dimension 0 .* a BatchNorm1d, mixes them"):
        model(X)


def test_blocks_that_return_more_than_their_state_are_refused():
    class Telling(Tanh):
        def forward(self, x):
            return x + self.layer(x).tanh(), x.mean()

    class Listening(Toy):
        def forward(self, x):
            for block in self.blocks:
                x, _ = block(x)
            return self.head(x)

    model = Listening(*(Telling() for _ in range(3)))
    revzoo.reversible_(model, tiles=2)
    with pytest.raises(InputError, match="may return nothing but its state"):
        model(X)


@pytest.mark.parametrize("trained", ["all", "weights of norms", "all but those"])
def test_the_norms_of_one_text_are_run_in_pieces(trained, monkeypatch):
    lengths, forward = list[int](), LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda norm, x: lengths.append(x.shape[1]) or forward(norm, x))
    ids, gradients = torch.arange(64)[None] % 8, []
    for tiles in (1, 8):
        torch.manual_seed(0)
        model = llama(3)
        for name, p in model.named_parameters():
            p.requires_grad = trained == "all" or ("norm" in name) == (trained == "weights of norms")
        revzoo.reversible_(model, batch={"input_ids": ids}, split=SPLIT, tiles=tiles, **ONE_BIT)
        train_step(model, {"input_ids": ids, "labels": ids})  # it is tried
        lengths.clear()
        gradients.append(train_step(model, {"input_ids": ids, "labels": ids})[0])
    assert set(lengths) == {8}  # those in blocks, and the last one
    assert gradients[0].keys() == gradients[1].keys()
    for name, whole in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max()))


class OverTokens(LlamaRMSNorm):
    def forward(self, x):
        return x * x.pow(2).mean((-1, -2), keepdim=True).rsqrt() * self.weight


class Dropping(LlamaRMSNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class Counting(LlamaRMSNorm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Placed(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * torch.linspace(1, 2, x.shape[1], dtype=x.dtype)[:, None]


class Conditional(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * (1 + self.condition)


class Moving(LlamaRMSNorm):
    moved = None

    def forward(self, x):
        if self.training:
            self.moved = x.detach().square().mean() + (0 if self.moved is None else self.moved)
        return super().forward(x)


@pytest.mark.parametrize("norm", [OverTokens, Dropping, Counting, Placed, Conditional, Moving])
@pytest.mark.parametrize("place", ["in blocks", "after them"])
def test_norms_of_any_kind_compute_what_they_are(norm, place):
    """In pieces where each token is treated by itself, and then compared like steps; else whole."""
    ids, found = torch.arange(12)[None] % 8, []
    for tiles, schedule in ((1, "store"), (4, "store"), (4, "invert")):
        torch.manual_seed(0)
        model = llama(3).double()
        condition = torch.linspace(-1, 1, 32, dtype=torch.float64, requires_grad=True)
        norms = [module for module in model.model.layers.modules() if isinstance(module, LlamaRMSNorm)]
        for each in norms if place == "in blocks" else [model.model.norm]:
            each.__class__, each.condition = norm, condition * 1
        revzoo.reversible_(model, tiles=tiles)
        weight, hooked = model.model.layers[1].input_layernorm.weight, []
        weight.register_hook(lambda gradient, hooked=hooked: hooked.append(1) or gradient / 2)
        torch.manual_seed(5)
        if norm is Counting and place == "in blocks" and schedule == "invert":
            with pytest.raises(RecoveryError, match="ran differently"):
                train_step(model, {"input_ids": ids, "labels": ids}, schedule)
            continue
        gradients = train_step(model, {"input_ids": ids, "labels": ids}, schedule)[0]
        assert len(hooked) == 1
        found.append(gradients | ({"condition": condition.grad} if norm is Conditional else {}))
    for other in found[1:]:
        for name, expected in found[0].items():
            torch.testing.assert_close(other[name], expected, rtol=1e-6, atol=1e-9)


def test_what_is_collected_inside_is_of_the_whole_state():
    model = llama(3, attn_implementation="eager")
    revzoo.reversible_(model, tiles=4)
    attentions = model(IDS[:1].repeat(4, 1), output_attentions=True).attentions
    assert [tuple(each.shape)[:2] for each in attentions] == [(4, 4)] * 3


def test_norms_that_are_called_by_keyword_are_run_whole(monkeypatch):
    call = LlamaRMSNorm.__call__
    monkeypatch.setattr(LlamaRMSNorm, "__call__", lambda norm, x: call(norm, hidden_states=x))
    model, ids = llama(2), IDS[:1]
    revzoo.reversible_(model, batch={"input_ids": ids}, split=SPLIT, tiles=8, **ONE_BIT)
    gradients, _ = train_step(model, {"input_ids": ids, "labels": ids})
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_norms_in_pieces_return_the_dtype_of_their_weights_and_leave_nothing_behind():
    ids, dtypes = torch.arange(64)[None] % 8, set()
    model = llama(2).to(torch.bfloat16)
    model.model.unused = LlamaRMSNorm(32)
    norms = [module.float() for module in model.modules() if isinstance(module, LlamaRMSNorm)]
    for norm in norms[:-1]:
        norm.register_forward_hook(lambda _, args, out: dtypes.add((out.dtype, type(out.grad_fn).__name__)))
    with torch.autocast("cpu", torch.bfloat16):  # as after peft's prepare_model_for_kbit_training
        revzoo.reversible_(model, batch={"input_ids": ids}, split=SPLIT, tiles=8, **ONE_BIT)
        train_step(model, {"input_ids": ids, "labels": ids})  # they are tried
        dtypes.clear()
        train_step(model, {"input_ids": ids, "labels": ids})
    assert dtypes == {(torch.float32, "JoinBackward"), (torch.float32, "MulBackward0")}  # in an MLP's tiles they are whole
    revzoo.ordinary_(model)
    assert not any("forward" in norm.__dict__ for norm in norms)


def test_of_the_norms_of_one_text_one_piece_is_alive(monkeypatch):
    in_pieces, _ = measure_long_text(heads=4, tiles=16)
    monkeypatch.setattr(block_chain, "norms_in_pieces", lambda *_: nullcontext())
    whole, _ = measure_long_text(heads=4, tiles=16)
    assert whole - in_pieces > 2 * 65536
