"""Networks of timm and Transformers that become reversible on the way to a run. A folder stands for the cache of the hub."""

import json
import shutil

import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed

import revzoo
from revzoo.checkpoint.files import read_tensors
from revzoo.errors import CheckpointError, ConversionError
from revzoo.graph.named_module import create_named_module
from revzoo.training.evaluate_checkpoint import evaluate_checkpoint
from revzoo.training.loop import resume, train
from revzoo.training.recipe import load_recipe

SHORT = ["train.epochs=1", "schedule={sched: constant}", "optimizer={opt: sgd, lr: 1e-12}", "data.num_workers=0"]
TEXTS = {"vocab_size": 280, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return a function that makes the folder of a repository in the cache; nothing else can be fetched."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def make(repository):
        folder, commit = tmp_path / "hub" / f"models--{repository.replace('/', '--')}", "0" * 40
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
        return folder / "snapshots" / commit

    return make


@pytest.fixture
def photos(tmp_path):
    for label in "ab":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(5):
            Image.effect_noise((40, 40), 50 + 10 * i).convert("RGB").save(tmp_path / "photos" / label / f"{i}.png")
    return [f"data.root={tmp_path / 'photos'}", "data.batch_size=4", *SHORT]


def test_a_network_of_timm_at_another_size(hub, photos, tmp_path, capsys):
    """The run needs neither hub nor conversion afterwards, and gives timm its weights back."""
    torch.manual_seed(0)
    original = timm.create_model("test_vit").state_dict()
    save_file(original, hub("timm/test_vit.r160_in1k") / "model.safetensors")
    train(load_recipe("finetune", ["model=timm:test_vit", "model.size=64", *photos]), tmp_path / "run")
    printed = capsys.readouterr().out
    assert "timm:test_vit became reversible. Expect" in printed
    assert "the head is new, with random weights: it has 2 outputs, and had 1000." in printed

    shutil.rmtree(tmp_path / "hub")
    model = revzoo.create(tmp_path / "run")
    assert (model.spec.input.size, model.spec.coupling.type) == ((64, 64), "momentum")
    resume(tmp_path / "run", ["train.epochs=2"])
    assert evaluate_checkpoint(tmp_path / "run").count == 2
    revzoo.export(tmp_path / "run", tmp_path / "back.safetensors")
    back = load_file(tmp_path / "back.safetensors")
    assert back.keys() == original.keys()
    original["pos_embed"] = resample_abs_pos_embed(original["pos_embed"], [4, 4], [10, 10], 1)
    changed = [key for key in back if "head" not in key and not torch.allclose(back[key], original[key], rtol=0, atol=1e-6)]
    assert changed == []

    again = ["model=timm:test_vit", f"model.checkpoint={tmp_path / 'run' / 'last.safetensors'}", *photos]
    train(load_recipe("finetune", again), tmp_path / "again")  # weights of the reversible network need no conversion
    first, second = (read_tensors(tmp_path / run / "best.safetensors")["stem.pos_embed"] for run in ("run", "again"))
    assert torch.allclose(first, second, rtol=0, atol=1e-6)


def test_without_weights(hub, photos, tmp_path, capsys):
    """They come from a file, or are random if the recipe says so; otherwise the message says what to do."""
    with pytest.raises(ConversionError, match=r"test_vit cannot be fetched .*model\.checkpoint=FILE.* model\.pretrained=false"):
        train(load_recipe("finetune", ["model=timm:test_vit", *photos]), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    train(load_recipe("finetune", ["model=timm:test_vit", "model.pretrained=false", *photos]), tmp_path / "random")
    assert "timm:test_vit became reversible. Its weights are random" in capsys.readouterr().out
    assert revzoo.create(tmp_path / "random").spec.name == "test_vit_momentum"
    original = timm.create_model("test_vit")
    save_file(original.state_dict(), tmp_path / "file.safetensors")
    from_file = ["model=timm:test_vit", f"model.checkpoint={tmp_path / 'file.safetensors'}", *photos]
    train(load_recipe("finetune", from_file), tmp_path / "from_file")
    weights = read_tensors(tmp_path / "from_file" / "best.safetensors")
    assert torch.allclose(weights["stem.patch_embed.proj.weight"], original.patch_embed.proj.weight, rtol=0, atol=1e-6)


def test_a_network_of_the_hub_for_texts(hub, tables, tokenizer, tmp_path):
    """One that predicts masked words gets a classifier; its tokenizer goes into the run."""
    config = transformers.BertConfig(**TEXTS, max_position_embeddings=32, pad_token_id=1)
    folder = hub("me/small")
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    shutil.copy(tokenizer, folder / "tokenizer.json")
    texts = ["data.name=text_classification", f"data.root={tables}", "data.batch_size=4", *SHORT]
    train(load_recipe("finetune", ["model=hf:me/small", *texts]), tmp_path / "run")
    model = revzoo.create(tmp_path / "run")
    assert (model.spec.head.type, model.class_names) == ("sequence_classification", ("cat", "dog"))
    shutil.rmtree(tmp_path / "hub")
    assert evaluate_checkpoint(tmp_path / "run").count == 3


def test_configurations_of_the_hub(hub):
    """Those of a repository, or without one the usual one of a kind, which a line says."""
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    (hub("me/small") / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}))
    module, batch = create_named_module("hf:me/small", 3)
    assert (type(module).__name__, module.config.n_embd, batch["input_ids"].shape) == ("GPT2LMHeadModel", 8, (3, 512))
    with torch.device("meta"):
        module, _ = create_named_module("hf:gpt2", 1)
    assert (type(module).__name__, module.config.n_embd) == ("GPT2LMHeadModel", 768)
    with pytest.raises(CheckpointError, match=r"huggingface\.co/me/none cannot be fetched.*a folder.*HF_HOME"):
        create_named_module("hf:me/none", 1)


@pytest.mark.parametrize(("size", "fits"), [(100, "96x96 or 128x128"), ("[64, 100]", "32x96 or 96x128")])
def test_a_size_that_does_not_fit_names_those_that_do(size, fits):
    with pytest.raises(revzoo.errors.SpecError, match=rf"Images of {fits} pixels fit"):
        revzoo.create("rev_vit_ti", overrides=["stages.0.depth=1", f"img_size={size}"], device="meta")
