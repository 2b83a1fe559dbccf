"""What changes a network and what undoes it leave nothing: no attribute, no reference, no byte of its pickle."""

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
from torch import nn

import revzoo
from tests.in_place.interrupts import State
from tests.in_place.networks import ONE_BIT, SPLIT, llama

IDS = torch.arange(64)[None] % 8
BATCH = {"input_ids": IDS, "labels": IDS}


def step(model):
    with torch.random.fork_rng():
        model(**BATCH).loss.backward()
    model.zero_grad()


def go_and_return(change):
    def run(model):
        change(model)
        step(model)
        step(model)
        revzoo.ordinary_(model)

    return run


def plan(model):
    loss = lambda outputs: outputs.loss  # noqa: E731
    stored = revzoo.measure_memory(model, BATCH, loss=loss)
    made = revzoo.plan(model, BATCH, stored.peak_bytes - stored.activation_bytes // 3, loss=loss)
    made.apply(model)
    step(model)
    revzoo.release(model)


ROUND_TRIPS = {
    "reversible_": go_and_return(lambda model: revzoo.reversible_(model, batch=BATCH)),
    "split": go_and_return(lambda model: revzoo.reversible_(model, batch=BATCH, split=SPLIT, **ONE_BIT)),
    "tiles": go_and_return(lambda model: revzoo.reversible_(model, batch=BATCH, split=SPLIT, tiles=8, **ONE_BIT)),
    "chunk_loss_": go_and_return(lambda model: revzoo.chunk_loss_(model, batch=BATCH, chunk=9)),
    "both": go_and_return(lambda model: (revzoo.chunk_loss_(model), revzoo.reversible_(model, tiles=2))),
    "plan": plan,
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_nothing_stays_behind(name):
    model = llama(3)
    step(model)  # Transformers sets attributes, too
    before, pickled = State(model), len(pickle.dumps(model))
    held = [*model.modules(), *model.parameters(), *model.buffers()]
    for _ in range(2):
        gc.collect()
        references = [sys.getrefcount(each) for each in held]
        ROUND_TRIPS[name](model)
        gc.collect()
    assert before.find_changes(model) == []
    assert [sys.getrefcount(each) for each in held] == references
    assert len(pickle.dumps(model)) == pickled
    network = weakref.ref(model)
    before = held = model = None
    gc.collect()
    assert network() is None


@pytest.mark.parametrize("undo", [False, True])
def test_what_is_exchanged_is_freed_at_once(undo):
    """Also while blocks are reversible: merged adapters and quantized weights would else be there twice."""
    model = llama(3)
    revzoo.reversible_(model, batch=BATCH, split=SPLIT, tiles=2)
    step(model)
    if undo:
        revzoo.ordinary_(model)
    olds = [weakref.ref(layer.mlp) for layer in model.model.layers]
    olds += [weakref.ref(layer.mlp.up_proj.weight) for layer in model.model.layers]
    for layer in model.model.layers:
        layer.mlp = copy.deepcopy(layer.mlp)
    assert [old() for old in olds if old() is not None] == []
    step(model)


def test_modules_of_a_chain_are_as_before():
    steps = [nn.Linear(4, 4) for _ in range(3)]
    before = [dict(step.__dict__) for step in steps]
    chain = revzoo.runtime.ReversibleChain(steps)
    for _ in range(3):
        sum(y.sum() for y in chain(torch.randn(2, 4), torch.randn(2, 4))).backward()
    chain.zero_grad()
    del chain
    assert [step.__dict__ for step in steps] == before
