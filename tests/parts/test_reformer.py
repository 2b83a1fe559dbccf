"""Hashed and full attention with shared queries and keys, chunks, and the Reformer made of them."""

import pytest
import torch

import revzoo
from revzoo.parts.branches.reformer import LSHAttention, SharedQKAttention
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.heads.text import TokenLinear

TOKENS = BuildContext(Shape(16, (32,), "tokens"), 16)
IMAGE = BuildContext(Shape(8, (6, 4), "image"), 8)


def hashed(dtype: torch.dtype = torch.float32, **arguments) -> LSHAttention:
    return LSHAttention(TOKENS, **{"heads": 2, "bucket": 4, "hashes": 3} | arguments).to(dtype)


def some_absent(N: int) -> torch.Tensor:
    mask = torch.rand(2, N) > 0.3
    mask[:, N // 2] = True
    return mask


def dense(branch, x, rotations, mask=None):
    """Attend token by token in plain Python: chunks from ranks, a softmax for each round, rounds weighted by log-sum-exp."""
    (B, N, D), M, K = x.shape, branch.heads, min(branch.bucket, x.shape[1])
    normed = branch.norm(x)
    qk, v = (to(normed).view(B, N, M, D // M) for to in (branch.to_qk, branch.to_v))
    out = torch.zeros_like(v)
    for b in range(B):
        present = [n for n in range(N) if mask is None or mask[b, n]]
        for m in range(M):
            q = qk[b, :, m]
            dots = q @ (q / q.norm(dim=1, keepdim=True)).T / (D // M) ** 0.5
            rounds = []
            for r in range(rotations.shape[1]):
                rotated = q @ rotations[:, r]
                bucket = torch.cat((rotated, -rotated), 1).argmax(1).tolist()
                rank = {n: i // K for i, n in enumerate(sorted(present, key=lambda n: (bucket[n], n)))}
                logits = torch.full((N, N), -torch.inf, dtype=x.dtype)
                for i in present:
                    met = [j for j in present if rank[i] - rank[j] in (0, 1) and j != i and (j < i or not branch.causal)]
                    logits[i, met or [i]] = dots[i, met] if met else -1e4
                rounds.append(logits)
            logits = torch.stack(rounds)
            share = logits.logsumexp(-1, keepdim=True).softmax(0)
            out[b, :, m] = (logits.softmax(-1) @ v[b, :, m] * share).sum(0)
    return branch.to_out(out.flatten(2))


@pytest.mark.parametrize("N", [32, 27, 3], ids="{} tokens".format)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_hashed_attention_equals_masked_dense_attention(causal, masked, N):
    f = hashed(causal=causal).eval()
    x, mask = torch.randn(2, N, 16), some_absent(N) if masked else None
    y, expected = f(x, mask), dense(f, x, f.rotations, mask)
    keep = slice(None) if mask is None else mask
    torch.testing.assert_close(y[keep], expected[keep], rtol=0, atol=1e-6)
    assert y.isfinite().all()


def test_the_gradient_equals_that_of_dense_attention():
    f = hashed(torch.float64).eval()
    x = torch.randn(2, 27, 16, dtype=torch.float64, requires_grad=True)
    wanted = [x, *f.parameters()]
    weight = torch.randn(2, 27, 16, dtype=torch.float64)
    gradients, expected = (torch.autograd.grad((y * weight).sum(), wanted) for y in (f(x), dense(f, x, f.rotations)))
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_training_draws_rotations_and_evaluation_does_not():
    f = hashed()
    x = torch.randn(2, 32, 16)
    torch.manual_seed(3)
    drawn = torch.randn(8, 3, 4)
    torch.manual_seed(3)
    torch.testing.assert_close(f(x), dense(f, x, drawn), rtol=0, atol=1e-6)
    before = torch.get_rng_state()
    assert torch.equal(f.eval()(x), hashed_like(f)(x))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(f(x), f.train()(x))


def hashed_like(f: LSHAttention) -> LSHAttention:
    state = torch.get_rng_state()
    twin = hashed().eval()
    torch.set_rng_state(state)
    twin.load_state_dict(f.state_dict())
    return twin


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_one_chunk_of_all_tokens_is_full_attention(causal, masked):
    f, full = hashed(bucket=32, causal=causal).eval(), SharedQKAttention(TOKENS, heads=2, causal=causal).eval()
    full.load_state_dict(f.state_dict())
    for N in (32, 5):
        x, mask = torch.randn(2, N, 16), some_absent(N) if masked else None
        keep = slice(None) if mask is None else mask
        torch.testing.assert_close(f(x, mask)[keep], full(x, mask)[keep], rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [hashed, lambda: SharedQKAttention(TOKENS, heads=2)])
def test_what_is_masked_changes_nothing(make):
    f = make().eval()
    x, mask = torch.randn(2, 32, 16), torch.ones(2, 32, dtype=torch.bool)
    mask[1, 13:] = False
    torch.testing.assert_close(f(x, mask)[1, :13], f(x[1:, :13])[0], rtol=0, atol=1e-6)
    mask[1] = mask[1].flip(0)  # in front
    torch.testing.assert_close(f(x, mask)[1, 19:], f(x[1:, 19:])[0], rtol=0, atol=1e-6)


def test_a_causal_token_takes_nothing_from_later_ones():
    full, f = SharedQKAttention(TOKENS, heads=2).eval(), hashed(bucket=32).eval()
    x = torch.randn(1, 32, 16)
    later = torch.cat((x[:, :20], torch.randn(1, 12, 16)), 1)
    for exactly in (full, f):  # one chunk has no borders that could move
        torch.testing.assert_close(exactly(x)[:, :20], exactly(later)[:, :20], rtol=0, atol=1e-6)
        assert not torch.allclose(exactly(x)[:, 20:], exactly(later)[:, 20:], atol=1e-2)
    # Later tokens move the borders of chunks, so outputs change; only the gradient to later tokens is 0.
    chunked = hashed().eval()
    assert not torch.allclose(chunked(x)[:, :20], chunked(later)[:, :20], atol=1e-3)
    jacobian = torch.autograd.functional.jacobian(lambda x: chunked(x)[0].sum(1), x)[:, 0].abs().sum(-1)  # (N, N)
    assert (jacobian.triu(1) == 0).all()
    assert (jacobian.tril(-1) > 0).sum() > 100


def test_dropout_drops_attention_weights():
    x = torch.randn(2, 32, 16)
    for f in (hashed(dropout=0.5), SharedQKAttention(TOKENS, heads=2, dropout=0.5)):
        torch.manual_seed(1)
        first = f(x)
        assert not torch.equal(first, f(x))
        torch.manual_seed(1)
        assert torch.equal(first, f(x))
    # The only token has one weight: kept, and then doubled, or dropped; with it goes the value, and the bias is left.
    f = SharedQKAttention(TOKENS, heads=1, dropout=0.5)
    hash_one = hashed(heads=1, dropout=0.5, hashes=1)
    hash_one.load_state_dict(f.state_dict())
    one = torch.randn(1, 1, 16)
    twice = f.to_out(2 * f.to_v(f.norm(one)))
    for branch in (f, hash_one):
        drawn = [branch(one) for _ in range(20)]
        kept = [torch.allclose(y, twice, atol=1e-6) for y in drawn]
        assert 3 < sum(kept) < 17
        assert all(torch.equal(y[0, 0], f.to_out.bias) for y, was in zip(drawn, kept, strict=True) if not was)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    f = hashed(bucket=32).eval()  # one chunk: hashing in half precision changes nothing
    x, mask = torch.randn(2, 32, 16), some_absent(32)
    expected = f(x, mask)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(f(x, mask)[mask].float(), expected[mask], rtol=0.05, atol=0.05)
    y = f.to(dtype)(x.to(dtype), mask)
    assert y.dtype == dtype
    assert y.isfinite().all()
    torch.testing.assert_close(y[mask].float(), expected[mask], rtol=0.05, atol=0.05)


def test_token_linear_is_the_formula():
    head = TokenLinear(TOKENS, outputs=5)
    x = torch.randn(2, 7, 16)
    normed = torch.nn.functional.layer_norm(x, (16,), head.norm.weight, head.norm.bias, 1e-6)
    torch.testing.assert_close(head(x), normed @ head.linear.weight.T + head.linear.bias)
    plain = TokenLinear(TOKENS, outputs=5, norm="none").double()
    torch.testing.assert_close(plain(x.double()), plain.linear(x.double()))
    plain.reset(3)
    assert (plain.outputs, plain.linear.weight.dtype) == (3, torch.float64)


def test_rotations_and_dropout_are_replayed_under_a_mask():
    model = revzoo.create("reformer_mini", dtype=torch.float64, overrides=["stages.0.depth=2"])
    ids, mask = model.example_input(2)[:, :40], some_absent(40)  # three chunks, the last one not full
    gradients = []
    for mode in ("store", "invert", "recompute", "selective"):
        model.schedule = mode
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(model(ids, mask).square().sum(), list(model.parameters())))
    assert all(g.norm() > 0 for g in gradients[0])
    for others in gradients[1:]:
        assert all((other - g).norm() <= 1e-10 * g.norm() for other, g in zip(others, gradients[0], strict=True))
