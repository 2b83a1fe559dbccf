"""A run that is resumed is the uninterrupted one: grid, bits and sign go with the weights, whatever the weights are by then."""

import warnings
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM

import revzoo
from tests.in_place.networks import ONE_BIT, llama

IDS = torch.arange(64).view(2, 32) % 8
BATCH = {"input_ids": IDS, "labels": IDS}
SETTINGS = {"8 bits": {}, "random sign": ONE_BIT}


def go_on(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**BATCH).loss.backward()
        optimizer.step()
    return model.state_dict()


def grow(model):
    """Make states 64 times as large, as a long training may, so that another grid would be chosen."""
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(64)


def save_pretrained(model, folder, options):
    model.save_pretrained(folder)
    resumed = LlamaForCausalLM.from_pretrained(folder, use_safetensors=True).train()
    report = revzoo.reversible_(resumed, batch=BATCH, **options)
    return resumed, report


def save_state(model, folder, options):
    torch.save(model.state_dict(), folder / "state.pt")
    resumed = llama(3)
    report = revzoo.reversible_(resumed, batch=BATCH, **options)  # of other weights
    resumed.load_state_dict(torch.load(folder / "state.pt"))
    return resumed, report


def save_model(model, folder, options):
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False), None


@pytest.mark.parametrize("save", [save_pretrained, save_state, save_model])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_resumed_run_is_the_uninterrupted_one(save, setting, tmp_path):
    torch.manual_seed(0)
    model = llama(3)
    chain = revzoo.reversible_(model, batch=BATCH, **SETTINGS[setting]).chains[0]
    grow(model)
    go_on(model, 1)
    resumed, report = save(model, tmp_path, SETTINGS[setting])
    if report is not None:
        other = llama(3)
        other.load_state_dict(model.state_dict())
        chosen = revzoo.reversible_(other, batch=BATCH, **SETTINGS[setting]).chains[0].coupling
        assert chosen.fraction_bits != chain.coupling.fraction_bits  # without what was saved
        assert report.chains[0].coupling == chain.coupling
    state = torch.get_rng_state()
    expected = go_on(model, 1)
    torch.set_rng_state(state)
    received = go_on(resumed, 1)
    assert [key for key in expected if not torch.equal(received[key], expected[key])] == []


def test_another_setting_than_the_saved_one_is_warned_of(tmp_path):
    model = llama(3)
    revzoo.reversible_(model, batch=BATCH)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"saved with .*'kept_bits': 8.* Give reversible_ the coupling, kept_bits and sign"):
        revzoo.reversible_(LlamaForCausalLM.from_pretrained(tmp_path).train(), kept_bits=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ordinary = LlamaForCausalLM.from_pretrained(tmp_path)
        ordinary.load_state_dict(model.state_dict())


def test_a_loaded_setting_is_saved_again(tmp_path):
    """Also where a call of `reversible_` was interrupted."""
    model = llama(3)
    chain = revzoo.reversible_(model, batch=BATCH).chains[0]
    grow(model)
    other = llama(3)
    revzoo.reversible_(other, batch=BATCH, fraction_bits=15)
    other.load_state_dict(model.state_dict())
    other.save_pretrained(tmp_path)
    resumed = LlamaForCausalLM.from_pretrained(tmp_path).train()
    with patch("revzoo.in_place.reversible.count_peaks", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        revzoo.reversible_(resumed, batch=BATCH)
    assert revzoo.reversible_(resumed, batch=BATCH).chains[0].coupling == chain.coupling


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_a_setting_that_was_saved_inside_of_a_wrapper_is_found(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(3), peft.LoraConfig(target_modules=["q_proj"]))
    chain = revzoo.reversible_(model, batch=BATCH).chains[0]
    merged = model.merge_and_unload()
    grow(merged)
    merged.save_pretrained(tmp_path)
    resumed = LlamaForCausalLM.from_pretrained(tmp_path).train()
    assert revzoo.reversible_(resumed, batch=BATCH).chains[0].coupling == chain.coupling
