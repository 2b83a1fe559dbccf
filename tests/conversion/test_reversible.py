"""`reversible_` and `ordinary_`: the same network where it stands, exact gradients in every mode, and what is refused."""

import copy
import io
import pickle

import pytest
import timm
import torch
import transformers
from torch import nn

import revzoo
from revzoo.conversion.reversible import find_block_chains
from revzoo.conversion.similarity import Share
from revzoo.errors import ConversionError, InputError, RecoveryError, UnknownNameError
from revzoo.runtime import LiveBytes

IDS = torch.arange(24).view(2, 12) % 20
TEXT = {"input_ids": IDS, "labels": IDS}


def llama(layers=3, **options):
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, attention_dropout=0.1, **options)
    return transformers.LlamaForCausalLM(config)


def gpt2(layers=3, **options):
    config = transformers.GPT2Config(vocab_size=20, n_embd=32, n_layer=layers, n_head=4, n_positions=32, **options)
    return transformers.GPT2LMHeadModel(config)


def bert(layers=3, **options):
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_hidden_layers=layers, **options))


def vit():
    return timm.create_model("test_vit", num_classes=5, drop_path_rate=0.2, proj_drop_rate=0.1)


MASKED = {"input_ids": IDS, "attention_mask": (IDS < 18).long(), "labels": torch.tensor([0, 1])}
NETWORKS = {
    "llama": (llama, "model.layers", TEXT),
    "gpt2": (gpt2, "transformer.h", TEXT),
    "bert": (bert, "bert.encoder.layer", MASKED),
    "vit": (vit, "blocks", {"x": torch.linspace(-1, 1, 2 * 3 * 160 * 160).view(2, 3, 160, 160)}),
}


@pytest.fixture(params=NETWORKS)
def case(request):
    make, path, batch = NETWORKS[request.param]
    return make(), path, batch


def compute_loss(outputs):
    return outputs.square().mean() if isinstance(outputs, torch.Tensor) else outputs.loss


def train_step(model, batch, schedule=None):
    """Return the gradients of one training step, dropout on, and the bytes kept between forward and backward."""
    for chain in find_block_chains(model).values():
        chain.schedule = schedule or chain.schedule
    model.train().zero_grad()
    torch.manual_seed(1)
    live = LiveBytes()
    known = live.watch([*model.parameters(), *model.buffers(), *batch.values()])
    with live:
        loss = compute_loss(model(**batch))
        kept = live.alive(without=known, at=live.now())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, kept


def count_bytes(model, batch):
    """Return the bytes kept between forward and backward, and the peak, of a step that adds to gradients."""
    model.train()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    live = LiveBytes()
    known = live.watch([*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers(), *batch.values()])
    with live:
        loss = compute_loss(model(**batch))
        kept = live.alive(without=known, at=live.now())
        loss.backward()
        return kept, live.peak(without=known)


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(g is not None for g in expected.values())
    assert [name for name, g in expected.items() if not torch.equal(actual[name], g)] == []


class Tanh(nn.Module):
    """A block of a toy network; `write` is what it returns."""

    def __init__(self, write=lambda m, x: x + m.layer(x).tanh()):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.write = write

    def forward(self, x):
        return self.write(self, x)


class Toy(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Tanh() for _ in range(4)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = torch.linspace(-1, 1, 24).view(4, 6)


def test_a_network_stays_what_it_is(case):
    model, path, _ = case
    kinds = {name: type(m) for name, m in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = revzoo.reversible_(model, path)
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert report.steps == len(model.get_submodule(path))
    assert f"{path}: {report.steps} steps, each a {type(model.get_submodule(path)[0]).__name__}" in str(report)


def test_gradients_are_those_of_storing(case):
    model, path, batch = case
    revzoo.reversible_(model, path)
    stored, stored_bytes = train_step(model, batch, "store")
    for schedule in ("invert", "recompute", "selective"):
        gradients, kept = train_step(model, batch, schedule)
        assert_equal(gradients, stored)
        assert kept < stored_bytes
    mixed = ["invert", "store", "invert", "recompute", "invert", "invert"][: len(model.get_submodule(path))]
    assert_equal(train_step(model, batch, mixed)[0], stored)


def test_the_function_is_nearly_the_original_one(case):
    model, path, batch = case
    model.eval()
    with torch.no_grad():
        before = model(**batch)
        report = revzoo.reversible_(model, path, batch=batch)
        after = model(**batch)
    before, after = (y if isinstance(y, torch.Tensor) else y.logits for y in (before, after))
    assert 0 < (before - after).abs().max() < 0.02 * before.abs().max()
    assert report.similarity.least_cosine > 0.9999
    assert report.similarity.least_cosine == torch.cosine_similarity(before, after, dim=-1).min()
    assert not model.training


def test_ordinary_takes_it_back(case):
    model, path, batch = case
    expected, _ = train_step(model, batch)
    revzoo.reversible_(model, path)
    assert not all(torch.equal(g, expected[name]) for name, g in train_step(model, batch)[0].items())
    revzoo.ordinary_(model)
    assert_equal(train_step(model, batch)[0], expected)
    assert all("forward" not in m.__dict__ for m in model.modules())
    with pytest.raises(InputError, match="nothing can be undone"):
        revzoo.ordinary_(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_keeps_its_bits_alone(dtype):
    sizes = {}
    for layers in (4, 8):
        for bits in (8, 4):
            model = llama(layers).to(dtype)
            revzoo.reversible_(model, kept_bits=bits)
            sizes[layers, bits] = count_bytes(model, TEXT)
    elements = 2 * 12 * 32
    for place in (0, 1):  # what is kept, and the peak
        assert sizes[8, 8][place] - sizes[4, 8][place] == 4 * elements
        assert sizes[8, 4][place] - sizes[4, 4][place] == 4 * elements // 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_computes_in_it_with_states_in_float32(case, dtype):
    model, path, batch = case
    model = model.to(dtype)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    model.eval()
    with torch.no_grad():
        before = model(**batch)
        report = revzoo.reversible_(model, path)
        after = model(**batch)
    before, after = (y if isinstance(y, torch.Tensor) else y.logits for y in (before, after))
    assert after.dtype is before.dtype is dtype
    assert torch.cosine_similarity(before.float(), after.float(), dim=-1).min() > 0.999
    seen = []
    for block in model.get_submodule(path):
        block.register_forward_hook(lambda m, args, out: seen.append(out if isinstance(out, torch.Tensor) else out[0]))
    stored, _ = train_step(model, batch, "store")
    assert_equal(train_step(model, batch, "invert")[0], stored)
    assert {x.dtype for x in seen} == {dtype}
    assert len(seen) == 2 * report.steps  # hooks see each state once, not again in backward


def test_a_model_under_autocast_has_the_gradients_of_storing(case):
    model, path, batch = case
    revzoo.reversible_(model, path)
    gradients = []
    for schedule in ("store", "invert"):
        for chain in find_block_chains(model).values():
            chain.schedule = schedule
        model.train().zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute_loss(model(**batch))
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(gradients[1], gradients[0])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e3])
def test_a_grid_fits_the_states_of_a_batch(scale):
    torch.manual_seed(0)
    x = torch.randn(8, 6) * scale
    toy = Toy(*[Tanh(lambda m, x: x + scale * m.layer(x / scale).tanh()) for _ in range(4)])
    report = revzoo.reversible_(toy, batch=x)
    assert report.similarity.least_cosine > 0.9999
    largest = toy.blocks[0](x).abs().max()
    assert report.chains[0].coupling.fraction_bits == {1e-6: 35, 1.0: 16, 3e3: 6}[scale]
    assert largest < 2.0 ** (24 - report.chains[0].coupling.fraction_bits)
    revzoo.ordinary_(toy)
    revzoo.reversible_(toy)
    if scale > 1:
        with pytest.raises(RecoveryError, match="fraction_bits"):
            toy(x)


@pytest.mark.parametrize("through", ["deepcopy", "pickle", "file"])
def test_copies_are_reversible_and_independent(through):
    model = gpt2()
    revzoo.reversible_(model)
    expected, kept = train_step(model, TEXT)
    if through == "deepcopy":
        other = copy.deepcopy(model)
    elif through == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    revzoo.ordinary_(model)
    gradients, other_kept = train_step(other, TEXT)
    assert_equal(gradients, expected)
    assert other_kept == kept


def test_user_loops_see_the_blocks_and_the_same_function():
    model = vit().eval()
    revzoo.reversible_(model, "blocks")
    images = NETWORKS["vit"][2]["x"]
    x = model._pos_embed(model.patch_embed(images))
    assert len(model.blocks) == 6
    assert isinstance(model.blocks[1], timm.models.vision_transformer.Block)
    for block in model.blocks[:3]:
        x = block(model.norm_pre(x))
    for i in range(3, 6):
        x = model.blocks[i](x)
    assert torch.equal(model.forward_head(model.norm(x)), model(images))


@pytest.mark.parametrize("blocks", [2, 3])
def test_several_blocks_are_one_step(case, blocks):
    model, path, batch = case
    report = revzoo.reversible_(model, path, blocks_per_step=blocks)
    assert report.steps == -(-len(model.get_submodule(path)) // blocks)
    stored, _ = train_step(model, batch, "store")
    for schedule in ("invert", "recompute", "selective"):
        assert_equal(train_step(model, batch, schedule)[0], stored)


def test_steps_of_two_blocks_keep_half_the_bits():
    kept = {}
    for layers in (4, 8):
        model = llama(layers)
        revzoo.reversible_(model, blocks_per_step=2)
        kept[layers] = count_bytes(model, TEXT)
    assert kept[8][0] - kept[4][0] == kept[8][1] - kept[4][1] == 2 * 2 * 12 * 32


def test_a_loop_that_stops_within_a_step_has_right_gradients():
    torch.manual_seed(0)
    toy = Toy()
    chain = revzoo.reversible_(toy, blocks_per_step=2).chains[0]
    gradients = []
    for schedule in ("store", "invert"):
        chain.schedule = schedule
        toy.zero_grad()
        x = toy.blocks[2](toy.blocks[1](toy.blocks[0](X)))
        (toy.head(x).square().sum() + toy.blocks[3](x).sum() + toy.blocks[3](x).pow(3).sum()).backward()
        gradients.append({name: p.grad.clone() for name, p in toy.named_parameters()})
    assert_equal(gradients[1], gradients[0])


def test_a_loop_that_stops_early_or_branches_has_right_gradients():
    torch.manual_seed(0)
    toy = Toy()
    chain = revzoo.reversible_(toy, "blocks").chains[0]
    gradients = []
    for schedule in ("store", "invert"):
        chain.schedule = schedule
        toy.zero_grad()
        x = toy.blocks[0](X)
        y = toy.blocks[1](x)
        early, late = toy.head(y), toy.head(toy.blocks[3](toy.blocks[2](y)))
        again = toy.blocks[1](x)  # from the same state
        (early.sum() + late.square().sum() + again.pow(3).sum()).backward()
        gradients.append({name: p.grad.clone() for name, p in toy.named_parameters()})
    assert_equal(gradients[1], gradients[0])


def test_a_changed_or_detached_state_begins_a_new_chain():
    torch.manual_seed(0)
    toy = Toy()
    toy.eval()
    revzoo.reversible_(toy, "blocks")
    x = toy.blocks[0](X)
    new = toy.blocks[1](x.clone())
    assert not torch.equal(new, toy.blocks[1](x))
    assert torch.equal(new, toy.blocks[1](x.detach()))
    toy.blocks[1](x.detach()).sum().backward()
    assert toy.blocks[0].layer.weight.grad is None


def test_hidden_states_are_the_states_of_the_chain():
    model = llama()
    chain = revzoo.reversible_(model).chains[0]
    gradients = []
    for schedule in ("store", "invert"):
        chain.schedule = schedule
        model.train().zero_grad()
        torch.manual_seed(1)
        outputs = model(**TEXT, output_hidden_states=True)
        assert len(outputs.hidden_states) == 4
        (outputs.loss + outputs.hidden_states[2].pow(3).mean()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(gradients[1], gradients[0])
    model.eval()
    with torch.no_grad():
        hidden = model(IDS, output_hidden_states=True).hidden_states
        rope = model.model.rotary_emb(hidden[0], torch.arange(12)[None])
        x = hidden[0]
        for block, state in zip(model.model.layers, [*hidden[1:-1], None], strict=True):
            x = block(x, position_embeddings=rope)
            x = x[0] if isinstance(x, tuple) else x
            assert state is None or torch.equal(x, state)
        assert torch.equal(model.model.norm(x), hidden[-1])


def test_generation_is_that_of_the_full_forward():
    model = gpt2().eval()
    revzoo.reversible_(model)
    prompt = IDS[:, :5]
    tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False))
    expected = prompt
    for _ in range(6):
        with torch.no_grad():
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, expected)


def test_a_cache_is_filled_in_eval_mode_and_left_out_in_training():
    model = llama()
    revzoo.reversible_(model)
    assert model.train()(IDS, use_cache=True).past_key_values.get_seq_length() == 0
    model.eval()
    cache = model(IDS, use_cache=True).past_key_values
    assert cache.get_seq_length() == 12
    more = model(IDS[:, :1], past_key_values=cache).logits
    whole = model(torch.cat([IDS, IDS[:, :1]], 1)).logits
    assert torch.allclose(more[:, 0], whole[:, -1], atol=1e-5)


def test_the_longest_list_is_taken_and_named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.short, self.long = Toy(Tanh(), Tanh()), Toy()

    report = revzoo.reversible_(two := Two())
    assert [chain.path for chain in report.chains] == ["long.blocks"]
    assert report.left == ("short.blocks",)
    assert "left as they are: short.blocks; name them to make them reversible, too" in str(report)
    assert [chain.path for chain in revzoo.reversible_(two, "short.blocks").chains] == ["short.blocks"]
    assert list(find_block_chains(two)) == ["short.blocks", "long.blocks"]
    revzoo.ordinary_(two)
    report = revzoo.reversible_(two, "short.blocks", "long.blocks", kept_bits=4)
    assert report.steps == 6
    assert report.kept_bytes_per_element == (8.5, 9.5)


def test_the_report_in_words():
    torch.manual_seed(0)
    assert str(revzoo.reversible_(Toy(), batch=X)).splitlines() == [
        "Toy: momentum coupling, 8 bits kept of every element and step",
        "blocks: 4 steps, each a Tanh; they keep 11 bytes for every element of the state (their inputs alone would be 16 in "
        "float32, 8 in half precision), on a grid of 2^-16",
        "outputs before and after, 4 examples: cosine 0.999998, at least 0.999997, the same nearest neighbour for 100.0%",
    ]


def widen(m, x):
    return m.layer(x).repeat(1, 2)


def write_into(m, x):
    x += m.layer(x)
    return x


BAD = {
    "widen": (widen, r"blocks.1 changes its state from \(4, 6\), torch.float32 to \(4, 12\)"),
    "write_into": (write_into, "blocks.1 writes into what it is given"),
    "to_double": (lambda m, x: m.layer(x).double(), "blocks.1 changes its state from .* to .*torch.float64"),
    "dictionary": (lambda m, x: {}, "blocks.1 returns dict, not a new state"),
    "unrelated": (lambda m, x: -x, "blocks.1 is no residual map: .* is -1.00 times what it is given"),
}


@pytest.mark.parametrize("name", BAD)
def test_blocks_that_cannot_be_steps_are_refused_with_the_reason(name):
    write, message = BAD[name]
    toy = Toy(Tanh(), Tanh(write), Tanh(), Tanh())
    before = [dict(m.__dict__) for m in toy.modules()]
    with pytest.raises(ConversionError, match=message):
        revzoo.reversible_(toy, "blocks", batch=X)
    assert [dict(m.__dict__) for m in toy.modules()] == before


def test_a_residual_map_is_told_from_noise():
    x, g = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert not Share.of(x, x + g).is_missing
    assert not Share.of(x, x + 20 * g).is_missing
    assert Share.of(x, g).is_missing
    assert not Share.of(x[:10], g[:10]).is_missing  # too few elements to tell


@pytest.mark.parametrize("name", ["widen", "write_into", "dictionary"])
def test_without_a_batch_such_blocks_raise_in_their_first_call(name):
    toy = Toy(Tanh(), Tanh(BAD[name][0]), Tanh(), Tanh())
    revzoo.reversible_(toy, "blocks")
    with pytest.raises(InputError, match="blocks.1"):
        toy(X)


def compiled():
    toy = Toy()
    toy.blocks[2]._compiled_call_impl = toy.blocks[2]._call_impl  # as block.compile() does, which imports the compiler
    return toy


def switch_checkpointing(model, how):
    """Switch checkpointing of a model of Transformers on or off, under its name in the present version."""
    name = f"activation_checkpointing_{how}"
    getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{how}")()


def checkpointed():
    model = llama()
    switch_checkpointing(model, "enable")
    return model


def shared():
    block = Tanh()
    return Toy(block, Tanh(), block)


def nested():
    toy = Toy(nn.Sequential(Tanh(), Tanh()), nn.Sequential(Tanh(), Tanh()))
    return toy


REFUSED = {
    "no module": (lambda: 3, (), "torch.nn.Module"),
    "no list": (lambda: nn.Linear(2, 2), (), "no list of two or more blocks"),
    "no such path": (Toy, ("block",), "Did you mean 'blocks'"),
    "no list at the path": (Toy, ("head",), "'head', a Linear"),
    "shared": (shared, ("blocks",), "blocks.2 is the same module as blocks.0"),
    "nested": (nested, ("blocks", "blocks.0"), "blocks.0.0 is a part of blocks.0"),
    "compiled": (compiled, (), "before torch.compile"),
    "checkpointed": (checkpointed, (), "activation_checkpointing_disable"),
    "zoo": (lambda: revzoo.create("rev_vit_digits"), (), "reversible chain already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_reversible_is_named(name):
    make, paths, message = REFUSED[name]
    model = make()
    with pytest.raises((ConversionError, InputError, UnknownNameError), match=message):
        revzoo.reversible_(model, *paths)
    if isinstance(model, nn.Module):
        assert all("forward" not in m.__dict__ for m in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kept_bits": 9}, "kept_bits is an integer from 1 to 8"),
        ({"coupling": "additive"}, "Allowed: dual_residual, momentum"),
        ({"fraction_bits": 50}, "fraction_bits is an integer from 4 to 40"),
    ],
)
def test_numbers_out_of_range_are_named(options, message):
    with pytest.raises((InputError, UnknownNameError), match=message):
        revzoo.reversible_(Toy(), **options)


def test_a_second_call_is_refused_and_changes_nothing():
    torch.manual_seed(0)
    toy = Toy()
    revzoo.reversible_(toy, kept_bits=2)
    y = toy(X)
    with pytest.raises(InputError, match=r"'blocks' is reversible already. Call revzoo.ordinary_\(model\)"):
        revzoo.reversible_(toy)
    assert torch.equal(toy(X), y)


def test_checkpointing_switched_on_later_is_refused_in_training():
    model = llama()
    revzoo.reversible_(model)
    switch_checkpointing(model, "enable")
    with pytest.raises(InputError, match="model.layers.0 is reversible.* model.activation_checkpointing_disable"):
        model.train()(**TEXT)
    switch_checkpointing(model, "disable")
    model(**TEXT).loss.backward()


def test_a_weight_changed_before_backward_is_noticed():
    toy = Toy()
    revzoo.reversible_(toy)
    loss = toy(X).sum()
    with torch.no_grad():
        toy.blocks[1].layer.weight.mul_(2)
    with pytest.raises(RecoveryError, match="'block.layer.weight' of blocks.1 was changed in place"):
        loss.backward()
