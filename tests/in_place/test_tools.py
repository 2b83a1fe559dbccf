"""Networks made reversible in place with peft, Accelerate, saving and loading; docs/reversible.md shows Trainer."""

import accelerate
import pytest
import torch
import transformers

import revzoo
from tests.in_place.networks import IDS, llama


def make():
    torch.manual_seed(0)
    return llama()


def set_schedule(report, schedule):
    for chain in report.chains:
        chain.schedule = schedule


def compute_gradients(model):
    model.train().zero_grad()
    torch.manual_seed(1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CAUSAL = {"task_type": "CAUSAL_LM"}
LINEAR = {**CAUSAL, "r": 2, "target_modules": "all-linear"}
ADAPTERS = {  # what their parameters are called, and how they are made
    "LoRA everywhere": ("lora", "LoraConfig", {**LINEAR, "lora_dropout": 0.1}),
    "DoRA": ("lora", "LoraConfig", {**LINEAR, "use_dora": True}),
    "IA3": ("ia3", "IA3Config", CAUSAL),
    "prompt tuning": ("prompt", "PromptTuningConfig", {**CAUSAL, "num_virtual_tokens": 3}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "order"), [(name, "after" if name == "DoRA" else "before") for name in ADAPTERS])
def test_adapters_of_peft_have_the_gradients_of_storing(name, order, tmp_path):
    peft = pytest.importorskip("peft")
    model = make()
    report = revzoo.reversible_(model) if order == "before" else None
    part, config, options = ADAPTERS[name]
    adapted = peft.get_peft_model(model, getattr(peft, config)(**options))
    report = report or revzoo.reversible_(adapted)
    gradients = {}
    for schedule in ("store", "invert"):
        set_schedule(report, schedule)
        gradients[schedule] = compute_gradients(adapted)
    assert gradients["store"]
    assert all(part in key for key in gradients["store"])
    assert len(gradients["store"]) == sum(p.requires_grad for p in adapted.parameters())
    assert all(torch.equal(g, gradients["store"][key]) for key, g in gradients["invert"].items())
    tokens = adapted.generate(input_ids=IDS[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 7)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make(), tmp_path).eval()
    revzoo.reversible_(again)
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, adapted.eval()(input_ids=IDS).logits)
    if part == "prompt":
        return  # it is an input, which cannot be merged
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=IDS).logits, again(input_ids=IDS).logits, atol=1e-3)


def test_saving_and_loading_is_that_of_the_ordinary_network(tmp_path):
    model = make().eval()
    ordinary = {key: value.clone() for key, value in model.state_dict().items()}
    config = model.config.to_dict()
    revzoo.reversible_(model)
    assert {key: value for key, value in model.config.to_dict().items() if key != "revzoo"} == config
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is type(model)
    assert all(torch.equal(value, ordinary[key]) for key, value in again.state_dict().items())
    with torch.no_grad():
        assert not torch.equal(again(IDS).logits, model(IDS).logits)
        revzoo.reversible_(again)
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_accelerate_prepares_and_unwraps():
    gradients = []
    for schedule in ("store", "invert"):
        model = make()
        set_schedule(revzoo.reversible_(model), schedule)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(1)
        accelerator.backward(prepared.train()(input_ids=IDS, labels=IDS).loss)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert all(torch.equal(g, gradients[0][name]) for name, g in gradients[1].items())
