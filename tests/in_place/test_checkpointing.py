"""Gradient checkpointing, switched on before or after `reversible_`, passes reversible blocks by."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.errors import InputError
from tests.in_place.networks import IDS, NETWORKS, Tanh, X, assert_equal, llama, train_step

PASSED_BY = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
WARNING = "Gradient checkpointing passes reversible blocks by.*gradient_checkpointing=False"


@PASSED_BY
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("order", ["before", "before, with a batch", "after"])
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_it_changes_nothing_and_says_so_once(name, order, use_reentrant):
    make, path, batch = NETWORKS[name]
    results, peaks = [], []
    for enables in (False, True):
        torch.manual_seed(0)
        model = make()
        with pytest.warns(UserWarning, match=WARNING) if enables else nullcontext():
            if enables and "before" in order:
                enable(model, use_reentrant)
            peaks.append(revzoo.reversible_(model, path, batch=batch if "batch" in order else None).peaks)
            if enables and order == "after":
                enable(model, use_reentrant)
            results.append(train_step(model, batch))
    assert_equal(train_step(copy.deepcopy(model), batch)[0], results[0][0])
    assert_equal(results[1][0], results[0][0])
    assert results[1][1] <= results[0][1] + 3 * 96  # bytes kept; some versions give each block positions, without a cache
    assert str(peaks[0]) == str(peaks[1])


def enable(model, use_reentrant):
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()  # as peft and Trainer do


class Loop(nn.Module):
    """Checkpoints its blocks by itself, as old loops of Transformers do."""

    def __init__(self, use_reentrant, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Tanh() for _ in range(4)])
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def test_a_loop_with_checkpoints_of_its_own_leaves_reversible_blocks_to_their_chain():
    gradients, calls = [], []
    for use_reentrant in (None, False):
        torch.manual_seed(0)
        calls.append([])
        tanhs = [Tanh(lambda m, x: (calls[-1].append(m), x + m.layer(x).tanh())[1]) for _ in range(3)]
        loop = Loop(use_reentrant, *tanhs[:2], nn.Sequential(tanhs[2], nn.Linear(6, 6)))
        revzoo.reversible_(loop)
        loop(X).square().sum().backward()
        gradients.append({name: p.grad for name, p in loop.named_parameters()})
        calls[-1] = [calls[-1].count(m) for m in tanhs]
    assert_equal(gradients[1], gradients[0])
    assert calls == [[2, 2, 1], [2, 2, 2]]  # the last block stayed ordinary, and goes on being checkpointed


def test_a_reentrant_checkpoint_that_cannot_be_left_is_refused_by_the_argument_of_trainers():
    loop = Loop(True)
    revzoo.reversible_(loop, "blocks")
    with pytest.raises(InputError, match="blocks.1 .*checkpoint around it.*gradient_checkpointing_kwargs"):
        loop(X.clone().requires_grad_())


def test_a_hook_of_a_block_that_saves_tensors_inside_a_checkpoint_gets_the_gradient_of_the_same_function():
    gradients = []
    for use_reentrant in (None, False):
        torch.manual_seed(0)
        loop = Loop(use_reentrant)
        revzoo.reversible_(loop, "blocks")
        loop.blocks[2].register_forward_hook(lambda _, x, y: y.sin())
        loop(X).square().sum().backward()
        gradients.append({name: p.grad for name, p in loop.named_parameters()})
    assert_equal(gradients[1], gradients[0])


@PASSED_BY
@pytest.mark.filterwarnings("ignore:Gradient checkpointing passes")
def test_it_may_be_switched_off_and_on_between_forward_and_backward():
    """As TRL does it around a reference model with the same weights."""
    gradients = []
    for enables in (False, True):
        torch.manual_seed(0)
        model = llama().train()
        revzoo.reversible_(model)
        torch.manual_seed(1)
        loss = model(**NETWORKS["llama"][2]).loss
        if enables:
            model.gradient_checkpointing_enable()
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(gradients[1], gradients[0])


@PASSED_BY
def test_generation_and_the_ordinary_network_afterwards():
    model = llama()
    revzoo.reversible_(model)
    model.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match=WARNING):
        train_step(model, NETWORKS["llama"][2])
    assert model.eval().generate(IDS[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 7)
    revzoo.ordinary_(model)
    assert not model.model._forward_pre_hooks
