"""An attention as a sum over groups of its heads, which run one after the other.

    attention(x) = sum over heads h of  softmax(q_h k_h^T / sqrt(d)) v_h o_h

The module's own code runs, with views in the place of its projections' parameters: it has to find the number of heads in
shapes, as that of Transformers does. A head has rows of q, k and v and columns of o, also of what adapters add to them.

Cost: products as of all heads at once. What a block does before its attention runs once for each group, and each group's
gradient of a weight is a tensor of the size of all of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from revzoo.device import is_sharded

_MOST_GROUPS = 4  # each normalizes all tokens again, and more groups save little: what a group keeps is small by then
_INPUTS, _OUTPUTS = ("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")


@dataclass(frozen=True)
class HeadGroup:
    """Heads of an attention that are next to one another, with the keys and values that they share.

    Args:
        index: of the group.
        count: the number of groups, all of one size.
    """

    index: int
    count: int

    def of(self, x: Tensor, dim: int) -> Tensor:
        """Return what belongs to its heads along a dimension, as a view."""
        size = x.shape[dim] // self.count
        return x.narrow(dim, self.index * size, size)


def count_groups(attention: nn.Module) -> int:
    """Return into how many groups the heads can be put: a divisor of the number of keys' heads, 1 where that is not known."""
    width, rows = getattr(attention, "head_dim", None), getattr(find_projections(attention)[1], "out_features", None)
    heads = rows // width if isinstance(width, int) and isinstance(rows, int) else 1
    return max(n for n in range(1, _MOST_GROUPS + 1) if heads % n == 0)


def can_be_cut(attention: nn.Module) -> bool:
    """Return whether it is known which parameters belong to which heads, and no hook sees the sum."""
    output = find_projections(attention)[-1]
    if output is None or attention._forward_hooks or output._forward_hooks:
        return False
    try:
        _cut(attention, HeadGroup(1, 2))
    except LookupError:
        return False
    return True


@contextmanager
def only_heads(attention: nn.Module, group: HeadGroup | None) -> Iterator[None]:
    """Give an attention the parameters of a group of heads alone, if there is a group."""
    views = [] if group is None else _cut(attention, group)
    own = [(module, module._parameters) for module, _ in views]
    for module, view in views:
        module._parameters = cast(dict[str, Any], view)
    try:
        yield
    finally:
        for module, parameters in own:
            module._parameters = parameters


def find_projections(attention: nn.Module) -> list[nn.Module | None]:
    """Return the projections of queries, keys and values, and that of the output."""
    output = next((name for name in _OUTPUTS if name in attention._modules), "")
    return [attention._modules.get(name) for name in (*_INPUTS, output)]


def _cut(attention: nn.Module, group: HeadGroup) -> list[tuple[nn.Module, dict[str, Tensor | None]]]:
    """Return what each module of the projections has in place of its parameters.

    Raises:
        LookupError: a projection is missing, or it is not known what of a parameter belongs to which heads.
    """
    views = list[tuple[nn.Module, dict[str, Tensor | None]]]()
    for projection, cut in zip(find_projections(attention), (*[_cut_rows] * len(_INPUTS), _cut_columns), strict=True):
        shape = getattr(projection, "out_features", 0), getattr(projection, "in_features", 0)
        own = [] if projection is None else list(projection.parameters())
        # Quantized weights have other shapes or are integers; of two of this shape, one is an adapter's.
        if sum(p.shape == shape for p in own) != 1 or is_sharded(*own) or not all(p.is_floating_point() for p in own):
            raise LookupError
        for module in cast(nn.Module, projection).modules():
            cuts = {name: p if p is None else cut(name, p, shape, group) for name, p in module._parameters.items()}
            views.append((module, cuts))
    return views


def _cut_rows(name: str, p: Tensor, shape: tuple[int, int], group: HeadGroup) -> Tensor:
    if name in ("weight", "bias") and p.shape[0] == shape[0]:
        return group.of(p, 0)
    if name == "weight" and p.dim() == 2 and p.shape[1] == shape[1]:  # the first one of two factors of low rank
        return p
    raise LookupError(name)


def _cut_columns(name: str, p: Tensor, shape: tuple[int, int], group: HeadGroup) -> Tensor | None:
    if name == "weight" and p.dim() == 2 and p.shape[1] == shape[1]:
        return group.of(p, 1)
    if name == "weight" and p.dim() == 2 and p.shape[0] == shape[0]:  # the second one
        return p
    if name == "bias":
        return None if group.index else p  # the sum has it once
    raise LookupError(name)
