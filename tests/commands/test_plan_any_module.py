"""`revzoo plan` for modules that are not the zoo's: by name, what is printed, drawn and saved, and mistakes."""

import json

import pytest
import torch

import revzoo

OWN = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + F.gelu(block(F.gelu(x)))
        return x

def make():
    return Net(), torch.randn(32, 8)

def make_nothing():
    return Net()

class Silent(Net):
    def forward(self, x):
        super().forward(x)

def make_silent():
    return Silent(), torch.randn(32, 8)
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    (tmp_path / "my_net.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_net", raising=False)
    torch._dynamo.reset()
    return "my_net:make"


def test_a_plan_is_printed_drawn_and_saved(own, run, tmp_path):
    whole = json.loads(run("plan", own, "--budget", "1GiB", "--json"))["plan"]
    less = json.loads(run("plan", own, "--budget", whole["no_recompute_peak_bytes"] - 1, "--json"))["plan"]
    budget = (less["min_peak_bytes"] + whole["no_recompute_peak_bytes"]) // 2
    printed = run("plan", own, "--budget", budget, "--out", "plan.json", "--plot", "plan.png")
    plan = revzoo.ModulePlan.load("plan.json")
    assert whole["min_peak_bytes"] is None
    assert less["min_peak_bytes"] <= plan.peak_bytes <= plan.budget_bytes == budget
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    parts = {row[0]: row[1:] for row in rows[3:]}
    assert list(parts) == ["stem", *(f"blocks.{i}" for i in range(4))]
    assert any("of" in again for _, _, again, _ in parts.values())
    assert "revzoo.ModulePlan.load('plan.json').apply(model)" in printed
    details = json.loads(run("plan", own, "--budget", budget, "--json"))["details"]
    assert max(phase["bytes"] for phase in details["phases"]) == plan.peak_bytes
    assert [point["peak_bytes"] for point in details["front"]] == sorted(point["peak_bytes"] for point in details["front"])


def test_a_plan_counts_the_loss_that_fits_counts(own, run):
    planned = json.loads(run("plan", own, "--budget", "1GiB", "--json"))["plan"]
    fitting = json.loads(run("fits", own, "--optimizer", "none", "--json"))
    assert planned["no_recompute_peak_bytes"] == fitting["methods"][0]["peak_bytes"]


def test_times_are_measured_where_asked_for(own, run):
    plan = json.loads(run("plan", own, "--budget", "1GiB", "--json", "--profile"))["plan"]
    assert plan["seconds"] == plan["stored_seconds"] > 0
    assert "time of" in run("plan", own, "--budget", "1GiB", "--profile")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan my_net:make --budget 1000", "No plan fits 1000 B: at least "),
        ("plan my_net:make --budget lots", "A budget is bytes, a size such as '8GiB', a share such as '60%', or 'auto'. "),
        ("plan my_net:make --budget 1GiB --batch 4", "my_net:make makes its own batch. Received: --batch 4. Leave it out."),
        ("plan my_net:make --budget 1GiB --meta --dtype bfloat16", "--dtype, --meta: for models of the zoo."),
        ("plan my_net:make_nothing --budget 1GiB", "my_net:make_nothing has to return a module and a batch. Received: Net."),
        ("plan my_net:make_silent --budget 1GiB", "The forward of Silent returns no tensor, so there is no backward to plan. "),
        ("plan my_net:nowhere --budget 1GiB", "my_net has no function 'nowhere'. It has: "),
        ("plan timm:resnet5 --budget 1GiB", "Unknown timm model 'resnet5'. Did you mean 'resnet50'? "),
        ("plan rev_vit_digits --budget 1GiB --profile", "--profile: for modules that are not of the zoo."),
    ],
)
def test_mistakes(arguments, message, own, refused):
    assert refused(*arguments.split())[: len(message)] == message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"a": 1}', "Transformers makes no network of sounds/config.json (ValueError: Unrecognized model in sounds. "),
        (
            '{"model_type": "wav2vec2", "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1}',
            "Batches are made for networks of images or texts. Received: sounds, a Wav2Vec2Model. Name a ",
        ),
    ],
)
def test_configurations_that_cannot_be_planned(config, message, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sounds").mkdir()
    (tmp_path / "sounds" / "config.json").write_text(config)
    assert refused("plan", "sounds", "--budget", "1GiB")[: len(message)] == message


def test_colons_in_other_names(short, tmp_path, monkeypatch, run):
    """Of models on the hub, and of folders."""
    monkeypatch.chdir(tmp_path)
    short("rev_vit_digits", "cpu").save_pretrained("runs:1")
    monkeypatch.setattr("revzoo.hub.fetch_folder", lambda name, **where: tmp_path / "runs:1")
    for name in ("runs:1", "hf-hub:me/digits"):
        assert "stages.0" in run("plan", name, "--meta", "--batch", 2, "--budget", "1GiB")


@pytest.mark.slow
def test_folders_of_transformers(tmp_path, monkeypatch, run):
    config = {"model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    title = "T5Model, batch of [1, 512] int64, [1, 512] int64"  # of encoder and decoder
    assert run("plan", "small", "--budget", "1GiB", "--batch", 1).startswith(title)


def test_a_name_of_timm_needs_no_prefix(run):
    assert run("plan", "test_vit", "--budget", "1GiB", "--batch", "1").startswith("VisionTransformer, batch of")
