"""Small networks with lists of blocks, and their training step."""

import timm
import torch
import transformers
from torch import nn

import revzoo
from revzoo.analysis.chains import find_block_chains
from revzoo.analysis.dry_run import compute_usual_loss
from revzoo.runtime import LiveBytes
from revzoo.runtime.nested import tensors_in

SPLIT = ("attention", "mlp")  # the branches of a block, each a step of its own
ONE_BIT = {"kept_bits": 1, "sign": "random"}
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


def train_step(model, batch, schedule=None, loss_function=compute_loss):
    """Return the gradients of one training step, dropout on, and the bytes kept between forward and backward."""
    for chain in find_block_chains(model).values():
        chain.schedule = schedule or chain.schedule
    model.train().zero_grad()
    torch.manual_seed(1)
    live = LiveBytes()
    known = live.watch([*model.parameters(), *model.buffers(), *tensors_in(batch)])
    with live:
        loss = loss_function(model(**batch))
        kept = live.alive(without=known, at=live.now())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, kept


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


def measure_long_text(heads, tiles):
    """Return the bytes of a step of a reversible Llama on one text, whose state has 65,536, and the network."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=heads, use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    batch = {"input_ids": torch.arange(256)[None] % 64}
    revzoo.reversible_(model, batch=batch, split=SPLIT, tiles=tiles, **ONE_BIT)
    return revzoo.measure_memory(model, batch, loss=compute_usual_loss).activation_bytes, model


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert expected
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
    # Enabled with the variant that stops early, which older versions do not take by themselves.
    arguments = ({"use_reentrant": False},) if how == "enable" else ()
    getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{how}")(*arguments)
