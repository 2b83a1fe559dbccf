"""A network made by one method, and how what it does is compared with plain autograd on the same weights and inputs."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from comparison.method import METHODS, Method
from comparison.net import Net, Pair

BLOCKS = 3
Change = Callable[[list[nn.Module]], list[nn.Module]]


class Trial:
    """A network made by one method, and its inputs; the weights and inputs are those of every other trial.

    Args:
        method: makes the network.
        net: what it is made of.
        dtype: of weights and streams.
        dropout: rate at the end of every F and G.
        change: function of the steps that returns those to use.
    """

    def __init__(
        self,
        method: Method,
        net: Net,
        dtype: torch.dtype = torch.float64,
        dropout: float = 0.0,
        change: Change = lambda steps: steps,
    ):
        self.method, self.net, self.dtype = method, net, dtype
        self.steps = change(net.make_steps(BLOCKS, dropout))
        self.module = method.make(self.steps, net).to(dtype)
        self.inputs = self.make_inputs()

    def make_inputs(self, seed: int = 1) -> tuple[Tensor, ...]:
        """Return inputs in the form that the method takes."""
        return self.method.join(self.net, self.net.make_pair(seed, self.dtype))

    def __call__(self, inputs: Sequence[Tensor] | None = None) -> Pair:
        return self.method.split(self.net, self.module(*(self.inputs if inputs is None else inputs)))

    def loss(self, pair: Pair, seed: int = 11) -> Tensor:
        """Return a weighted sum of the outputs."""
        w1, w2 = self.net.make_pair(seed, self.dtype)
        return (pair[0] * w1).sum() + (pair[1] * w2).sum()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the order of the steps, each once."""
        return list(dict.fromkeys(p for step in self.steps for p in step.parameters()))

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the parameters."""
        return [p.grad for p in self.parameters()]

    def step(self) -> list[Tensor | None]:
        """Run a forward and backward; return the gradients."""
        self.loss(self()).backward()
        return self.gradients()


Scenario = Callable[[Trial], Iterable[Tensor | None]]
Verdict = Callable[[Method, Net], str]


@dataclass(frozen=True)
class Check:
    """One row of the matrix.

    Args:
        name: what is done.
        judge: function of method and net; returns what is wrong, or nothing. What it raises is wrong, too.
        is_slow: whether it compiles.
    """

    name: str
    judge: Verdict
    is_slow: bool = False

    def run(self, method: Method, net: Net) -> str:
        """Return what is wrong, in one line, or nothing."""
        if self.is_slow or method.make_timed is not None:
            torch._dynamo.reset()  # every network is new to the compiler
        try:
            with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return self.judge(method, net)
        except Exception as error:
            return describe_error(error)


def like_plain(scenario: Scenario, limit: float = 1e-9, **options: Any) -> Verdict:
    """Return a judge that runs a scenario by the method and with everything stored, with one seed, and compares the results.

    Args:
        scenario: function of a `Trial` that returns tensors.
        limit: largest allowed error of all of them together, relative to their norm.
        options: of the trials.
    """

    def judge(method: Method, net: Net) -> str:
        results = []
        for each in (make_reference(method), method):
            trial = Trial(each, net, **options)
            torch.manual_seed(0)
            results.append(list(scenario(trial)))
        return compare(results[1], results[0], limit)

    return judge


def make_reference(method: Method) -> Method:
    """Return the method whose results are the right ones: plain autograd, unless the arithmetic is another."""
    return METHODS[0] if method.make_stored is None else replace(method, make=method.make_stored)


def describe_error(error: Exception) -> str:
    """Return the type and the start of the message of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def compare(results: Sequence[Tensor | None], expected: Sequence[Tensor | None], limit: float) -> str:
    """Return what is wrong with results, or nothing."""
    if not expected or [r is None for r in results] != [e is None for e in expected]:
        return f"{sum(r is not None for r in results)} results instead of {sum(e is not None for e in expected)}"
    pairs = [(r.double(), e.double()) for r, e in zip(results, expected, strict=True) if r is not None and e is not None]
    norm = sum(float(e.square().sum()) for _, e in pairs) ** 0.5
    error = sum(float((r - e).square().sum()) for r, e in pairs) ** 0.5 / norm
    return "" if error <= limit else f"relative error {error:.1e}"
