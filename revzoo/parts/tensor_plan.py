"""How several processes can divide the products of a part among them, by heads or by hidden channels.

A part that has such a plan names it in its attribute `tensor_plan`. Its input and its output are whole in every process;
between them, each process computes its own heads, or its own hidden channels, of all tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class TensorPlan:
    """What each process takes of a part.

    Args:
        count: number of heads or hidden channels, which the processes share equally.
        noun: which of the two.
        columns: the linear layers whose outputs are divided, by path: how many things each computes for every head, such as 3
            for queries, keys and values. Their outputs stand one after the other.
        rows: path of the linear layer whose inputs are divided. Its results are added up.
        numbers: paths of attributes that are divided by the number of processes, such as that of heads.
        parameters: paths of other parameters that are used between those layers: the dimension of the heads, or None if every
            head uses all of it.
        draws: whether random numbers are drawn between those layers in training. Each process then draws its own.
    """

    count: int
    noun: Literal["heads", "hidden channels"]
    columns: Mapping[str, int]
    rows: str
    numbers: tuple[str, ...] = ()
    parameters: Mapping[str, int | None] = field(default_factory=dict)
    draws: bool = False


def plan_hidden(first: str, second: str, layer: nn.Module) -> TensorPlan:
    """Return the plan of an MLP of two linear layers, given by path, of which `layer` is the first."""
    assert isinstance(layer, nn.Linear)
    return TensorPlan(layer.out_features, "hidden channels", {first: 1}, second)
