"""Attention of Transformers needs no mask where a batch has no padding and texts are not packed: with a plan as without one."""

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import revzoo
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(2 * 160).reshape(2, 160) * 7 % 61
ONES, PADDED = torch.ones_like(TOKENS), torch.ones_like(TOKENS)
PADDED[0, -30:] = 0
PACKED = torch.arange(160).remainder(80).expand(2, -1)


def make_llama(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **changes))


def make_gpt2(**changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 160,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, loss_type="ForCausalLM", **changes)).train()


def make_bert():
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, attention_probs_dropout_prob=0.0)).train()


class Masking(nn.Module):
    """Makes a mask of its own: what it is given says nothing of padding."""

    def __init__(self):
        super().__init__()
        self.model = make_llama()

    def forward(self, input_ids: Tensor, labels: Tensor):
        return self.model(input_ids=input_ids, attention_mask=(input_ids != 0).long(), labels=labels)


class Masks(TorchDispatchMode):
    """Counts the calls of attention that are given a mask."""

    count = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True  # otherwise nothing is captured inside, and plans step aside

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "attention" in str(func) and (kwargs or {}).get("attn_mask") is not None
        return func(*args, **(kwargs or {}))


class Writing(nn.Module):
    """Makes its mask in place, of what it also uses elsewhere, or of random numbers."""

    def __init__(self, how):
        super().__init__()
        self.model, self.how = make_llama(use_cache=False), how
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids: Tensor, labels: Tensor):
        mask = torch.ones_like(input_ids)
        if self.how == "item":
            mask[input_ids == 60] = 0
        elif self.how == "fill":
            mask.masked_fill_(input_ids == 60, 0)
        elif self.how == "buffer":
            self.calls += 1
            mask = mask * (self.calls > 0)
        else:
            mask = (torch.rand(input_ids.shape) > 0.002).long()
        return self.model(input_ids=input_ids, attention_mask=mask, labels=labels)


def read_loss(outputs):
    return outputs.loss


def make_batch(**more):
    return {"input_ids": TOKENS, "labels": TOKENS.clone(), **more}


def train(model, batch):
    """Return the peak of a step, how many times attention has a mask in it, and loss and gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    with LiveBytesOfReplacedCalls() as live, Masks() as masks:
        live.watch([*model.parameters(), *model.buffers(), *batch.values()])
        loss = model(**batch).loss
        loss.backward()
    return live.peak(), masks.count, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def plan_less(model, batch):
    """Apply a plan for a tenth less than a step takes; return it."""
    plan = revzoo.plan(model, batch, int(0.9 * train(copy.deepcopy(model), batch)[0]), loss=read_loss)
    plan.apply(model)
    return plan


@pytest.mark.parametrize("make", [make_llama, make_gpt2])
@pytest.mark.parametrize(
    ("more", "has_masks"),
    [({}, False), ({"attention_mask": ONES}, False), ({"attention_mask": PADDED}, True), ({"position_ids": PACKED}, True)],
    ids=["no mask", "mask of ones", "padding", "packed texts"],
)
def test_a_plan_takes_the_bytes_the_kernels_and_the_bits_of_the_module_itself(make, more, has_masks):
    model, batch = make(use_cache=False), make_batch(**more)
    train(model, batch)
    peak, masks, expected = train(model, batch)
    plan = plan_less(model, batch)
    train(model, batch)
    planned_peak, planned_masks, found = train(model, batch)
    assert plan.no_recompute_peak_bytes == peak
    assert planned_peak == plan.peak_bytes <= 0.9 * peak
    assert (planned_masks > 0) == (masks > 0) == has_masks
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("make", [make_gpt2, make_bert, Masking])
def test_batches_with_and_without_padding_take_turns(make):
    """The planned batch has none: attention is given a mask where it must, and a warning says so once."""
    model = make()
    alone, own = copy.deepcopy(model), isinstance(model, Masking)
    batches = [make_batch(input_ids=TOKENS.clamp(min=1)), make_batch(input_ids=TOKENS * PADDED)] if own else []
    batches = batches or [make_batch(attention_mask=ONES), make_batch(attention_mask=PADDED)]
    plan = plan_less(model, batches[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (*batches, *batches):
            _, masks, expected = train(alone, batch)
            peak, found_masks, found = train(model, batch)
            assert (found_masks > 0) == (masks > 0) == (batch is batches[1])
            assert all(map(torch.equal, found, expected))
            assert masks or peak <= plan.budget_bytes
    (warned,) = (str(each.message) for each in caught if "plan" in str(each.message))
    assert warned.startswith(f"A call of {type(model).__name__} has padding or packed texts, and the planned batch had none.")


def test_a_plan_that_was_made_with_padding_holds_without():
    model = make_llama()
    plan = plan_less(model, make_batch(attention_mask=PADDED))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mask in (PADDED, ONES):
            assert train(model, make_batch(attention_mask=mask))[0] == plan.peak_bytes


@pytest.mark.parametrize("how", ["item", "fill", "buffer", "random"])
@pytest.mark.filterwarnings("ignore:A call of Writing")
def test_nothing_is_assumed_of_what_cannot_be_computed_apart(how):
    model, batches = Writing(how), [make_batch(input_ids=TOKENS % 60), make_batch()]
    alone = copy.deepcopy(model)
    plan_less(model, batches[0])
    for batch in (*batches, *batches):
        _, masks, expected = train(alone, batch)
        _, found_masks, found = train(model, batch)
        assert found_masks >= masks
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
        assert torch.equal(alone.calls, model.calls)


@pytest.mark.filterwarnings("ignore:A call of LlamaForCausalLM differs")  # where another thread's call ends what is assumed
def test_threads_leave_the_library_as_it_was():
    from transformers import masking_utils

    before = dict(vars(masking_utils))
    models = [make_llama() for _ in range(2)]
    for model in models:
        plan_less(model, make_batch(attention_mask=ONES))

    def run(model):
        for _ in range(4):
            model(**make_batch(attention_mask=ONES)).loss.backward()

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: value for name, value in vars(masking_utils).items() if before.get(name) is not value} == {}


def test_the_values_of_a_batch_that_has_none_are_not_guessed():
    with torch.device("meta"):
        model = make_llama()
        batch = make_batch(attention_mask=ONES)
        plans = [
            revzoo.plan(model, {k: t.to("meta") for k, t in b.items()}, "1TiB", loss=read_loss) for b in (batch, make_batch())
        ]
    assert plans[0].peak_bytes - plans[1].peak_bytes > 4 * 2 * 160 * 160  # the mask that is made in case
    assert [plan.assumes for plan in plans] == [False, True]


def test_a_planned_module_is_freed_while_something_else_is_compiled():
    """The garbage collector may run at any time; the compiler reads what it has made of the code that both share."""
    torch._dynamo.reset()
    holder = [make_gpt2()]
    plan_less(holder[0], make_batch())
    train(holder[0], make_batch())
    freed = weakref.ref(holder[0])

    def backend(graph, inputs):
        holder.clear()
        gc.collect()
        return graph.forward

    other = make_gpt2()
    torch.compile(other, backend=backend)(**make_batch()).loss.backward()
    assert freed() is None
    plan_less(other, make_batch())
    train(other, make_batch())
