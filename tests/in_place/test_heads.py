"""One long text in tiles: its attention is run in groups of heads, if it is their sum."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.block_steps import branch as branches
from revzoo.block_steps.block_chain import get_step
from revzoo.errors import RecoveryError
from tests.in_place.networks import ONE_BIT, SPLIT, assert_equal, llama, measure_long_text, train_step

IDS = torch.arange(64)[None] % 8
TEXT = {"input_ids": IDS, "labels": IDS}


def make(tiles, adapt=lambda model: model, batch=TEXT, **options):
    torch.manual_seed(0)
    model = adapt(llama(3, num_key_value_heads=2, **options).double())
    revzoo.reversible_(model, batch=batch, split=SPLIT, tiles=tiles, **ONE_BIT)
    return model


def list_widths(model, batch=TEXT, schedule="invert"):
    """Return the gradients of a step, and how many queries' channels each call of the second block has computed."""
    widths = []
    queries = next(m for name, m in model.named_modules() if name.endswith("layers.1.self_attn.q_proj"))
    with queries.register_forward_hook(lambda _, args, out: widths.append(out.shape[-1])):
        train_step(model, batch, schedule)  # with the hook, all is tried again
        widths.clear()
        gradients, _ = train_step(model, batch, schedule)
    return gradients, widths


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_groups_are_those_of_storing_and_of_whole_attention(texts, biased):
    batch = {name: x.repeat(texts, 1) for name, x in TEXT.items()}
    model = make(4, batch=batch, attention_bias=biased)
    stored, widths = list_widths(model, batch, "store")
    assert widths == 2 * texts * [16]  # two heads of keys
    inverted, widths = list_widths(model, batch)
    assert widths == 4 * texts * [16]
    assert_equal(inverted, stored)
    for schedule in ("recompute", "selective"):
        assert_equal(train_step(model, batch, schedule)[0], stored)
    gradients = []
    for tiles in (1, 4):
        model = make(tiles, batch=batch, attention_bias=biased)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0
        gradients.append(train_step(model, batch)[0])
    for name, whole in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], whole, rtol=1e-5, atol=1e-8)  # each term is rounded to 2^-32


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("use_dora", "width"), [(False, 16), (True, 32)])
def test_adapters_are_cut_with_the_projections_or_nothing_is(use_dora, width):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "k_proj", "o_proj"], lora_dropout=0.1, use_dora=use_dora, init_lora_weights=False
    )
    model = make(2, lambda model: peft.get_peft_model(model, config))
    gradients, widths = list_widths(model)
    assert set(widths) == {width}
    assert {name for name in gradients if "lora_" in name} == {name for name in gradients if "base_layer" not in name}
    assert_equal(gradients, train_step(model, TEXT, "store")[0])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_may_come_after_the_steps():
    peft = pytest.importorskip("peft")
    model = make(2)
    config = peft.LoraConfig(r=2, target_modules=["v_proj", "o_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    gradients, widths = list_widths(adapted)
    assert set(widths) == {16}
    assert len(gradients) == 12
    assert_equal(gradients, train_step(adapted, TEXT, "store")[0])


SIZES = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


def scale_sums(_):
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, residual_multiplier=0.5)).double()


def drop_inside(_):
    config = transformers.Starcoder2Config(**SIZES, num_key_value_heads=4, residual_dropout=0.1)
    return transformers.Starcoder2ForCausalLM(config).double()


def drop_outside(model):
    for layer in model.model.layers:
        layer.forward = partial(_run_with_dropout, layer)
    return model


def _run_with_dropout(layer, x, **kwargs):
    attended, _ = layer.self_attn(layer.input_layernorm(x), **kwargs)
    x = x + F.dropout(attended, 0.1, layer.training)
    return x + layer.mlp(layer.post_attention_layernorm(x))


def mix_heads(model):
    """Give the attentions a function of all heads at last."""
    for layer in model.model.layers:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, attend=attend, **kwargs: (attend(*args, **kwargs)[0].tanh(), None)
    return model


def checkpoint_attention(model):
    for layer in model.model.layers:
        layer.self_attn.forward = partial(checkpoint, layer.self_attn.forward, use_reentrant=False)
    return model


@pytest.mark.parametrize("change", [scale_sums, drop_inside, drop_outside, mix_heads, checkpoint_attention])
def test_attention_that_is_no_sum_of_heads_runs_whole(change):
    model = make(4, change)
    gradients, widths = list_widths(model)
    assert set(widths) == {32}
    assert_equal(gradients, train_step(model, TEXT, "store")[0])


def shift(model):
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda _, args, out: out + 1)


def normalize_weights(model):
    for layer in model.model.layers:
        torch.nn.utils.parametrizations.weight_norm(layer.self_attn.o_proj)


def adapt_with_a_square_factor(model):
    peft = pytest.importorskip("peft")
    keys = model.model.layers[0].self_attn.k_proj.out_features
    peft.inject_adapter_in_model(peft.LoraConfig(r=keys, target_modules=["k_proj"], init_lora_weights=False), model)


class Normalized(torch.nn.Linear):
    def forward(self, x):
        return F.normalize(super().forward(x), dim=-1)


class Quantized(torch.nn.Linear):
    """A weight whose spacing is that of all heads together."""

    def forward(self, x):
        spacing = self.weight.abs().amax() / 7
        return F.linear(x, self.weight + ((self.weight / spacing).round() * spacing - self.weight).detach(), self.bias)


class Buffered(torch.nn.Linear):
    extra = torch.full((32, 32), 0.1, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x) + x @ self.extra


def make_another(kind, name):
    def change(model):
        for layer in model.model.layers:
            getattr(layer.self_attn, name).__class__ = kind

    return change


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        *(shift, normalize_weights, adapt_with_a_square_factor, mix_heads, checkpoint_attention),
        *(make_another(kind, "o_proj") for kind in (Normalized, Quantized, Buffered)),
        make_another(Normalized, "q_proj"),
    ],
)
def test_what_comes_after_the_steps_and_is_not_known_runs_whole(change):
    model = make(4)
    change(model)
    gradients, widths = list_widths(model)
    assert set(widths) == {32}
    assert_equal(gradients, train_step(model, TEXT, "store")[0])


def test_with_fewer_tiles_than_twice_the_texts_no_attention_is_cut():
    batch = {name: x.repeat(3, 1) for name, x in TEXT.items()}
    _, widths = list_widths(make(2, batch=batch), batch)
    assert set(widths) == {32}


def test_gradients_in_half_precision_are_those_of_storing():
    torch.manual_seed(0)
    model = llama(3, num_key_value_heads=2).bfloat16()
    revzoo.reversible_(model, batch=TEXT, split=SPLIT, tiles=4, **ONE_BIT)
    gradients, widths = list_widths(model)
    assert set(widths) == {16}
    assert_equal(gradients, train_step(model, TEXT, "store")[0])


def test_an_error_in_a_group_leaves_parameters_and_gradient_mode():
    model = make(2)
    projection = model.model.layers[1].self_attn.o_proj
    own, weight = projection._parameters, projection.weight
    with projection.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        train_step(model, TEXT)
    assert projection._parameters is own
    assert projection.weight is weight
    assert torch.is_grad_enabled()
    assert_equal(train_step(model, TEXT)[0], train_step(model, TEXT, "store")[0])


def test_a_part_of_the_sum_may_not_leave_the_grid():
    model = make(2, attention_bias=True)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.zero_()
        attention.v_proj.bias.fill_(1.0)
        attention.o_proj.weight[:, :16], attention.o_proj.weight[:, 16:] = 2.0**20, -(2.0**20)
    with pytest.raises(RecoveryError, match=r"in model\.layers\.0\.attention"):
        train_step(model, TEXT)


def test_of_the_heads_of_one_text_one_group_is_alive(monkeypatch):
    in_groups, model = measure_long_text(heads=8, tiles=8)
    assert get_step(model.model.layers[0]).branch.groups == 4
    monkeypatch.setattr(branches, "can_be_cut", lambda _: False)
    whole, _ = measure_long_text(heads=8, tiles=8)
    assert whole - in_groups > 2 * 65536
