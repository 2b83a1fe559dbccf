"""`chunk_loss_` in networks that are compiled: one graph, the loss in chunks in it, and no logits of all tokens."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import revzoo
from revzoo.analysis.flops import FlopCounterOfReplacedCalls
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls

TOKENS = torch.arange(2 * 256).reshape(2, 256) * 7 % 997
LABELS = TOKENS.masked_fill(TOKENS % 5 == 0, -100)


class Net(nn.Module):
    def __init__(self, loss, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body, self.head = nn.Embedding(997, 32), nn.Linear(32, 32), nn.Linear(32, 997, bias=bias)
        self.loss = loss

    def forward(self, ids, labels):
        return self.loss(self.head(F.gelu(self.body(self.stem(ids)))), labels)


class Tied(Net):
    def __init__(self, loss):
        super().__init__(loss, bias=False)
        self.head.weight = self.stem.weight


class Adapted(nn.Linear):
    """A head with a frozen weight and an adapter."""

    def __init__(self):
        super().__init__(32, 997)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 997, bias=False)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


class WithAdapter(Net):
    def __init__(self, loss):
        super().__init__(loss)
        self.head = Adapted()


def flat(logits, labels):
    return F.cross_entropy(logits.float().view(-1, 997), labels.view(-1))


def shifted(logits, labels):
    logits = logits[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels[..., 1:].reshape(-1).to(logits.device))


def capped(logits, labels):
    logits = torch.tanh(logits / 3) * 3
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.flatten(), reduction="sum") / 400


def scaled(logits, labels):
    return F.cross_entropy((0.5 * logits - 1).flatten(0, 1), labels.flatten())


def smoothed(logits, labels):
    return F.cross_entropy(logits.view(512, 997), labels.clamp(min=0).view(512), ignore_index=3, label_smoothing=0.1)


def of_a_module(logits, labels):
    """What the compiler does not follow: it makes a call of cross_entropy of the module that is made here."""
    return nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.1)(logits.view(512, 997), labels.clamp(min=0).view(512))


def of_each_text(logits, labels):
    return sum(F.cross_entropy(a, b) for a, b in zip(logits, labels, strict=True))


def with_entropy(logits, labels):
    return flat(logits, labels) + logits.softmax(-1).square().sum() / 512


def unusual(logits, labels):
    """Operations that are not recorded, and names of arguments."""
    logits = logits.flatten(start_dim=0, end_dim=1)
    return F.cross_entropy(logits.add(1, alpha=2) + (logits % 2) + 2**logits, labels.flatten()) / logits.size(dim=-1)


def of_classes(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels)


def train(model, call, autocast=False, labels=LABELS):
    """Return the peak and the FLOPs of a step, and loss and gradients."""
    model.zero_grad()
    with FlopCounterOfReplacedCalls() as flops, LiveBytesOfReplacedCalls() as live:
        live.watch([*model.parameters(), TOKENS, labels])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = call(TOKENS, labels)
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return live.peak(), flops.forward + flops.backward, [loss.detach(), *gradients]


def compare(model, fullgraph=True, **options):
    """Return the peaks of a step of this and the same in chunks, both compiled; they are equal but for rounding."""
    ordinary = copy.deepcopy(model)
    revzoo.chunk_loss_(model, "head", chunk=64)
    torch._dynamo.reset()
    steps = []
    for each in (ordinary, model):
        call = torch.compile(each, backend="aot_eager", fullgraph=fullgraph)
        train(each, call, **options)
        steps.append(train(each, call, **options))
    (peak, flops, expected), (chunked_peak, chunked_flops, received) = steps
    tolerance = 0.05 if options.get("autocast") else 1e-5
    for a, b in zip(received, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a.dtype == b.dtype
        assert a is None or (a - b).norm() <= tolerance * b.norm()
    return peak, chunked_peak, chunked_flops / flops


LOGITS = 4 * 512 * 997


@pytest.mark.parametrize("make", [Net, Tied, WithAdapter])
@pytest.mark.parametrize("loss", [flat, shifted, scaled, capped, smoothed])
def test_no_logits_of_all_tokens_are_in_the_graph(make, loss):
    peak, chunked_peak, more = compare(make(loss))
    assert peak > 2.9 * LOGITS
    assert chunked_peak < 0.9 * LOGITS
    assert more <= 1


def test_autocast_in_half_precision():
    peak, chunked_peak, _ = compare(Net(flat), autocast=True)
    assert chunked_peak < 0.4 * peak


@pytest.mark.parametrize("loss", [of_each_text, with_entropy, of_classes, unusual])
def test_whatever_else_is_done_with_logits_gets_all_of_them(loss):
    compare(Net(loss))


def test_a_loss_that_the_compiler_does_not_follow_is_in_chunks_after_a_break():
    peak, chunked_peak, _ = compare(Net(of_a_module), fullgraph=False)
    assert chunked_peak < 0.5 * peak


def test_a_batch_without_labels_has_no_loss():
    model = Net(flat)
    revzoo.chunk_loss_(model, "head")
    torch._dynamo.reset()
    labels = torch.full_like(LABELS, -100)
    _, _, (loss, *gradients) = train(model, torch.compile(model, backend="aot_eager", fullgraph=True), labels=labels)
    assert loss.isnan()
    assert all(not each.any() for each in gradients)  # as without chunks


def test_logits_that_are_returned_are_there_in_eval_mode():
    model = Net(lambda logits, labels: (flat(logits, labels), logits))
    ordinary = copy.deepcopy(model)(TOKENS, LABELS)[1]
    revzoo.chunk_loss_(model, "head")
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    _, logits = call(TOKENS, LABELS)
    assert logits.shape == ordinary.shape
    for ask in (
        lambda: logits.argmax(-1),
        lambda: torch.softmax(logits, -1),
        lambda: torch.cat([logits, logits]),
        lambda: flat(logits, LABELS),
    ):
        with pytest.raises(revzoo.errors.InputError, match="in eval mode, or undo chunk_loss_"):
            ask()  # weights may have changed since
    model.eval()
    assert torch.allclose(call(TOKENS, LABELS)[1], ordinary, atol=1e-6)  # ordinary ones


def test_a_plan_for_a_network_with_its_loss_in_chunks_is_kept_when_it_is_compiled():
    model = Net(flat)
    revzoo.chunk_loss_(model, "head", chunk=64)
    plan = revzoo.plan(model, (TOKENS, LABELS), "1TiB", loss=lambda loss: loss)
    torch._dynamo.reset()
    _, _, expected = train(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    plan = revzoo.plan(model, (TOKENS, LABELS), int(0.95 * plan.peak_bytes), loss=lambda loss: loss)
    plan.apply(model)
    planned_peak, _, received = train(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    assert planned_peak <= plan.budget_bytes
    assert all(map(torch.equal, received, expected))


def listed(logits, labels):
    return flat(torch.cat([logits[:1], logits[1:]]), labels)


def named(logits, labels):
    return F.cross_entropy(input=logits.view(512, -1), target=labels.view(512))


def scaled_in_place(logits, labels):
    return flat(logits.mul_(0.5), labels)


def replaced(logits, labels):
    logits[:, :, 3] = -10
    return flat(logits, labels)


def capped_in_place(logits, labels):
    torch.clamp_(logits, -0.1, 0.1)
    return flat(logits, labels)


def of_an_alias(logits, labels):
    other = logits
    other *= 0.5
    return flat(logits, labels)


@pytest.mark.parametrize("loss", [scaled_in_place, replaced, capped_in_place, of_an_alias])
def test_what_changes_logits_in_place_is_refused(loss):
    model = Net(loss)
    revzoo.chunk_loss_(model, "head")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="not changed in place"):
        torch.compile(model, backend="aot_eager")(TOKENS, LABELS)


@pytest.mark.parametrize("loss", [listed, named])
def test_logits_in_lists_and_by_name(loss):
    compare(Net(loss))


@pytest.mark.parametrize("add", [nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook])
def test_hooks_of_the_head_run_once(add):
    model = Net(flat)
    add(model.head, lambda module, inputs, *outputs: 2 * (outputs or inputs)[0])
    compare(model)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_chunked_loss_of_other_heads_ends_the_graph():
    model, head = Net(None), Doubled(32, 997)
    expected = [revzoo.chunked_loss(head, model.stem(TOKENS), LABELS, chunk=64)]
    torch._dynamo.reset()
    call = torch.compile(lambda: revzoo.chunked_loss(head, model.stem(TOKENS), LABELS, chunk=64), backend="aot_eager")
    for _ in range(2):
        assert torch.allclose(call(), expected[0])


class Mixing(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(-2, keepdim=True))


def test_a_head_that_mixes_tokens_is_refused():
    model = Net(flat)
    model.head = Mixing(32, 997)
    revzoo.chunk_loss_(model, "head")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="takes each token for itself"):
        torch.compile(model, backend="aot_eager")(TOKENS, LABELS)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunked_loss_in_a_loop_of_its_own(reduction):
    def step(stem, head, chunked):
        hidden = stem(TOKENS)
        if chunked:
            return revzoo.chunked_loss(head, hidden[:, :-1], LABELS[:, 1:], reduction=reduction, chunk=64).sum()
        logits = head(hidden[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, LABELS[:, 1:].flatten(), reduction=reduction).sum()

    model = Net(None)
    gradients, peaks = [], []
    for chunked in (False, True):
        model.zero_grad()
        torch._dynamo.reset()
        with LiveBytesOfReplacedCalls() as live:
            live.watch(model.parameters())
            is_whole = not chunked or reduction != "none"
            torch.compile(step, backend="aot_eager", fullgraph=is_whole)(model.stem, model.head, chunked).backward()
        peaks.append(live.peak())
        gradients.append([model.stem.weight.grad, model.head.weight.grad, model.head.bias.grad])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*gradients, strict=True))
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (LABELS, {"reduction": "avg"}, "reduction is 'mean', 'sum' or 'none'"),
        (LABELS.T, {}, "Every token has hidden states"),
        (LABELS, {"chunk": 0}, "an integer >= 1"),
    ],
)
def test_chunked_loss_checks_what_it_is_given(labels, options, message):
    model = Net(None)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(lambda: revzoo.chunked_loss(model.head, model.stem(TOKENS), labels, **options), backend="aot_eager")()


class Borrowing(nn.Linear):
    """A head that holds a weight which is not its own."""

    def __init__(self, embedding):
        super().__init__(32, 997)
        self.others = [embedding]

    def forward(self, x):
        return super().forward(x) + F.linear(x, self.others[0].weight)


def test_a_head_with_the_weight_of_others_is_refused():
    model = Net(flat)
    model.head = Borrowing(model.stem)
    revzoo.chunk_loss_(model, "head")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="uses another tensor that needs one"):
        torch.compile(model, backend="aot_eager")(TOKENS, LABELS)
