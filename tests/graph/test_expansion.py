"""Calls that hide several, and become these: gradients stay bit for bit, and a plan may keep each part."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _capture_anew() -> None:
    torch._dynamo.reset()


class Attention(nn.Module):
    """Attention of six tokens, with what else the call is given."""

    def __init__(self, mask: Tensor | None = None, groups: int = 1, **options: Any):
        super().__init__()
        self.mask, self.groups, self.options = mask, groups, options
        self.linear = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = k[:, :: self.groups], v[:, :: self.groups]
        return F.scaled_dot_product_attention(q, k, v, self.mask, **self.options).tanh()


def name_attention(capture: Callable[..., Any], module: nn.Module, x: Tensor) -> list[str]:
    """Return the functions that a captured module calls for attention."""
    captured = capture(module)
    captured(x)
    (program,) = captured.programs
    names = [getattr(node.target, "__name__", str(node.target)) for atom in program.spans.atoms for node in atom.nodes]
    assert names[-1] == "tanh"
    return names[max(i for i, name in enumerate(names) if name in ("unbind", "getitem")) + 1 : -1]


PRODUCT = ["multiply", "transpose", "multiply", "matmul"]
REST = ["_safe_softmax", "dropout", "matmul"]
BAND = torch.ones(6, 6).tril(1).triu(-1)
EXPANDED = {
    "no mask": (lambda: Attention(dropout_p=0.2, scale=0.3), [*PRODUCT, *REST]),
    "mask that is added": (lambda: Attention(BAND, dropout_p=0.2), [*PRODUCT, "add", *REST]),
    "mask of truth values": (lambda: Attention(BAND.bool(), dropout_p=0.2), ["convert_mask", *PRODUCT, "add", *REST]),
    "causal": (lambda: Attention(dropout_p=0.2, is_causal=True), ["multiply", "make_causal_mask", *PRODUCT[1:], "add", *REST]),
    "fused, mask and groups of queries": (
        lambda: Attention(BAND.bool(), groups=2, enable_gqa=True, scale=0.3),
        ["convert_mask", "scaled_dot_product_attention"],
    ),
    "learned mask": (lambda: Attention(nn.Parameter(BAND.clone())), [*PRODUCT, "add", "_safe_softmax", "matmul"]),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_attention_becomes_its_parts_bit_for_bit(name: str, capture: Callable[..., Any], check: Callable[..., None]):
    make, parts = EXPANDED[name]
    assert name_attention(capture, make(), torch.randn(2, 6, 8)) == parts
    torch._dynamo.reset()
    check(make(), [torch.randn(2, 6, 8, requires_grad=True)])


WHOLE = {
    "fused kernel": lambda: Attention(),
    "half precision": lambda: Attention(dropout_p=0.2).bfloat16(),
    "negative scale": lambda: Attention(dropout_p=0.2, scale=-0.3),
    "no gradient": lambda: Attention(dropout_p=0.2).requires_grad_(False),
    "groups of queries": lambda: Attention(dropout_p=0.2, groups=2, enable_gqa=True),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_calls_other_operations_stays_one_call(name: str, capture: Callable[..., Any]):
    module = WHOLE[name]()
    x = torch.randn(2, 6, 8, dtype=module.linear.weight.dtype)
    assert name_attention(capture, module, x) == ["scaled_dot_product_attention"]


def test_attention_under_autocast_stays_one_call(capture: Callable[..., Any]):
    with torch.autocast("cpu", torch.bfloat16):
        assert name_attention(capture, Attention(dropout_p=0.2), torch.randn(2, 6, 8)) == ["scaled_dot_product_attention"]
