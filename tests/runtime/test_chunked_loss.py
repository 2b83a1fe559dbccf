"""A loss over chunks of tokens: equal to the ordinary one, with fewer bytes and no more FLOPs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import revzoo
from revzoo.errors import InputError
from revzoo.runtime import LiveBytes

WIDTH, VOCABULARY = 16, 101


class Capped(nn.Module):
    """A transform, a decoder tied to a table outside, a scale and a soft cap."""

    def __init__(self, table):
        super().__init__()
        self.dense, self.table, self.bias = nn.Linear(WIDTH, WIDTH), [table], nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, x):
        return 5 * torch.tanh(F.linear(F.gelu(self.dense(x)), self.table[0], self.bias) / 5)


def make(dtype=torch.float64, head=None, ignored=0.3, tokens=(3, 40)):
    hidden = torch.randn(*tokens, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, tokens)
    labels[torch.rand(tokens) < ignored] = -100
    return (head or nn.Linear(WIDTH, VOCABULARY)).to(dtype), hidden, labels


def differentiate(loss, *tensors, weight=1.0):
    for tensor in tensors:
        tensor.grad = None
    value = loss()
    (value * weight).sum().backward()
    return [value.detach(), *(tensor.grad for tensor in tensors)]


def ordinary(head, hidden, labels, **options):
    return F.cross_entropy(head(hidden).flatten(0, -2), labels.flatten(), **options)


def assert_close(received, expected, tolerance):
    for a, b in zip(received, expected, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradients_are_those_of_the_whole(reduction, dtype):
    """With a head whose weight stands elsewhere, and an incoming gradient that is not one."""
    table = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=dtype))
    head, hidden, labels = make(dtype, Capped(table))
    options = {"reduction": reduction, "label_smoothing": 0.1}
    leaves = [hidden, table, *head.parameters()]
    weight = torch.rand(labels.shape) if reduction == "none" else 0.3

    def whole():
        losses = ordinary(head, hidden, labels, **options)
        return losses.view(labels.shape) if reduction == "none" else losses

    expected = differentiate(whole, *leaves, weight=weight)
    received = differentiate(lambda: revzoo.chunked_loss(head, hidden, labels, chunk=7, **options), *leaves, weight=weight)
    assert_close(received, expected, 1e-12 if dtype == torch.float64 else 2e-5)


def test_a_loss_of_ones_own_and_z_loss():
    head, hidden, labels = make(ignored=0)

    def squared(logits, labels):
        return F.cross_entropy(logits, labels, reduction="none") + 0.1 * logits.logsumexp(-1).square()

    expected = differentiate(lambda: squared(head(hidden).flatten(0, 1), labels.flatten()).mean(), hidden, head.weight)
    for options in ({"loss": squared}, {"z_loss": 0.1}):
        received = differentiate(lambda: revzoo.chunked_loss(head, hidden, labels, chunk=50, **options), hidden, head.weight)  # noqa: B023
        assert_close(received, expected, 1e-12)


@pytest.mark.parametrize(("tokens", "ignored"), [((1, 1), 0), ((2, 5), 0), ((2, 5), 1)], ids=["one", "few", "all_ignored"])
@pytest.mark.parametrize("frozen", [None, "head", "hidden", "both"])
def test_few_tokens_none_that_count_and_frozen_parts(tokens, ignored, frozen):
    head, hidden, labels = make(tokens=tokens, ignored=ignored)
    head.requires_grad_(frozen not in ("head", "both"))
    hidden.requires_grad_(frozen not in ("hidden", "both"))
    if frozen == "both":
        assert not revzoo.chunked_loss(head, hidden, labels).requires_grad
        return
    leaves = hidden, head.weight, head.bias
    expected = differentiate(lambda: ordinary(head, hidden, labels), *leaves)
    assert_close(differentiate(lambda: revzoo.chunked_loss(head, hidden, labels), *leaves), expected, 1e-12)


def test_flops_and_calls_are_those_of_the_tokens_that_count():
    head, hidden, labels = make()
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    count = int((labels != -100).sum())
    revzoo.chunked_loss(head, hidden, labels)  # it is tried
    calls.clear()
    with FlopCounterMode(display=False) as flops:
        revzoo.chunked_loss(head, hidden, labels, chunk=7).backward()
    assert flops.get_total_flops() == 3 * 2 * count * WIDTH * VOCABULARY
    assert len(calls) == math.ceil(count / 7)


def test_the_logits_never_exist_and_gradients_are_not_copied():
    head, hidden, labels = make(torch.float32, nn.Linear(WIDTH, 8192, bias=False), ignored=0, tokens=(1, 256))
    head_bytes, hidden_bytes, logits_bytes = 4 * 8192 * WIDTH, 4 * 256 * WIDTH, 4 * 256 * 8192
    with LiveBytes() as live:
        given = live.watch([hidden, head.weight, labels])
        loss = revzoo.chunked_loss(head, hidden, labels, chunk=8)
        assert live.alive(without=given) < head_bytes + hidden_bytes + 64
        assert live.peak(without=given) < 2 * head_bytes + hidden_bytes + 3.2 * logits_bytes / 32  # of 32 chunks
        now = live.now()
        loss.backward()
    assert live.peak(without=given, since=now) < head_bytes + hidden_bytes + 128


def test_the_chunk_fits_its_bytes_once_the_width_is_known(monkeypatch):
    monkeypatch.setattr("revzoo.runtime.chunk_size.CHUNK_BYTES", 8 * VOCABULARY * 10)
    head, hidden, labels = make(ignored=0, tokens=(1, 35))
    sizes = []

    def call(x):
        sizes.append(len(x))
        return head(x)

    for given, expected in ((head.forward, [1, 10, 10, 10, 4]), (head, [10, 10, 10, 5])):
        handle = head.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        for _ in range(2):  # it is tried in the first
            sizes.clear()
            revzoo.chunked_loss(given if given is head else call, hidden, labels)
        handle.remove()
        assert (sizes if given is head else sizes[::2]) == expected


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_half_precision_rounds_no_more_than_the_ordinary_loss(reduction):
    """Of sums over many chunks, which would lose most in half precision; the scale is no power of two."""
    head, hidden, labels = make(tokens=(4, 500), ignored=0.1)
    scale, leaves = 1 / 7, (hidden, head.weight, head.bias)
    head.bfloat16().double()
    with torch.no_grad():
        hidden.copy_(hidden.bfloat16())
    exact = differentiate(lambda: ordinary(head, hidden, labels, reduction=reduction), *leaves, weight=scale)
    head.bfloat16()
    hidden = hidden.detach().bfloat16().requires_grad_()
    leaves = hidden, head.weight, head.bias

    def measure(loss):
        values = differentiate(loss, *leaves, weight=scale)
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(values, exact, strict=True)]

    whole = measure(lambda: F.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten(), reduction=reduction))
    chunks = measure(lambda: revzoo.chunked_loss(head, hidden, labels, reduction=reduction, chunk=8))
    # Hidden states have a rounding more. Sums in bfloat16 of 225 chunks would be off by six times as much.
    assert max(a / b for a, b in zip(chunks, whole, strict=True)) < 1.3


def test_autocast_in_float16_keeps_small_gradients_without_a_scale():
    """GradScaler multiplies the loss when the gradients of its chunks are there already."""
    head, hidden, labels = make(torch.float32, tokens=(8, 512), ignored=0)
    expected = differentiate(lambda: ordinary(head, hidden, labels), hidden, head.weight)

    def scaled():
        with torch.autocast("cpu", torch.float16):
            return revzoo.chunked_loss(head, hidden, labels, chunk=64)

    received = differentiate(scaled, hidden, head.weight, weight=2.0**16)
    for a, b in zip(received[1:], expected[1:], strict=True):
        assert (a / 2**16 - b).norm() < 2e-3 * b.norm()


def test_gradients_accumulate_run_again_and_meet_hooks_once():
    head, hidden, labels = make()
    seen = []
    head.weight.register_hook(lambda gradient: seen.append(1) or 2 * gradient)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):  # as offloading does
        loss = revzoo.chunked_loss(head, hidden, labels, chunk=7)
    expected = torch.autograd.grad(ordinary(head, hidden, labels), head.bias)[0]
    loss.backward(retain_graph=True)
    weight, seen[:] = head.weight.grad.clone(), []
    loss.backward()
    assert len(seen) == 1
    torch.testing.assert_close(head.weight.grad, 2 * weight)
    torch.testing.assert_close(head.bias.grad, 2 * expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler, between two graphs
def test_counted_without_values_and_called_from_compiled_code():
    with FakeTensorMode():
        head, hidden = nn.Linear(WIDTH, VOCABULARY), torch.randn(3, 40, WIDTH, requires_grad=True)
        revzoo.chunked_loss(head, hidden, torch.zeros(3, 40, dtype=torch.long)).backward()
        assert head.weight.grad.shape == head.weight.shape
    head, hidden, labels = make()
    compiled = torch.compile(lambda h: 2 * revzoo.chunked_loss(head, 2 * h, labels, chunk=7), backend="eager")
    expected = differentiate(lambda: 2 * ordinary(head, 2 * hidden, labels), hidden, head.weight)
    assert_close(differentiate(lambda: compiled(hidden), hidden, head.weight), expected, 1e-12)


def test_llama_8b_at_32k_tokens_takes_a_chunk_and_a_gradient():
    """Counted: 47 GiB of the ordinary loss, of which formulas count 10 bytes for each logit, become 0.6."""
    tokens, width, vocabulary = 32768, 4096, 128256
    peaks = []
    for compute in (revzoo.chunked_loss, lambda head, x, y: F.cross_entropy(head(x).float(), y)):
        with FakeTensorMode(), LiveBytes() as live:
            head = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            hidden = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
            labels = torch.zeros(tokens, dtype=torch.long)
            given = live.watch([head.weight, hidden, labels])
            compute(head, hidden, labels).backward()
        peaks.append(live.peak(without=given))
    assert peaks[0] < 2 * tokens * width + 1.6 * 256 * 2**20
    assert peaks[1] > 10 * tokens * vocabulary


def test_refusals():
    head, hidden, labels = make()
    with pytest.raises(InputError, match=r"Received: \(3, 40, 16\) and \(3, 39\). Shift both"):
        revzoo.chunked_loss(head, hidden, labels[:, 1:])
    with pytest.raises(InputError, match="reduction='none'"):
        revzoo.chunked_loss(head, hidden, labels, loss=F.cross_entropy)
    with pytest.raises(InputError, match="chunk is a number of tokens.*Received: 0"):
        revzoo.chunked_loss(head, hidden, labels, chunk=0)
    with pytest.raises(InputError, match="0, a BatchNorm1d"):
        revzoo.chunked_loss(nn.Sequential(nn.BatchNorm1d(WIDTH), head), hidden, labels)
    with pytest.raises(InputError, match="create_graph=True"):
        torch.autograd.grad(revzoo.chunked_loss(head, hidden, labels), hidden, create_graph=True)


def test_what_is_computed_outside_of_the_head_has_its_gradient_once_or_none():
    """Each chunk would differentiate it."""
    _, hidden, labels = make()
    table = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)

    def differentiate_(loss):
        table.grad = hidden.grad = None
        scaled = table.tanh()
        loss(lambda x: x @ scaled.T).backward()
        return table.grad, hidden.grad

    with pytest.raises(InputError, match="computed outside"):
        differentiate_(lambda head: revzoo.chunked_loss(head, hidden, labels, chunk=40))
    received = differentiate_(lambda head: revzoo.chunked_loss(head, hidden, labels, chunk=40, reduction="none").sum())
    expected = differentiate_(lambda head: ordinary(head, hidden, labels, reduction="sum"))
    for a, b in zip(received, expected, strict=True):
        torch.testing.assert_close(a, b)
    rows = hidden.detach().flatten(0, 1).requires_grad_()
    with pytest.raises(InputError, match="computed outside"):
        revzoo.chunked_loss(lambda x: x @ rows.T, rows, torch.arange(len(rows)))


def test_another_label_than_the_ignored_one_is_out_of_range():
    head, hidden, labels = make(ignored=0)
    labels = labels.clone()
    labels[0, 0] = -100
    with pytest.raises(IndexError, match="-100 is out of bounds"):
        revzoo.chunked_loss(head, hidden, labels, ignore_index=3)
