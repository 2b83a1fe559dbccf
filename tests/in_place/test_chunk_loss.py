"""`chunk_loss_`: other people's models compute their loss in chunks, with their own code."""

import copy
import math
import pickle
import warnings
import weakref

import accelerate
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.errors import ConversionError, InputError, RecoveryError, UnknownNameError
from revzoo.runtime import LiveBytes
from revzoo.runtime.lazy_logits import LazyLogits, WholeLogitsWarning

VOCABULARY = 503
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BART = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 1), ("attention_heads", 2))}
NETWORKS = {
    "Llama": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 1}),
    "Gemma2": ("Gemma2ForCausalLM", {**SMALL, "num_key_value_heads": 1, "head_dim": 8}),  # a soft cap
    "Cohere": ("CohereForCausalLM", {**SMALL, "num_key_value_heads": 1}),  # a scale
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2}),  # a tied head
    "Bert": ("BertForMaskedLM", SMALL),  # a transform before the head
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    ),
    "Bart": ("BartForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 16, **BART}),  # a bias outside of the head
}


def make(name="Llama", tokens=24):
    kind, settings = NETWORKS[name]
    kind = getattr(transformers, kind)
    config = kind.config_class(**settings, decoder_start_token_id=0) if name == "T5" else kind.config_class(**settings)
    ids = torch.randint(3, VOCABULARY, (2, tokens))
    return kind(config).train(), {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)}


def differentiate(model, batch, **arguments):
    torch.manual_seed(1)  # of dropout
    model.zero_grad()
    loss = model(**batch, **arguments).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", NETWORKS)
def test_loss_and_gradients_are_the_ordinary_ones(name):
    model, batch = make(name)
    model.double()
    keys, expected = list(model.state_dict()), differentiate(model, batch)
    revzoo.chunk_loss_(model, batch=batch, chunk=5)
    head, calls = model.get_output_embeddings(), []
    assert isinstance(model(**batch).logits, LazyLogits)
    run = type(head).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(head), "forward", lambda self, x: (self is head and calls.append(len(x)), run(self, x))[1])
        received = differentiate(model, batch)
    for a, b in zip(received, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-12  # Transformers computes the ordinary loss in float32
    assert max(calls) == 5
    assert list(model.state_dict()) == keys


def test_the_logits_never_exist_and_reversible_blocks_save_what_they_promise():
    model, batch = make(tokens=64)
    head_bytes, logits_bytes = 4 * VOCABULARY * 16, 4 * VOCABULARY * 128

    def measure():
        with LiveBytes() as live:
            given = live.watch(list(model.parameters()))
            differentiate(model, batch)
        return live.peak(without=given)

    ordinary = measure()
    revzoo.chunk_loss_(model, chunk=8)
    stored = measure()
    assert ordinary - stored > 2.5 * logits_bytes
    revzoo.reversible_(model)
    assert measure() < stored
    counted = revzoo.measure_memory(model, batch, loss=lambda outputs: outputs.loss)
    assert counted.activation_bytes < stored + head_bytes
    plan = revzoo.plan(model, batch, 2**24, loss=lambda outputs: outputs.loss)
    assert plan.peak_bytes < ordinary + sum(p.nbytes for p in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler, between two graphs
def test_a_plan_of_the_graph_counts_it_and_compiled_code_computes_it():
    model, batch = make(tokens=64)
    expected, peaks = differentiate(model, batch), []
    for change in (lambda _: None, lambda model: revzoo.chunk_loss_(model, chunk=8)):
        change(model)
        peaks.append(revzoo.plan(model, batch, 2**26, loss=lambda outputs: outputs.loss).no_recompute_peak_bytes)
    assert peaks[0] - peaks[1] > 1.9 * 4 * VOCABULARY * 128
    model.compile(backend="eager")
    for a, b in zip(differentiate(model, batch), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_the_trainers_count_autocast_and_lora_on_the_head():
    peft = pytest.importorskip("peft")
    model, batch = make()
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    count = (batch["labels"][:, 1:] != -100).sum() * 3

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return differentiate(model, batch, num_items_in_batch=count)

    expected = run()
    revzoo.chunk_loss_(model, chunk=5)
    received = run()
    assert len(received) == 3
    for a, b in zip(received, expected, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


def test_evaluation_generate_copies_and_ordinary():
    model, batch = make()
    revzoo.chunk_loss_(model)
    assert type(model.eval()(**batch).logits) is torch.Tensor
    assert model.train().generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape == (2, 26)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other(**batch).logits, LazyLogits)
        other.lm_head.weight.data.zero_()  # the copy calls its own head
        assert other(**batch).loss.item() == pytest.approx(math.log(VOCABULARY))
    with pytest.raises(InputError, match="already"):
        revzoo.chunk_loss_(model)
    revzoo.ordinary_(model)
    assert type(model(**batch).logits) is torch.Tensor
    assert "forward" not in model.lm_head.__dict__


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
def test_a_resized_head_is_called_in_chunks_too(name):
    model, batch = make(name)
    revzoo.chunk_loss_(model, chunk=5)
    keys = set(model.__dict__)
    for each in (model, copy.deepcopy(model)):  # the copy has a head of its own
        each.resize_token_embeddings(VOCABULARY + 9, mean_resizing=False)
        logits = each(**batch).logits
        assert isinstance(logits, LazyLogits)
        assert logits.shape[-1] == VOCABULARY + 9
        received = differentiate(each, batch)
        revzoo.ordinary_(each)
        for a, b in zip(received, differentiate(each, batch), strict=True):
            torch.testing.assert_close(a, b)
    assert keys - set(model.__dict__) == {"set_output_embeddings"}


def test_a_masked_language_model_of_the_zoo_gives_its_head_a_mask_without_effect():
    model = revzoo.create("rev_roberta_mini").train()
    ids = model.example_input(2)
    ids[1, 40:] = model.spec.input.padding

    def run():
        torch.manual_seed(1)  # of dropout
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return type(logits), torch.autograd.grad(loss, list(model.parameters()))

    _, expected = run()
    revzoo.chunk_loss_(model, chunk=7)
    kind, received = run()
    assert kind is LazyLogits
    for a, b in zip(received, expected, strict=True):
        torch.testing.assert_close(a, b)


class Small(nn.Module):
    """A network of one's own, and what it does with its logits."""

    def __init__(self, loss):
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(50, 8), nn.Linear(8, 50), loss
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, ids):
        return self.loss(self, self.head(self.embed(ids)), ids)


def shift(model, logits, ids):
    return F.cross_entropy(logits[:, :-1].to(torch.float64).reshape(-1, 50), ids[:, 1:].flatten())


RECORDED = {
    "shift": shift,
    "transpose": lambda _, x, ids: F.cross_entropy(x.transpose(1, 2), ids),
    "mask": lambda _, x, ids: F.cross_entropy(x[ids > 9, :], ids[ids > 9], label_smoothing=0.1),
    "scale": lambda model, x, ids: F.cross_entropy((2 - x * model.scale / 3).flatten(0, 1), ids.flatten(), reduction="sum"),
    "two losses": lambda model, x, ids: shift(model, x, ids) + shift(model, torch.tanh(x), ids.flip(1)),
    "index": lambda _, x, ids: F.cross_entropy(x[:, (3, 1, 0)].flatten(0, 1), ids[:, [3, 1, 0]].flatten()),
    "range": lambda _, x, ids: F.cross_entropy(x[range(1, -1, -1)].flatten(0, 1), ids.flip(0).flatten()),
    "ellipsis": lambda _, x, ids: F.cross_entropy(x[..., ids[0] > 9, :].flatten(0, 1), ids[:, ids[0] > 9].flatten()),
    "loop": lambda _, x, ids: sum(F.cross_entropy(each, own) for each, own in zip(x, ids, strict=True)),
    "split": lambda _, x, ids: F.cross_entropy(x.chunk(2, 1)[1].flatten(0, 1), ids[:, 6:].flatten()),
    "bias": lambda model, x, ids: shift(model, x * model.scale[None, None] + model.head.bias[None], ids),
    "number": lambda model, x, ids: shift(model, x, ids) * (x.float() * torch.tensor(2.0, dtype=torch.float64)).dtype.itemsize,
    "none": lambda _, x, ids: (F.cross_entropy(x.view(-1, 50), ids.flatten(), reduction="none") * torch.arange(24)).sum(),
}
WHOLE = {
    "log_softmax": lambda _, x, ids: -x.log_softmax(-1).gather(-1, ids[..., None]).mean(),
    "logsumexp": lambda model, x, ids: shift(model, x, ids) + x.logsumexp(-1).mean(),
    "__getitem__": lambda model, x, ids: shift(model, x, ids) + x[..., :3].mean(),
    "mul": lambda model, x, ids: shift(model, x * x, ids),
    "add": lambda model, x, ids: shift(model, x + torch.ones(2, 12, 1), ids),
    "mul_": lambda model, x, ids: (x.mul_(2), shift(model, x, ids))[1],
    "cross_entropy": lambda _, x, ids: F.cross_entropy(x.view(-1, 50), ids.flatten(), torch.rand(50, dtype=x.dtype)),
    "softmax": lambda model, x, ids: shift(model, x, ids) + torch.softmax(input=x, dim=-1).square().mean(),
    "cat": lambda model, x, ids: shift(model, torch.cat(tensors=[x, x]), torch.cat([ids, ids])),
    "type": lambda model, x, ids: shift(model, x, ids) * len(x.type()),
    "view": lambda model, x, ids: shift(model, x, ids) * (x.view(dtype=torch.int64).shape[-1] / 50),
}


@pytest.mark.parametrize("what", [*RECORDED, *WHOLE])
def test_what_a_network_does_to_its_logits(what):
    """It is recorded, or the whole logits are made with a warning that names it; gradients are the ordinary ones."""
    model, ids = Small({**RECORDED, **WHOLE}[what]).double(), torch.randint(0, 50, (2, 12))

    def run():
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(ids)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = run()
    if what in RECORDED:
        revzoo.chunk_loss_(model, batch=ids, loss=lambda loss: loss, chunk=5)
        received = run()
    else:
        with pytest.raises(ConversionError, match=rf"something else with its logits.*{what}"):
            revzoo.chunk_loss_(model, batch=ids, loss=lambda loss: loss)
        revzoo.chunk_loss_(model)
        with pytest.warns(WholeLogitsWarning, match=what):
            received = run()
    for a, b in zip(received, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def two_adapters():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, batch = make()
    config = {"r": 2, "target_modules": ["lm_head"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**config), "one")
    model.add_adapter("other", peft.LoraConfig(**config))
    return model, batch


class Scaled(nn.Linear):
    """A head with an attribute and a counter of its calls, which computes otherwise in training."""

    scale, calls = 1.0, 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.scale * self.calls * (1 + self.training)


def set_attribute(model):
    model.head.scale = 3.0


def replace_weight(model):
    model.head.weight = nn.Parameter(model.head.weight.detach() * 3)


def write(tensor):
    with torch.no_grad():
        tensor.mul_(3)


def exchange(model):
    model.head.weight.data = model.head.weight.data * 3


# What happens between the call of the head and the loss, and the error if that cannot be put back.
BETWEEN = {
    "nothing": (lambda model: None, None),
    "eval": (lambda model: model.eval(), None),
    "attribute": (set_attribute, None),
    "another weight": (replace_weight, None),
    "frozen": (lambda model: model.head.requires_grad_(False), None),
    "thawed": (lambda model: model.head.requires_grad_(), None),
    "weight, in place": (lambda model: write(model.head.weight), "'weight', which was changed"),
    "weight, by .data": (exchange, r"\.data was changed"),
    "hidden states": (lambda model: write(model.hidden), "hidden states that were changed"),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_the_head_computes_as_at_its_call_whatever_happens_before_the_loss(what):
    (change, refusal), model, ids = BETWEEN[what], Small(lambda _, x, ids: x).double(), torch.randint(0, 50, (2, 12))
    model.head.__class__ = Scaled
    model.head.requires_grad_(what != "thawed")
    model.embed.register_forward_hook(lambda _, args, out: setattr(model, "hidden", out))
    parameters = dict(model.named_parameters())

    def run():
        model.zero_grad()
        model.head.calls = 0
        logits = model(ids)
        change(model)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        return {"loss": loss.detach(), "calls": model.head.calls} | gradients

    expected = None if refusal else run()
    model.train().head.requires_grad_(what != "thawed")
    model.head.scale, model.head.weight = 1.0, parameters["head.weight"]
    revzoo.chunk_loss_(model, chunk=5)
    if refusal is None:
        torch.testing.assert_close(run(), expected)
    else:
        with pytest.raises(InputError, match=refusal):
            run()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_parameters_of_functional_call_and_adapters_are_those_of_the_call():
    model, ids = Small(lambda _, x, ids: x).double(), torch.randint(0, 50, (2, 12))
    new = {name: (3 * p).detach().requires_grad_() for name, p in model.named_parameters()}

    def differentiate_new():
        loss = F.cross_entropy(torch.func.functional_call(model, new, (ids,)).flatten(0, 1), ids.flatten())
        return loss, *torch.autograd.grad(loss, [new["head.weight"], new["embed.weight"]])

    expected = differentiate_new()
    revzoo.chunk_loss_(model, chunk=5)
    torch.testing.assert_close(differentiate_new(), expected)

    def differentiate_adapter(model, batch):
        model.set_adapter("one")
        logits = model(input_ids=batch["input_ids"]).logits
        weights = [p for name, p in model.named_parameters() if "one" in name]
        model.set_adapter("other")
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch["input_ids"].flatten())
        model.set_adapter("one")
        loss.backward()
        return [loss.detach(), *(p.grad for p in weights)]

    expected = differentiate_adapter(*two_adapters())
    model, batch = two_adapters()
    revzoo.chunk_loss_(model, chunk=5)
    torch.testing.assert_close(differentiate_adapter(model, batch), expected)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the network's input has no gradient
def test_hooks_and_gradients_of_the_logits_make_none():
    """They are called, and given a gradient without numbers, like those of DDP and FSDP2."""
    model, ids = Small(lambda _, x, ids: x), torch.randint(0, 50, (2, 12))
    revzoo.chunk_loss_(model, chunk=5)
    seen = []
    model.register_full_backward_hook(lambda *_: seen.append("module"))
    model.head.register_full_backward_hook(lambda *_: seen.append("head"))
    logits = model(ids)
    logits.register_hook(lambda gradient: seen.append(gradient.shape))
    logits.retain_grad()
    loss = shift(model, logits, ids) + shift(model, logits, ids.flip(1))
    logits.register_hook(lambda gradient: seen.append("late"))
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert (gradient.shape, gradient.dtype) == (logits.shape, logits.dtype)
    seen.clear()
    loss.backward()
    assert seen == [logits.shape, "late", "module", "head"]
    for each in (gradient, logits.grad):
        with pytest.raises(InputError, match="of their gradient"):
            each.norm()


ALIASES = {
    "relu": lambda x: F.relu(x, inplace=True),
    "data": lambda x: x.data.mul_(5),
    "detach": lambda x: x.detach().mul_(5),
    "view": lambda x: x.view(-1, 50).mul_(5),
    "half": lambda x: x[:, :6].mul_(5),
    "copy": lambda x: x.clone().mul_(5),
}


@pytest.mark.filterwarnings("ignore::revzoo.runtime.lazy_logits.WholeLogitsWarning")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("what", ALIASES)
def test_what_is_written_into_logits_is_seen_where_they_share_memory(what, after):
    model, ids = Small(lambda _, x, ids: x).double(), torch.randint(0, 50, (2, 12))

    def run():
        model.zero_grad()
        logits = model(ids)
        before = logits.transpose(0, 1).reshape(-1, 50), logits.view(-1, 50), logits.float()
        ALIASES[what](logits)
        copied, view, cast = (logits.transpose(0, 1).reshape(-1, 50), logits.view(-1, 50), logits.float()) if after else before
        losses = F.cross_entropy(copied, ids.T.flatten()), F.cross_entropy(view, ids.flatten()), shift(model, cast, ids)
        sum(losses).backward()
        return [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = run()
    revzoo.chunk_loss_(model, chunk=5)
    torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-8)  # some in float32


def test_nothing_is_lost_in_silence():
    """Where nobody can record it: an autograd.Function, logits that are asked for after backward, a second derivative."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum() * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.expand(2, 12, 50) * 2

    model, ids = Small(lambda _, x, ids: (x, shift(_, x, ids))), torch.randint(0, 50, (2, 12))
    revzoo.chunk_loss_(model)
    logits, loss = model(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        doubled = Double.apply(logits)
    with pytest.raises(InputError, match=r"an autograd\.Function"):
        (loss + doubled).backward()
    logits, loss = model(ids)
    hidden = weakref.ref(loss.grad_fn)
    loss.backward()
    with pytest.raises(InputError, match="after backward"), pytest.warns(WholeLogitsWarning):
        logits.argmax(-1)
    with pytest.raises(InputError, match="retain_graph=True"):
        loss.backward()
    with pytest.raises(InputError, match="create_graph=True"):
        torch.autograd.grad(model(ids)[1], model.head.weight, create_graph=True)
    del logits, loss
    assert hidden() is None


def test_a_head_of_which_tokens_are_not_all_treated_alike_is_refused():
    model, ids = Small(shift), torch.randint(0, 50, (2, 12))
    model.head.forward = lambda x: F.linear(x, model.head.weight) * (model.scale if len(x) else 1)
    revzoo.chunk_loss_(model, chunk=5)
    with pytest.raises(InputError, match="for some alone"):
        model(ids)
    model = Small(shift)
    nn.utils.parametrizations.spectral_norm(model.head)
    before = {name: b.clone() for name, b in model.named_buffers()}
    revzoo.chunk_loss_(model)
    with pytest.raises(InputError, match="head: f changes its 'parametrizations.weight.0._u'"):
        model(ids)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


class Gated(nn.Linear):
    """Mixes tokens, which a gate hides that is 0 at first."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return super().forward(x) + self.gate * (x.mean(0) > 0).any() * len(x)


def test_a_head_is_tried_with_random_weights():
    model, ids = Small(shift), torch.randint(0, 50, (2, 12))
    model.head = Gated(*reversed(model.head.weight.shape))
    revzoo.chunk_loss_(model, chunk=5)
    with pytest.raises(InputError, match="takes each token for itself. Received: head: what it returns"):
        model(ids)


HEADS = {
    "mean of dim 1": lambda head, x: head.own(x) + x.mean(1 if x.dim() == 3 else 0, keepdim=True).sum(-1, keepdim=True),
    "pairs": lambda head, x: head.own(x + x.unflatten(-2, (-1, 2)).mean(-2).repeat_interleave(2, -2)),
    "shape": lambda head, x: torch.einsum("btd,vd->btv", x, head.weight),
    "left": lambda head, x: setattr(head, "left", [x.detach()]) or head.own(x),
    "tokens": lambda head, x: setattr(head, "tokens", x.numel() // 8) or head.own(x),
    "no token": lambda head, x: head.own(x) if x.numel() else [][0],
    "size": lambda head, x: setattr(head, "size", float(x.detach().norm())) or head.own(x),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_do_not_take_each_token_for_itself_are_refused(name):
    class Head(nn.Linear):
        own = nn.Linear.forward

        def forward(self, x):
            return HEADS[name](self, x)

    model, ids = Small(shift), torch.randint(0, 50, (2, 12))
    model.head = Head(8, 50)
    revzoo.chunk_loss_(model, chunk=5)
    with pytest.raises(
        InputError, match=r"A head in chunks (takes each token for itself|is called without a token, too)\. Received: head"
    ):
        model(ids)
    if name != "no token":
        with pytest.raises(InputError, match="A head in chunks takes each token for itself. Received: it: "):
            revzoo.chunked_loss(Head(8, 50), torch.randn(2, 12, 8), ids)


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
def test_what_a_trial_may_not_touch_stays():
    """Weights of TorchScript, which cannot be put back, and what parametrize.cached() holds."""
    head = torch.jit.script(nn.Linear(8, 50))
    before = head.weight.detach().clone()
    revzoo.chunked_loss(head, torch.randn(2, 12, 8), torch.randint(0, 50, (2, 12)))
    assert torch.equal(head.weight, before)
    model, ids = Small(shift), torch.randint(0, 50, (2, 12))
    nn.utils.parametrizations.weight_norm(model.head)
    revzoo.chunk_loss_(model, chunk=1000)
    with nn.utils.parametrize.cached():
        model(ids).backward()
    assert all(p.grad is not None for p in model.head.parameters())


def test_a_head_may_set_tensors_on_itself_and_stand_in_a_checkpoint():
    model, ids = Small(shift), torch.randint(0, 50, (2, 12))
    model.head.forward = lambda x: setattr(model.head, "own", model.head.weight * 1) or F.linear(x, model.head.own)
    expected = model(ids)
    revzoo.chunk_loss_(model, chunk=5)
    for _ in range(20):
        loss = checkpoint(model, ids, use_reentrant=False)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_the_dtype_of_the_loss_is_that_of_autocast():
    model, ids = Small(lambda _, x, ids: F.cross_entropy(x.flatten(0, 1), ids.flatten())), torch.randint(0, 50, (2, 12))

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids).detach()

    expected = run()
    revzoo.chunk_loss_(model, chunk=5)
    assert run().dtype == expected.dtype == torch.float32


def test_a_tensor_in_an_attribute_that_is_written_later_is_an_error():
    model, ids = Small(lambda _, x, ids: x), torch.randint(0, 50, (2, 12))
    model.head.bound = torch.tensor(5.0)
    model.head.forward = lambda x: F.linear(x, model.head.weight, model.head.bias).clamp(max=model.head.bound)
    revzoo.chunk_loss_(model, chunk=5)
    for _ in range(3):
        logits = model(ids)
        model.head.bound.mul_(0.5)
        with pytest.raises(InputError, match="a tensor in one of its attributes, which was changed"):
            F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_values_that_were_written_by_data_are_seen_in_the_first_steps():
    model, ids = Small(lambda _, x, ids: x), torch.randint(0, 50, (2, 12))
    revzoo.chunk_loss_(model, chunk=5)
    logits = model(ids)
    model.head.weight.data.mul_(1.01)  # as an average of the weights is copied
    with pytest.raises(RecoveryError, match="head ran differently"):
        F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_the_report_says_what_is_saved():
    model, batch = make(tokens=256)
    assert str(revzoo.chunk_loss_(model)) == (
        "lm_head: its loss is computed in chunks of tokens. With batch= it is compared and counted"
    )
    revzoo.ordinary_(model)
    report = revzoo.chunk_loss_(model, batch=batch)
    assert (report.chunk, report.tokens) == (64, 512)
    logits_bytes = 4 * 512 * VOCABULARY
    assert report.ordinary_bytes - report.chunked_bytes > 2 * logits_bytes
    assert str(report).endswith("8 chunks of 64 tokens")
    revzoo.ordinary_(model)
    assert "one chunk holds all 512 tokens" in str(revzoo.chunk_loss_(model, batch=batch, chunk=1000))


def test_bytes_under_accelerates_wrapping():
    """As Trainer prepares a network: autocast, and outputs cast to float32."""
    logits_bytes, peaks = 4 * 512 * VOCABULARY, []
    for chunked in (False, True):
        torch.manual_seed(0)
        model, batch = make(tokens=256)
        if chunked:
            revzoo.chunk_loss_(model, chunk=16)
        prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
        with LiveBytes() as live:
            given = live.watch(list(model.parameters()))
            outputs = prepared(**batch)
            outputs.loss.backward()
        assert isinstance(outputs.logits, LazyLogits) is chunked
        peaks.append(live.peak(without=given))
    assert peaks[0] - peaks[1] > 2.5 * logits_bytes


@pytest.mark.filterwarnings("ignore:Everything is stored")
def test_transforms_of_torch_func_take_the_whole_logits():
    model, batch = make()
    _, *expected = differentiate(model, batch)
    revzoo.chunk_loss_(model, batch=batch, chunk=5)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, (), batch).loss)(parameters)
    for a, b in zip(gradients.values(), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_refusals():
    model, batch = make()
    with pytest.raises(UnknownNameError, match="'lm_heat'. Did you mean 'lm_head'"):
        revzoo.chunk_loss_(model, "lm_heat")
    with pytest.raises(InputError, match="Name it"):
        revzoo.chunk_loss_(nn.Linear(3, 3))
    with pytest.raises(InputError, match="Received: 0"):
        revzoo.chunk_loss_(model, chunk=0)
    with pytest.raises(InputError, match="Put labels into the batch"):
        revzoo.chunk_loss_(model, batch=batch["input_ids"])
    with pytest.raises(InputError, match="1, a BatchNorm1d"):
        revzoo.chunk_loss_(nn.ModuleDict({"head": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))}))
    model.lm_head.forward = lambda x, scale: F.linear(x, model.lm_head.weight) * scale
    revzoo.chunk_loss_(model)
    with pytest.warns(WholeLogitsWarning, match="Linear is called with more than hidden states"):
        model.lm_head(torch.randn(2, 16), 2.0)
    revzoo.ordinary_(model)
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].roll(1, 0),))  # outside of what is in chunks
    model.lm_head.forward = lambda x: F.linear(x.cumsum(0), model.lm_head.weight)
    with pytest.raises(InputError, match="takes each token for itself"):
        revzoo.chunk_loss_(model, batch=batch, chunk=5)
    assert not isinstance(model(**batch).logits, LazyLogits)
