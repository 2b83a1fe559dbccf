"""Reversible blocks in trainers with their default arguments: weights, to the bit, as if everything were stored."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

import revzoo
from tests.in_place.networks import IDS, assert_equal, compute_loss, llama, train_step

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries, about each other
ROWS = [{"input_ids": row, "labels": row} for row in IDS.repeat(2, 1)]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far", "away"]


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(("<pad>", "<eos>", "<unk>", *WORDS))}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=splitter, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def settings(folder, **others):
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        **quiet,
        **others,
    }


def transformers_trainer(model, folder, stored):
    arguments = transformers.TrainingArguments(**settings(folder), gradient_checkpointing=not stored)
    return transformers.Trainer(model, arguments, train_dataset=ROWS)


def sft(model, folder, stored):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    peft = pytest.importorskip("peft")
    texts = datasets.Dataset.from_list([{"text": " ".join(WORDS[i : i + 5])} for i in range(4)])
    # TRL switches checkpointing on by default.
    arguments = trl.SFTConfig(**settings(folder), **({"gradient_checkpointing": False} if stored else {}))
    lora = peft.LoraConfig(target_modules="all-linear", r=2)
    return trl.SFTTrainer(model, args=arguments, train_dataset=texts, processing_class=tokenizer(), peft_config=lora)


def dpo(model, folder, stored):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    pair = {"prompt": "the cat", "chosen": " sat on a mat", "rejected": " ran far away"}
    arguments = trl.DPOConfig(**settings(folder), **({"gradient_checkpointing": False} if stored else {}))
    data = {"train_dataset": datasets.Dataset.from_list([pair] * 4), "processing_class": tokenizer()}
    return trl.DPOTrainer(model, ref_model=copy.deepcopy(model), args=arguments, **data)


@pytest.mark.slow
@pytest.mark.parametrize("make", [transformers_trainer, sft, dpo])
def test_trainers_that_switch_checkpointing_on(make, tmp_path):
    weights = []
    for stored in (True, False):
        torch.manual_seed(0)
        model = llama(pad_token_id=0, bos_token_id=None, eos_token_id=1)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        chain = revzoo.reversible_(model).chains[0]
        chain.schedule = "store" if stored else "invert"
        trainer = make(model, tmp_path, stored)
        trainer.train()
        weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad})
    assert_equal(weights[1], weights[0])
    assert not any(name in before and torch.equal(weight, before[name]) for name, weight in weights[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [False, True])  # of chunk_loss_, besides those of TRL
def test_the_lines_of_the_page(chunks, tmp_path):
    """With TRL's defaults, LoRA and random signs, weights are those of storing, and what is deployed is an ordinary Llama."""
    trl, datasets, peft = (pytest.importorskip(name) for name in ("trl", "datasets", "peft"))
    page = (Path(__file__).parents[2] / "docs" / "language.md").read_text()
    [lines] = [block for block in re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S) if "SFTTrainer(" in block]
    train, deploy = lines.split("\n\n")
    text = datasets.Dataset.from_list([{"text": " ".join(WORDS[i : i + 5])} for i in range(4)])
    names = {"SFTTrainer": trl.SFTTrainer, "LoraConfig": peft.LoraConfig, "texts": text, "tokenizer": tokenizer()}
    names |= {"SFTConfig": lambda folder: trl.SFTConfig(**settings(tmp_path / folder)), "batch": {"input_ids": IDS}}
    weights = []
    for schedule in ("store", "invert"):

        def reversible(model, mode=schedule, **options):
            if chunks:
                revzoo.chunk_loss_(model)
            revzoo.reversible_(model, **options).chains[0].schedule = mode

        torch.manual_seed(0)
        names["model"] = llama(pad_token_id=0, bos_token_id=None, eos_token_id=1)
        exec(train, names | {"revzoo": SimpleNamespace(reversible_=reversible)}, names)
        weights.append({name: p.detach().clone() for name, p in names["trainer"].model.named_parameters()})
    assert_equal(weights[1], weights[0])
    assert all(weight.any() for name, weight in weights[0].items() if "lora_B" in name)

    def ordinary(model):
        before = model.eval()(IDS).logits
        revzoo.ordinary_(model)
        assert torch.equal(model(IDS).logits, before)
        names["logits"] = before

    exec(deploy, names | {"revzoo": SimpleNamespace(ordinary_=ordinary)}, names)
    logits = names["llama"](IDS).logits
    assert torch.allclose(logits, names["logits"], atol=0.01)  # those of bfloat16, which is TRL's default
    names["llama"].save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is type(names["llama"]) is transformers.LlamaForCausalLM
    assert torch.equal(again(IDS).logits, logits)


@pytest.mark.slow
def test_lightning():
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def training_step(self, batch, _):
            return self.network(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    weights = []
    for mode in ("store", "invert"):
        torch.manual_seed(0)
        module = Module(llama())
        revzoo.reversible_(module.network).chains[0].schedule = mode
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", precision="bf16-mixed", **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(ROWS, batch_size=2))
        weights.append(module.state_dict())
    assert_equal(weights[1], weights[0])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_blocks_with_lora(bits, tmp_path):
    """What bitsandbytes packs anew in evaluation is, after `reversible_` has run it, as it was."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    how = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, device_map="cpu")
    before = model.train()(IDS).logits.detach()
    report = revzoo.reversible_(model, batch={"input_ids": IDS})
    assert report.similarity.cosine > 0.999
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2))
    stored, inverted = (train_step(model, {"input_ids": IDS, "labels": IDS}, mode) for mode in ("store", "invert"))
    assert_equal(inverted[0], stored[0])
    assert inverted[1] < stored[1]
    with torch.no_grad():
        assert nn.functional.cosine_similarity(model(IDS).logits, before, -1).min() > 0.99


def test_packed_sequences_do_not_see_one_another():
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    packed = {"position_ids": positions, "use_cache": False}  # a cache would hide from Transformers that they are packed
    torch.manual_seed(0)
    model = llama().eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS, **packed).logits[:1, 5:], model(IDS[:1, 5:]).logits, rtol=0, atol=1e-6)
    revzoo.reversible_(model)
    batch = {"input_ids": IDS, "labels": IDS, **packed}
    assert_equal(train_step(model, batch, "invert")[0], train_step(model, batch, "store")[0])
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS, **packed).logits
        assert torch.allclose(logits[:1, 5:], model(IDS[:1, 5:]).logits, atol=1e-6)
        assert torch.allclose(logits[1:, 9:], model(IDS[1:, 9:]).logits, atol=1e-6)


def test_left_padding():
    torch.manual_seed(0)
    model = llama()
    revzoo.reversible_(model)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS.masked_fill(mask == 0, -100)}
    assert_equal(train_step(model, batch, "invert")[0], train_step(model, batch, "store")[0])
    write = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    padded = model.eval().generate(input_ids=IDS, attention_mask=mask, **write)
    assert torch.equal(padded[0, 12:], model.generate(input_ids=IDS[:1, 5:], **write)[0, 7:])


def test_the_auxiliary_loss_of_experts_is_counted_once():
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts, num_hidden_layers=3)).train()
    batch = {"input_ids": IDS, "labels": IDS}
    expected = model(**batch)
    expected.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    revzoo.reversible_(model, kept_bits=15)  # nearest to the ordinary network
    actual = model(**batch)
    compute_loss(actual).backward()
    assert len(actual.router_logits) == 3
    assert actual.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-4)
    gates = [name for name in gradients if "gate.weight" in name or "router" in name]
    assert len(gates) == 3
    for name in gates:
        assert torch.allclose(model.get_parameter(name).grad, gradients[name], rtol=1e-2, atol=1e-4)
