"""`revzoo fits`: rows that are counts of real steps, the sentence, the largest that fits, and mistakes."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import revzoo
from revzoo.analysis.dry_run import compute_cross_entropy, compute_usual_loss, isolated
from revzoo.analysis.optimizer_step import count_optimizer
from revzoo.analysis.report import MemoryReport
from revzoo.analysis.step_memory import run_and_measure
from revzoo.errors import BudgetError
from revzoo.graph.module_planner import plan_module
from revzoo.graph.named_module import create_named_module
from revzoo.planning.card import Fits, Method

OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.a(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class Asking(Net):
    def forward(self, x):
        return super().forward(x) if float(x.sum()) > 0 else -x

def make():
    return Net(), torch.randn(256, 16)

def make_asking():
    return Asking(), torch.ones(256, 16)

def make_wide():
    return Net(), torch.ones(256, 17)

def make_one():
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), torch.ones(16)

def make_frozen():
    return Net().requires_grad_(False), torch.ones(256, 16)

def make_alone():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), torch.randn(4096, 16)
"""
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
SMALL = {"hidden_dim": 64, "d_ff": 64, "vocab_size": 100}
CONFIGS = {
    "LlamaForCausalLM": {"model_type": "llama", "num_key_value_heads": 1, **SIZES},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 16, **SIZES},
    "MistralForCausalLM": {"model_type": "mistral", "num_key_value_heads": 1, **SIZES},
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100},
    "OPTForCausalLM": {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, **SIZES},
    "BertForMaskedLM": {"model_type": "bert", **SIZES},
    "RobertaForSequenceClassification": {"model_type": "roberta", "max_position_embeddings": 130, **SIZES},
    "DistilBertForMaskedLM": {"model_type": "distilbert", "dim": 32, "n_layers": 2, "n_heads": 2, **SMALL},
    "T5ForConditionalGeneration": {"model_type": "t5", "d_model": 32, "d_kv": 16, "num_layers": 2, "num_heads": 2, **SMALL},
    "ViTForImageClassification": {"model_type": "vit", "image_size": 32, "patch_size": 8, **SIZES},
}


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    (tmp_path / "fit_net.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "fit_net", raising=False)
    return tmp_path


def count(model: nn.Module, batch, optimizer=None, loss=compute_usual_loss) -> MemoryReport:
    """Run a step and count its memory."""
    with isolated(model, batch) as inputs:
        return run_and_measure(model, inputs, count_optimizer(model, optimizer), loss=loss).memory


def answer_of(printed: str) -> dict:
    answer = json.loads(printed)
    return answer | {"methods": {method["name"]: method for method in answer["methods"]}}


def test_every_row_of_an_own_network(own, run):
    """A card that what is stored does not fit: the planned row is a plan for it, and every largest batch fits."""
    card = 600_000
    answer = answer_of(run("fits", "fit_net:make", "--card", card, "--optimizer", "none", "--json"))
    assert answer["answer"].startswith("fit_net:make at batch 256 takes ")
    assert " stored: it does not fit 0.6 MB; " in answer["answer"]
    model, batch = create_named_module("fit_net:make", None)
    rows = answer["methods"]
    assert list(rows) == ["stored", "checkpointed", "planned", "reversible", "random signs", "random signs, 8 tiles"]
    assert rows["stored"]["peak_bytes"] == count(model, batch).peak_bytes > 0.9 * card > rows["planned"]["peak_bytes"]
    assert rows["stored"]["work"] == 1.0 <= rows["planned"]["work"] < rows["checkpointed"]["work"]
    largest = rows["stored"]["largest"]
    peaks = [count(model, torch.randn(size, 16)).peak_bytes for size in (largest, largest * 11 // 10)]
    assert peaks[0] <= 0.9 * card < peaks[1]
    largest = rows["planned"]["largest"]
    assert largest > rows["stored"]["largest"]
    plan_module(model, torch.randn(largest, 16), int(0.9 * card), loss=compute_usual_loss)  # there is a plan for so many
    for name, options in {"reversible": {}, "random signs": {"kept_bits": 1, "sign": "random"}}.items():
        revzoo.reversible_(model, **options)
        assert rows[name]["peak_bytes"] == count(model, batch).peak_bytes
        revzoo.ordinary_(model)
    assert rows["random signs"]["kept_bytes"] < rows["reversible"]["kept_bytes"]
    assert rows["random signs, 8 tiles"]["peak_bytes"] < rows["random signs"]["peak_bytes"]


def test_planned_batches_beside_an_update_of_the_optimizer(own):
    """The update's copies of weights are gone while backward runs, so they bound no plan."""
    model, _ = create_named_module("fit_net:make", None)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    answer = revzoo.fits(model, torch.randn(8, 16), 450_000, optimizer=optimizer)
    largest = next(method.largest for method in answer.methods if method.name == "planned")

    def plan(size: int) -> None:
        plan_module(model, torch.randn(size, 16), answer.limit_bytes, optimizer=optimizer, loss=compute_usual_loss)

    plan(largest)
    with pytest.raises(BudgetError):
        plan(largest * 5 // 4)


def test_what_cannot_be_done_is_said_in_its_row(own, run):
    printed = run("fits", "fit_net:make_alone", "--card", "4MB", "--optimizer", "none")
    assert " stored: it does not fit 4 MB; planned it does, at 1." in printed
    assert "reversible: not counted. Sequential has no list of two or more blocks" in printed


def test_weights_that_a_card_does_not_hold(own, run):
    printed = " ".join(run("fits", "fit_net:make", "--card", "100000").split())
    assert "does not fit 0.1 MB in any way. 1" in printed
    assert "planned: not counted. Weights, gradients and optimizer state are more than the card has." in printed


def test_the_sentence():
    stored = Method("stored", 0, 30 * 2**30, 1.0, 170)
    planned, twice = Method("planned", 0, 2**30, 1.061, 1770), Method("checkpointed", 0, 2**30, 1.33, 1000)
    assert str(Fits("vit", 256, "batch", 24 * 10**9, 0, (stored, twice, planned))) == (
        "vit at batch 256 takes 30.0 GiB stored: it does not fit 24 GB; planned it does, at 1.06 of the work."
    )
    assert str(Fits("vit", 256, "batch", 80 * 10**9, 0, (stored, twice, planned))).endswith(
        "it fits 80 GB, up to batch 170; planned up to 1,770."
    )


def test_a_model_of_the_zoo(file, run):
    answer = answer_of(run("fits", file("rev_vit_digits"), "--card", "3MB", "--batch", 64, "--json"))
    assert list(answer["methods"]) == ["stored", "checkpointed", "inverted", "planned", "inverted, 8 tiles"]
    peaks = {name: method["peak_bytes"] for name, method in answer["methods"].items()}
    assert peaks["inverted"] < peaks["checkpointed"] < peaks["stored"]
    assert not any(method["problem"] for method in answer["methods"].values())


def test_a_language_model_of_the_zoo():
    """Its loss is the cross-entropy, and no bit is kept."""
    model = revzoo.create("rev_gpt_mini", overrides=["input.vocabulary=1000", "stages.0.depth=1"])
    ids = model.example_input(2)
    rows = {row.name: row for row in revzoo.fits(model, ids, "1GB").methods}
    assert list(rows)[2:] == [
        "inverted", "planned", "inverted, 8 tiles",
        "checkpointed, chunked loss", "inverted, chunked loss", "inverted, 8 tiles, chunked loss",
    ]  # fmt: skip
    assert rows["inverted"].peak_bytes == count(model, ids, loss=compute_cross_entropy).peak_bytes
    revzoo.chunk_loss_(model)
    counted = count(model, ids, loss=compute_cross_entropy)
    assert rows["inverted, chunked loss"].peak_bytes == counted.peak_bytes < rows["inverted"].peak_bytes


@pytest.fixture
def _quiet():
    """Keep Transformers from remarks about small vocabularies."""
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()


def write_config(folder: Path, architecture: str) -> str:
    (folder / architecture).mkdir()
    config = {"architectures": [architecture], **CONFIGS[architecture]}
    (folder / architecture / "config.json").write_text(json.dumps(config))
    return str(folder / architecture)


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("architecture", CONFIGS)
def test_networks_of_transformers_take_what_is_counted(architecture, tmp_path):
    """To the byte, the ones without values and the real ones: stored, and planned with the plan applied."""
    folder, tokens = write_config(tmp_path, architecture), None if architecture.startswith("ViT") else 64
    model, batch = create_named_module(folder, 8, tokens)
    with torch.device("meta"):
        without_values, meta_batch = create_named_module(folder, 8, tokens)
    model.config.use_cache = without_values.config.use_cache = False
    optimizers = [torch.optim.AdamW(each.parameters(), foreach=False) for each in (model, without_values)]
    memory = count(model, batch, optimizers[0])
    card = int((memory.peak_bytes - memory.activation_bytes / 4) / 0.9)
    stored, _, planned, *_ = revzoo.fits(without_values, meta_batch, card, optimizer=optimizers[1]).methods
    assert stored.peak_bytes == memory.peak_bytes
    assert planned.problem == ""
    plan = plan_module(model, batch, int(card * 0.9), optimizer=optimizers[0], loss=compute_usual_loss)[0]
    plan.apply(model)
    assert count(model, batch, optimizers[0]).peak_bytes == planned.peak_bytes <= int(0.9 * card) < memory.peak_bytes


@pytest.mark.usefixtures("_quiet")
def test_a_language_model_has_rows_with_a_chunked_loss(tmp_path):
    """Their steps are real ones, and the network is as it was."""
    model, batch = create_named_module(write_config(tmp_path, "LlamaForCausalLM"), 8, 64)
    model.config.use_cache = False
    before = count(model, batch)
    rows = {row.name: row for row in revzoo.fits(model, batch, "1GB").methods}
    assert count(model, batch) == before
    assert list(rows)[-3:] == [f"{name}, chunked loss" for name in ("checkpointed", "random signs", "random signs, 8 tiles")]
    revzoo.chunk_loss_(model)
    revzoo.reversible_(model, kept_bits=1, sign="random")
    counted, row = count(model, batch), rows["random signs, chunked loss"]
    assert (row.kept_bytes, row.peak_bytes) == (counted.after_forward_bytes, counted.peak_bytes)
    assert row.kept_bytes < rows["random signs"].kept_bytes


@pytest.mark.usefixtures("_quiet")
def test_another_loss_is_not_counted_in_chunks(tmp_path):
    model, batch = create_named_module(write_config(tmp_path, "LlamaForCausalLM"), 8, 64)
    answer = revzoo.fits(model, batch, "100KB", loss=lambda outputs: outputs.logits.logsumexp(-1).sum())
    problems = {method.name: method.problem for method in answer.methods if method.problem}
    assert list(problems) == [
        "planned",
        *(f"{name}, chunked loss" for name in ("checkpointed", "random signs", "random signs, 8 tiles")),
    ]
    assert "logsumexp" in problems["random signs, chunked loss"]


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
def test_adapters_have_gradients_alone(tmp_path, run):
    folder = write_config(tmp_path, "LlamaForCausalLM")
    whole, adapted = (
        answer_of(run("fits", folder, "--batch", 2, "--tokens", 64, "--json", *lora)) for lora in ((), ("--lora",))
    )
    assert adapted["fixed_bytes"] < whole["fixed_bytes"]
    assert adapted["unit"] == "tokens"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(8, 8)

    def forward(self, x):
        return x + (x @ x.mT).softmax(-1) @ self.value(x)


def test_the_longest_text_of_a_plan_grows_with_the_square():
    model, texts = nn.Sequential(*(Attention() for _ in range(4))), torch.zeros(1, 32, 8)
    answer = revzoo.fits(model, texts, 20_000_000, vary_length=True)
    planned = {method.name: method for method in answer.methods}["planned"]
    peak = plan_module(model, torch.zeros(1, planned.largest, 8), answer.limit_bytes)[0].peak_bytes
    assert 0.9 * answer.limit_bytes < peak <= answer.limit_bytes
    assert planned.largest >= max(method.largest for method in answer.methods)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fits rev_vit_digits --card 24", "A card has a size such as '24GB'. Received: '24'."),
        ("fits rev_vit_digits --card lots", "A card has a size such as '24GB'. Received: 'lots'."),
        ("fits rev_vit_digits --card 60%", "A card has a size such as '24GB'. Received: '60%'."),
        ("fits rev_vit_digits --tokens 12", "--tokens and --lora: for networks that are not the zoo's. Received: "),
        ("fits rev_vit_digit", "Unknown model or spec file 'rev_vit_digit'. Did you mean 'rev_vit_digits'?"),
        ("fits fit_net:make --optimizer adamww", "Unknown optimizer 'adamww'. Did you mean 'adamw'?"),
        ("fits fit_net:make --batch 4", "fit_net:make makes its own batch. Received: --batch 4. Leave it out."),
        ("fits fit_net:make --lora", "peft knows no default places for adapters in a Net ("),
        ("fits fit_net:make_asking", "A step of Asking cannot be counted: a value that the model (Asking) asks for"),
        ("fits fit_net:make_wide", "A step of Net cannot be counted: blocks.0.a (Linear), with "),
        ("fits fit_net:make_one", "A step of Sequential is counted for other batches, too, and cannot be: 0 (LayerNorm), "),
        ("fits fit_net:make_frozen", "Nothing is trained: no parameter of the Net requires a gradient."),
        ("fits fit_net:make head.outputs=3", "Overrides: for models of the zoo. Received: fit_net:make head.outputs=3."),
        ("fits timm:test_vit --tokens 3", "timm:test_vit takes images. Received: --tokens 3. Leave it out."),
    ],
)
def test_mistakes(arguments, message, own, refused):
    assert refused(*arguments.split())[: len(message)] == message
