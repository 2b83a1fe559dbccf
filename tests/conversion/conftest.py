"""Conversions by hand: build the spec, apply the mappings, compare the networks. And small networks with lists of blocks."""

from pathlib import Path

import pytest
import timm
import torch
import transformers
import yaml
from safetensors.torch import save_file
from torch import nn

import revzoo
from revzoo.analysis.chains import find_block_chains
from revzoo.conversion.choice import CouplingChoice
from revzoo.runtime import LiveBytes

GOLDEN = Path(__file__).parent / "golden"
FAITHFUL = CouplingChoice("momentum", kept_bits=None, b=0.0)  # b = 0 is the original's function


class Converter:
    """Converts originals of one source with the source's methods alone, without `revzoo.convert`."""

    def __init__(self, source, folder):
        self.source, self.folder = source, folder

    def build(self, original, choice=FAITHFUL, **options):
        file = self.folder / "spec.yaml"
        file.write_text(yaml.safe_dump({"name": "converted", **self.source.make_spec(original, choice)}))
        return revzoo.build(revzoo.load_spec(file), **options).eval()

    def convert(self, original, choice=FAITHFUL):
        """Return the converted network in eval mode; assert that the mappings have all of ours and all of theirs once."""
        model, theirs = self.build(original, choice), original.state_dict()
        ours = {}
        mappings = self.source.map_tensors(original)
        for mapping in mappings:
            values = mapping.to_ours([theirs[key] for key in mapping.theirs])
            assert not ours.keys() & set(mapping.ours)
            ours |= dict(zip(mapping.ours, values, strict=True))
        assert sorted(key for mapping in mappings for key in mapping.theirs) == sorted(
            key for key in theirs if not self.source.ignores(key)
        )
        model.load_state_dict(ours, strict=True)
        model.schedule = "store"
        return model

    @torch.no_grad()
    def measure_difference(self, original, x, choice=FAITHFUL):
        """Return the largest difference of the logits, relative to the largest of the original's."""
        model, expected = self.convert(original, choice), original.eval()(x)
        outputs = model(x)
        assert outputs.shape == expected.shape
        assert expected.abs().max() > 0.01
        return ((outputs - expected).abs().max() / expected.abs().max()).item()

    def check_round_trip(self, original):
        """Assert that converting there and back gives the original's keys and bits."""
        ours, back = self.convert(original).state_dict(), {}
        for mapping in self.source.map_tensors(original):
            back |= dict(zip(mapping.theirs, mapping.to_theirs([ours[key] for key in mapping.ours]), strict=True))
        expected = {key: value for key, value in original.state_dict().items() if not self.source.ignores(key)}
        assert back.keys() == expected.keys()
        assert all(torch.equal(back[key], value) for key, value in expected.items())

    def list_mappings(self, original):
        """Return a line for every mapping."""
        mappings = self.source.map_tensors(original)
        return "".join(f"{' + '.join(e.theirs)} -> {' + '.join(e.ours)} ({e.transform})\n" for e in mappings)

    def check_keys(self, original, name):
        """Assert that the mappings are those of the golden list."""
        assert self.list_mappings(original) == (GOLDEN / f"{name}.txt").read_text()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def converter(request, tmp_path):
    """Return the converter of the SOURCE of the test's module."""
    return Converter(request.module.SOURCE, tmp_path)


@pytest.fixture
def randomise():
    """Return a function that sets all tensors of an original at random, norms and their statistics included."""

    def set_values(original, scale=0.2, seed=0):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in original.state_dict().items():
                noise = torch.randn(value.shape, generator=generator) * scale
                leaf = name.rpartition(".")[2]
                if leaf == "num_batches_tracked":
                    value.fill_(7)
                elif leaf == "running_var":
                    value.copy_(1 + noise.abs())
                else:
                    value.copy_(noise + (1 if value.ndim == 1 and leaf in ("weight", "gamma") else 0))
        return original.eval()

    return set_values


@pytest.fixture
def rebuilds_exactly():
    """Return a check that inverting gives, bit for bit, the gradients of storing, random masks included."""

    def check(model, x):
        gradients = []
        for schedule in ("store", "invert"):
            torch.manual_seed(1)
            model.schedule = schedule
            model.zero_grad()
            model(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert gradients[0]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    return check


@pytest.fixture
def file(tmp_path):
    """Weights of timm's `test_vit`, whose name stands for any."""
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=5).state_dict(), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


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
    assert expected
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


def switch_checkpointing(model, how):
    """Switch checkpointing of a model of Transformers on or off, under its name in the present version."""
    name = f"activation_checkpointing_{how}"
    getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{how}")()
