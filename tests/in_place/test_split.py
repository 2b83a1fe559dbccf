"""`reversible_` with `split`: two steps of each block, exact gradients, the same function, and what cannot be split."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import revzoo
from revzoo.block_steps.conventions import get_state
from revzoo.errors import ConversionError, InputError, UnknownNameError
from tests.in_place.networks import IDS, SPLIT, TEXT, assert_equal, llama, train_step
from tests.in_place.test_architectures import is_untouched

X = torch.linspace(-1, 1, 40).view(5, 8).sin()


def opt():
    sizes = {"vocab_size": 20, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": None}
    config = transformers.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32, num_hidden_layers=3, dropout=0.1)
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


@pytest.mark.filterwarnings("ignore")
def test_what_attention_returns_besides_the_state_is_kept_for_no_longer_than_somebody_has_it():
    kept = {}
    for layers in (2, 4):
        model = llama(layers, attn_implementation="eager")
        revzoo.reversible_(model, batch=TEXT, split=SPLIT)
        _, kept[layers] = train_step(model, TEXT)
    assert kept[4] - kept[2] == 2 * 2 * IDS.numel() * 32  # and not 2 x 4 x 12 x 12 weights


@pytest.mark.filterwarnings("ignore")
def test_adapters_in_place_of_a_branch():
    peft = pytest.importorskip("peft")
    model = opt()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "fc1", "fc2"], lora_dropout=0.1, init_lora_weights=False)
    revzoo.reversible_(model, batch=TEXT, split=SPLIT)
    adapted = peft.get_peft_model(model, config)
    stored = train_step(adapted, TEXT, "store")[0]
    assert len(stored) == sum(p.requires_grad for p in adapted.parameters()) == 3 * 3 * 2
    assert_equal(train_step(adapted, TEXT, "invert")[0], stored)
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


def norm_of_both(m, x):
    x = x + m.attn(m.norm1(x))
    return x + m.mlp(m.norm1(x))


def test_statistics_move_once():
    model = Toy(norm=nn.BatchNorm1d)
    revzoo.reversible_(model, batch=X, split=SPLIT)
    train_step(model, {"x": X})[0]
    assert [m.num_batches_tracked.item() for m in model.modules() if isinstance(m, nn.BatchNorm1d)] == 6 * [1]
    with pytest.raises(ConversionError, match=r"norm1 of blocks.0 runs in both steps, and its statistics would move twice"):
        revzoo.reversible_(Toy(write=norm_of_both, norm=nn.BatchNorm1d), batch=X, split=SPLIT)


class Adding(nn.Linear):
    def forward(self, x, state):
        return state + super().forward(x)


def functional(m, x):
    x = x + nn.functional.linear(m.norm1(x), m.attn.weight)
    return x + m.mlp(m.norm2(x))


def raises(m, x):
    if not (h := m.attn(m.norm1(x))).any():
        raise ArithmeticError("nothing to attend to")
    return x + h + m.mlp(x)


def attribute(m, x):
    m.normed = m.norm1(x)
    x = x + m.attn(m.normed)
    return x + m.mlp(m.norm2(x))


CANNOT = {  # what a block returns, and the reason
    "side by side": (
        lambda m, x: x + m.attn(h := m.norm1(x)) + m.mlp(h),
        "blocks.0 cannot be two steps, attn added to the state, then mlp",
    ),
    "other order": (lambda m, x: (y := x + m.mlp(m.norm2(x))) + m.attn(m.norm1(y)), "cannot be two steps"),
    "norm after the sum": (lambda m, x: m.norm2(m.norm1(x + m.attn(x)) + m.mlp(x)), "cannot be two steps"),
    # as BLOOM's, which are given what to add
    "a branch with the state": (lambda m, x: (y := m.attn(m.norm1(x), x)) + m.mlp(m.norm2(y)), "cannot be two steps"),
    "a bias": (  # zero until it is trained
        lambda m, x: (y := x + m.attn(m.norm1(x)) + m.norm2.bias) + m.mlp(m.norm2(y)),
        "cannot be two steps",
    ),
    "an attribute": (attribute, "blocks.0 sets as an attribute a tensor that changes"),
    "noise in training": (
        lambda m, x: (y := x + m.attn(m.norm1(x)) + m.training * torch.randn_like(x)) + m.mlp(m.norm2(y)),
        "cannot be two steps",
    ),
    "another result": (
        lambda m, x: ((y := x + m.attn(m.norm1(x))) + m.mlp(m.norm2(y)), y - x),
        "blocks.0 returns besides its state a tensor that changes",
    ),
    "no call": (functional, "blocks.0 does not call attn as a submodule"),
    "an error": (raises, "blocks.0 cannot run one of its branches without the other: ArithmeticError: nothing to"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_split_is_refused_with_the_reason(name):
    write, message = CANNOT[name]
    model = Toy(write=write)
    if name == "a branch with the state":
        for block in model.blocks:
            block.attn = Adding(8, 8)
    for key, p in model.named_parameters():
        if key.endswith("bias"):
            nn.init.zeros_(p)
    with pytest.raises(ConversionError, match=message):
        revzoo.reversible_(model, batch=X, split=SPLIT)
    assert is_untouched(model)


@pytest.mark.parametrize("write", [None, lambda m, x: x + m.attn(m.norm1(x)) + m.mlp(m.norm1(x))])
def test_a_norm_at_two_places_keeps_its_weights(write):
    model = Toy(write=write)
    for block in model.blocks:
        block.norm2 = block.norm1
    parameters, before = list(model.parameters()), [p.clone() for p in model.parameters()]
    if write is None:
        revzoo.reversible_(model, batch=X, split=SPLIT)
    else:
        with pytest.raises(ConversionError, match="cannot be two steps"):
            revzoo.reversible_(model, batch=X, split=SPLIT)
    assert all(p is known for p, known in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(p, known) for p, known in zip(model.parameters(), before, strict=True))


def test_the_fast_path_of_torch_is_refused():
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2))
    with pytest.raises(InputError, match=r"runs its block without linear1, but the block now computes without calling"):
        revzoo.reversible_(model, "1.layers", batch=X[None], split=SPLIT)
    assert is_untouched(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"split": "attn"}, InputError, "split is a pair of branches.*Received: 'attn'"),
        ({"split": ("attn", 3)}, InputError, "split is a pair of branches"),
        ({"batch": None}, InputError, r"Give one: reversible_\(model, batch=batch, split=\('attention', 'mlp'\)\)"),
        ({"split": ("attn", "mpl")}, UnknownNameError, "mlp"),
    ],
)
def test_arguments_that_are_none_are_named(toy, options, error, message):
    with pytest.raises(error, match=message):
        revzoo.reversible_(toy, **{"batch": X, "split": SPLIT, **options})
    assert is_untouched(toy)


def test_another_way_through_a_block_is_noticed(toy):
    revzoo.reversible_(toy, batch=X, split=SPLIT)
    toy.blocks[1].write = functional
    with pytest.raises(InputError, match=r"blocks.1.mlp runs its block without attn, but the block now computes without"):
        toy(X)


def test_a_branch_compiled_later_is_refused(toy):
    revzoo.reversible_(toy, batch=X, split=SPLIT)
    toy.blocks[1].mlp.compile(backend="eager")
    with pytest.raises(
        InputError, match=r"blocks.1.attention is one of two steps of a block, and a Sequential in it is compiled"
    ):
        toy(X)
