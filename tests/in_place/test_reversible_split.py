"""`reversible_` with `split`: two steps of each block, exact gradients, the same function, and what cannot be split."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import revzoo
from revzoo.block_steps.conventions import get_state
from revzoo.errors import ConversionError
from revzoo.runtime import LiveBytes
from tests.in_place.networks import IDS, TEXT, assert_equal
from tests.in_place.test_reversible_networks import NETWORKS, compute_gradients

SPLIT = ("attention", "mlp")
SIZES = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
X = torch.linspace(-1, 1, 40).view(5, 8).sin()


def llama(layers=3, **options):
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers, intermediate_size=48, attention_dropout=0.1, **options)
    return transformers.LlamaForCausalLM(config)


def opt():
    config = transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, num_hidden_layers=3, dropout=0.1)
    config.use_cache = False  # old versions need the cache that a block returns
    return transformers.OPTForCausalLM(config)


class Block(nn.Module):
    """A block of a toy network, from norm to scale; `write` is what it returns."""

    def __init__(self, write=None, norm=nn.LayerNorm):
        super().__init__()
        self.norm1, self.attn, self.scale1 = norm(8), nn.Linear(8, 8), nn.Dropout(0.1)
        self.norm2, self.mlp = norm(8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.write = write

    def forward(self, x):
        if self.write is not None:
            return self.write(self, x)
        x = x + self.scale1(self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Toy(nn.Module):
    def __init__(self, depth=3, write=None, norm=nn.LayerNorm):
        super().__init__()
        self.blocks = nn.ModuleList(Block(write, norm) for _ in range(depth))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = get_state(block(x))
        return self.head(x)


@pytest.fixture
def toy():
    torch.manual_seed(0)
    return Toy()


def train_step(model, batch, schedule=None, chains=()):
    """Return the gradients of one training step, dropout on."""
    for chain in chains:
        chain.schedule = schedule
    model.train().zero_grad()
    torch.manual_seed(1)
    outputs = model(**batch) if isinstance(batch, dict) else model(batch)
    (outputs.square().mean() if isinstance(outputs, torch.Tensor) else outputs.loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def is_untouched(model):
    return not any(m.__dict__.keys() & {"forward", "_call_impl"} for m in model.modules())


@pytest.mark.parametrize(("make", "batch"), [(llama, TEXT), (opt, TEXT), (Toy, X)])
def test_gradients_are_those_of_storing(make, batch):
    torch.manual_seed(0)
    model = make()
    keys, names = list(model.state_dict()), train_step(model, batch).keys()
    report = revzoo.reversible_(model, batch=batch, split=SPLIT)
    assert list(model.state_dict()) == keys
    assert report.steps == 6
    assert report.similarity.least_cosine > 0.9999
    stored = train_step(model, batch, "store", report.chains)
    assert stored.keys() == names
    for schedule in ("invert", "recompute", "selective", ["invert", "store"] * 3, ["selective", "invert"] * 3):
        assert_equal(train_step(model, batch, schedule, report.chains), stored)
    revzoo.ordinary_(model)
    assert is_untouched(model)


POST_NORM = {"DeBERTa-v2", "BLOOM", "BERT", "RoBERTa", "ELECTRA", "DistilBERT", "MPNet", "BART"}
SIDE_BY_SIDE = {"GPT-NeoX", "Falcon"}
OF_OTHER_BRANCHES = {"timm ConvNeXt, a stage"}


def test_the_networks_that_are_refused_are_among_those_that_are_tried():
    assert NETWORKS.keys() >= POST_NORM | SIDE_BY_SIDE | OF_OTHER_BRANCHES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Mixtral, auxiliary loss" else pytest.mark.slow) for name in NETWORKS]
)
def test_many_architectures(name):
    make, paths, batch = NETWORKS[name]
    torch.manual_seed(0)
    try:
        made = make()
    except AttributeError as error:
        pytest.skip(str(error))
    model = made if isinstance(made, nn.Module) else made[0](made[1])
    options = {"batch": {k: v for k, v in batch.items() if k != "labels" or paths}, "split": SPLIT}
    if name in POST_NORM | SIDE_BY_SIDE | OF_OTHER_BRANCHES:
        with pytest.raises(ConversionError, match=r"cannot be two steps|no submodule that is known as 'attention'"):
            revzoo.reversible_(model, *paths, **options)
        assert is_untouched(model)
        return
    original = compute_gradients(model, batch)
    report = revzoo.reversible_(model, *paths, **options)
    assert report.similarity.least_cosine > 0.9999
    assert report.steps == 2 * sum(chain.length for chain in report.chains)
    gradients = {}
    for schedule in ("store", "invert"):
        for chain in report.chains:
            chain.schedule = schedule
        gradients[schedule] = compute_gradients(model, batch)
    assert_equal(gradients["invert"], gradients["store"])
    assert "layers dropped" in name or gradients["store"].keys() == original.keys()


def test_a_step_is_a_branch_with_its_sum_and_nothing_of_the_other_runs(toy):
    toy.eval()
    called = []
    for name, module in toy.blocks[1].named_children():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    revzoo.reversible_(toy, batch=X, split=SPLIT)
    called.clear()
    block = toy.blocks[1]
    y = X + block.scale1(block.attn(block.norm1(X)))
    expected = y + block.mlp(block.norm2(y))
    called.clear()
    out = block(X)
    assert called == ["norm1", "attn", "scale1", "norm2", "mlp"]
    # A chain begins here, so only the second step adds 2^-8 of the difference of states. What is left is rounding to the grid.
    assert torch.allclose(out, expected + 2**-8 * (y - X), atol=1e-4)


def test_the_report_in_words(toy):
    report = revzoo.reversible_(toy, batch=X, split=("attn", ["mlp"]))
    assert report.chains[0].names == [f"blocks.{i}.{branch}" for i in range(3) for branch in ("attn", "mlp")]
    assert "blocks: 6 steps, two of each Block (attn, then mlp); they keep 13 bytes" in str(report)
    model = opt()
    assert "two of each OPTDecoderLayer (self_attn, then fc1, fc2)" in str(revzoo.reversible_(model, batch=TEXT, split=SPLIT))


def count_bytes(model, batch):
    """Return the peak of forward, the bytes kept, and the peak of a step that adds to gradients."""
    model.train()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    live = LiveBytes()
    known = live.watch([*model.parameters(), *(p.grad for p in model.parameters()), batch])
    with live:
        loss = model(batch).square().mean()
        kept, forward_peak = live.alive(without=known, at=live.now()), live.peak(without=known)
        loss.backward()
        return forward_peak, kept, live.peak(without=known)


@pytest.mark.parametrize("split", [None, SPLIT])
def test_each_step_keeps_its_bits_alone(split):
    x = torch.randn(64, 8)
    bytes_of = {}
    for depth in (4, 8):
        model = Toy(depth)
        revzoo.reversible_(model, batch=x, split=split)
        bytes_of[depth] = count_bytes(model, x)
    bits = 4 * (1 if split is None else 2) * x.numel()
    assert [b - a for a, b in zip(bytes_of[4], bytes_of[8], strict=True)] == [bits, bits, bits]


def test_one_extra_forward_and_no_more(toy):
    flops = {}
    for split in (None, SPLIT):
        model = copy.deepcopy(toy).train()
        revzoo.reversible_(model, batch=X, split=split)
        with FlopCounterMode(display=False) as counter:
            model(X).sum().backward()
        flops[split] = counter.get_total_flops()
    # The first step of a chain runs again only up to the last tensor that autograd saves. The last product of the first block,
    # of 5 x 16 by 16 x 8, comes after it; in the second step of two it runs.
    assert flops[SPLIT] - flops[None] == 2 * 5 * 16 * 8


@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_copies_are_reversible_and_independent(toy, through):
    revzoo.reversible_(toy, batch=X, split=SPLIT)
    expected = train_step(toy, X)
    other = copy.deepcopy(toy) if through == "deepcopy" else pickle.loads(pickle.dumps(toy))
    revzoo.ordinary_(toy)
    assert_equal(train_step(other, X), expected)
    revzoo.ordinary_(other)
    assert is_untouched(other)
    assert_equal(train_step(other, X), train_step(toy, X))


def test_generation_is_that_of_the_full_forward():
    torch.manual_seed(0)
    model = llama().eval()
    revzoo.reversible_(model, batch=TEXT, split=SPLIT)
    prompt = IDS[:, :5]
    tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = prompt
    for _ in range(tokens.shape[1] - 5):
        with torch.no_grad():
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, expected)


@pytest.mark.filterwarnings("ignore")
def test_attentions_and_their_gradients_are_handed_through():
    torch.manual_seed(0)
    model = llama(attn_implementation="eager")
    chains = revzoo.reversible_(model, batch=TEXT, split=SPLIT).chains
    gradients, attentions = [], []
    for schedule in ("store", "invert"):
        chains[0].schedule = schedule
        model.train().zero_grad()
        torch.manual_seed(1)
        outputs = model(**TEXT, output_attentions=True)
        attentions.append([a.detach() for a in outputs.attentions])
        (outputs.loss + sum(a.square().sum() for a in outputs.attentions)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert [a.shape for a in attentions[0]] == 3 * [(2, 4, 12, 12)]
    assert all(torch.equal(a, b) for a, b in zip(*attentions, strict=True))
    assert_equal(gradients[1], gradients[0])


@pytest.mark.filterwarnings("ignore")
def test_what_attention_returns_besides_the_state_is_kept_for_no_longer_than_somebody_has_it():
    kept = {}
    for layers in (2, 4):
        model = llama(layers, attn_implementation="eager").train()
        revzoo.reversible_(model, batch=TEXT, split=SPLIT)
        live = LiveBytes()
        known = live.watch([*model.parameters(), *model.buffers(), IDS])
        with live:
            loss = model(**TEXT).loss
            kept[layers] = live.alive(without=known, at=live.now())
        loss.backward()
    assert kept[4] - kept[2] == 2 * 2 * IDS.numel() * 32  # and not 2 x 4 x 12 x 12 weights


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters_in_place_of_a_branch(order):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = opt()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "fc1", "fc2"], lora_dropout=0.1, init_lora_weights=False)
    report = revzoo.reversible_(model, batch=TEXT, split=SPLIT) if order == "before" else None
    adapted = peft.get_peft_model(model, config)
    report = report or revzoo.reversible_(adapted, batch=TEXT, split=SPLIT)
    stored = train_step(adapted, TEXT, "store", report.chains)
    assert len(stored) == sum(p.requires_grad for p in adapted.parameters()) == 3 * 3 * 2
    assert_equal(train_step(adapted, TEXT, "invert", report.chains), stored)
    adapted.eval()
    with torch.no_grad():
        reversible = adapted(IDS).logits
        revzoo.ordinary_(adapted)
        assert torch.cosine_similarity(adapted(IDS).logits, reversible, dim=-1).min() > 0.9999


def test_an_optimizer_in_backward_reaches_the_weights_of_storing(toy):
    def update(p):
        p.data.sub_(0.1 * p.grad)

    weights = []
    for schedule in ("store", "invert"):
        model = copy.deepcopy(toy)
        revzoo.reversible_(model, batch=X, split=SPLIT).chains[0].schedule = schedule
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        torch.manual_seed(1)
        model.train()(X).square().mean().backward()
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[0][key]) for key, value in weights[1].items())
    assert not torch.equal(weights[0]["blocks.0.norm2.weight"], toy.blocks[0].norm2.weight)


@pytest.mark.slow
def test_compiled(toy):
    toy.eval()
    revzoo.reversible_(toy, batch=X, split=SPLIT)
    with torch.no_grad():
        assert torch.equal(torch.compile(toy, backend="eager")(X), toy(X))


def norm_of_both(m, x):
    x = x + m.attn(m.norm1(x))
    return x + m.mlp(m.norm1(x))


def test_statistics_move_once():
    torch.manual_seed(0)
    model = Toy(norm=nn.BatchNorm1d)
    revzoo.reversible_(model, batch=X, split=SPLIT)
    train_step(model, X)
    assert [m.num_batches_tracked.item() for m in model.modules() if isinstance(m, nn.BatchNorm1d)] == 6 * [1]
    with pytest.raises(ConversionError, match=r"norm1 of blocks.0 runs in both steps, and its statistics would move twice"):
        revzoo.reversible_(Toy(write=norm_of_both, norm=nn.BatchNorm1d), batch=X, split=SPLIT)
