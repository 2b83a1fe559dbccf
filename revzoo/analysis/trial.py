"""Run a model on fresh copies of itself, under what tends to show that a second run differs from the first.

Between forward and backward, random numbers are drawn from torch, Python and NumPy. Each run starts with the weights, buffers,
attributes and random streams of the model as it is, so one run cannot hide a difference from the next.
"""

import copy
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from revzoo.analysis.chains import preserve_schedules
from revzoo.analysis.dry_run import LossFunction, call, compute_loss, isolated, select_differentiable
from revzoo.runtime.compiling import is_compiled
from revzoo.runtime.forward import processes_communicate
from revzoo.runtime.mode import Mode
from revzoo.runtime.tripwire import set_tripwire

Gradients = dict[str, Tensor | None]
WatchFactory = Callable[[nn.Module], AbstractContextManager[Callable[[], object]]]


@dataclass(frozen=True)
class Outcome:
    """What one forward and backward leaves.

    Args:
        gradients: of the parameters that require one, by name; those of sparse embeddings are made dense.
        buffers: names and values, likewise.
        rng_states: states of torch's random generators.
    """

    gradients: Gradients
    buffers: list[tuple[str, Tensor]]
    rng_states: list[Tensor]


class Trial:
    """Runs of one model on one batch, each on a fresh deep copy.

    The model itself is run where a copy would not be what is trained: where processes communicate (DDP, FSDP, tensor
    parallelism), a module is compiled, a copy cannot be made (an attribute with a graph, a hook that holds a lock or a file),
    or the copy still computes with the parameters of the model (a closure in it).

    Cost: the memory of one copy at a time.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: LossFunction | None = None):
        self._model = model
        self._batch = batch
        self._loss = loss
        self._copies = not processes_communicate() and not is_compiled(model)
        self._latest = WeakSet[nn.Module]()  # modules of the latest copy, while they are alive
        self._devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}

    def run(self, mode: Mode | None = None, *, tripwire: bool = True, watch: WatchFactory | None = None) -> Outcome:
        """Run forward and backward, with the same random gradient of the loss, or of all outputs, in each run.

        Args:
            mode: of every step; None keeps the schedules.
            tripwire: whether rebuilt tensors are compared.
            watch: called with the copy; returns a context around its forward and backward, whose value is called between them.

        Raises:
            RecoveryError: something could not be recovered.
        """
        with self._open() as (model, inputs), preserve_schedules(model) as assign, set_tripwire(tripwire):
            if mode is not None:
                assign(mode)
            with nullcontext(lambda: None) if watch is None else watch(model) as end_forward:
                self._run_both_ways(model, inputs, end_forward)
            gradients = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
            outcome = Outcome(
                {name: None if gradient is None else _make_dense(gradient) for name, gradient in gradients},
                # What a closure in the model holds is not copied. It may update a buffer of the model itself.
                [(name, _make_dense(b)) for each in dict.fromkeys((self._model, model)) for name, b in each.named_buffers()],
                _get_rng_states(self._model),
            )
            is_copy = model is self._model or all(p.grad is None for p in self._model.parameters())
        if is_copy:
            return outcome
        self._copies = False
        return self.run(mode, tripwire=tripwire, watch=watch)

    @contextmanager
    def _open(self) -> Iterator[tuple[nn.Module, Any]]:
        """Yield a copy of the model and the batch. After it the model itself is as before."""
        if self._latest:
            gc.collect()  # they are part of a cycle
        with isolated(self._model, self._batch) as inputs:
            yield self._copy_model(), inputs

    def _copy_model(self) -> nn.Module:
        if not self._copies:
            return self._model
        try:
            copied = copy.deepcopy(self._model)
        except Exception:  # whatever the attributes of the modules raise
            self._copies = False
            return self._model
        self._latest.update(copied.modules())
        return copied

    def _run_both_ways(self, model: nn.Module, inputs: Any, end_forward: Callable[[], object]) -> None:
        outputs = call(model, inputs)
        outputs = select_differentiable(outputs) if self._loss is None else [compute_loss(self._loss, outputs)]
        end_forward()
        self._draw()
        rng = torch.Generator().manual_seed(0)  # a constant gradient would vanish in a norm before the output
        torch.autograd.backward(outputs, [torch.randn(y.shape, generator=rng).to(y) for y in outputs])

    def _draw(self) -> None:
        """Move every random stream on, as data loading and other models do in training."""
        for device in (torch.device("cpu"), *self._devices):
            torch.rand(1, device=device)
        random.random()
        if numpy := sys.modules.get("numpy"):
            numpy.random.random()


def _make_dense(t: Tensor) -> Tensor:
    return t if t.layout is torch.strided else t.to_dense()


def _get_rng_states(model: nn.Module) -> list[Tensor]:
    gpus = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]
