"""Run a model on fresh copies of itself, under what tends to show that a second run differs from the first.

Between forward and backward, random numbers are drawn from torch, Python and NumPy. Each run starts with the weights, buffers,
attributes and random streams of the model as it is, so one run cannot hide a difference from the next. A run may take its
inputs in another memory format, for which kernels add up in another order.
"""

import copy
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from revzoo.analysis.chains import preserve_schedules
from revzoo.analysis.dry_run import call, isolated, select_differentiable
from revzoo.errors import RecoveryError
from revzoo.runtime.compiling import is_compiled
from revzoo.runtime.forward import processes_communicate
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import map_tensors, tensors_in
from revzoo.runtime.tripwire import judge_arrived, send_comparisons, set_tripwire

Gradients = dict[str, Tensor | None]
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Outcome:
    """What one forward and backward leaves behind.

    Args:
        gradients: of the parameters that require one, by name.
        buffers: names and values.
        rng_states: states of torch's random generators.
    """

    gradients: Gradients
    buffers: list[tuple[str, Tensor]]
    rng_states: list[Tensor]


class Observer(Protocol):
    """What looks on while a copy runs."""

    def watch(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context around forward and backward of the copy."""

    def end_forward(self) -> None:
        """Note that forward has ended and backward begins."""


class Trial:
    """Runs of one model on one batch, each on a fresh deep copy.

    The model itself is run where a copy would not be what is trained: where processes communicate (DDP, FSDP, tensor
    parallelism), a module is compiled, a copy cannot be made (an attribute with a graph, a hook that holds a lock or a file),
    or the copy still computes with the parameters of the model (a closure in it).

    Cost: the memory of one copy at a time.
    """

    def __init__(self, model: nn.Module, batch: Any):
        self._model = model
        self._batch = batch
        self._copies = not processes_communicate() and not is_compiled(model)
        self._latest = WeakSet[nn.Module]()  # modules of the latest copy, while they are alive
        self._devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}

    def run(
        self,
        mode: Mode | None = None,
        *,
        tripwire: bool = True,
        in_other_format: bool = False,
        observer: Observer | None = None,
    ) -> Outcome:
        """Run forward and backward, with the same random gradient of the outputs in each run.

        Args:
            mode: of every step; None keeps the schedules.
            tripwire: whether rebuilt tensors are compared.
            in_other_format: whether inputs and weights have the memory format that `name_other_format` names.
            observer: looks on.

        Raises:
            RecoveryError: something could not be recovered.
        """
        with self._open(in_other_format) as (model, inputs), preserve_schedules(model) as assign, set_tripwire(tripwire):
            if mode is not None:
                assign(mode)
            with nullcontext() if observer is None else observer.watch(model):
                self._run_both_ways(model, inputs, observer)
            outcome = Outcome(
                {name: p.grad for name, p in model.named_parameters() if p.requires_grad},
                # What a closure in the model holds is not copied. It may update a buffer of the model itself.
                [*self._model.named_buffers(), *(model.named_buffers() if model is not self._model else ())],
                _get_rng_states(self._model),
            )
            is_copy = model is self._model or all(p.grad is None for p in self._model.parameters())
        if is_copy:
            return outcome
        self._copies = False
        return self.run(mode, tripwire=tripwire, in_other_format=in_other_format, observer=observer)

    def measure(self, function: Callable[[nn.Module, Any], dict[str, int]]) -> dict[str, int]:
        """Return function(copy of the model, batch); what the first call of a model leaves on it, such as caches, is there."""
        with self._open() as (model, inputs), set_tripwire(True):
            with torch.no_grad():
                call(model, inputs)
            return function(model, inputs)

    def name_other_format(self) -> str | None:
        """Return in which memory format, other than its own, the batch can be tried; None if its tensors have only one."""
        names = (self._choose_format(t) for t in tensors_in(self._batch))
        return " and ".join(dict.fromkeys(name for name in names if name is not None)) or None

    @contextmanager
    def _open(self, in_other_format: bool = False) -> Iterator[tuple[nn.Module, Any]]:
        """Yield a copy of the model and the batch. After it the model itself is as before."""
        if self._latest:
            gc.collect()  # they are part of a cycle
        with isolated(self._model, self._batch) as inputs:
            model = self._copy_model()
            yield model, self._change_format(model, inputs) if in_other_format else inputs

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

    def _run_both_ways(self, model: nn.Module, inputs: Any, observer: Observer | None) -> None:
        errors = []
        try:
            outputs = select_differentiable(call(model, inputs))
            if observer is not None:
                observer.end_forward()
            self._draw()
            rng = torch.Generator().manual_seed(0)  # a constant gradient would vanish in a norm before the output
            torch.autograd.backward(outputs, [torch.randn(y.shape, generator=rng).to(y) for y in outputs])
        except RecoveryError as error:
            errors.append(error)
        errors += self._collect_late_errors()
        if errors:
            raise errors.pop(0)

    def _draw(self) -> None:
        """Move every random stream on, as data loading and other models do in training."""
        for device in (torch.device("cpu"), *self._devices):
            torch.rand(1, device=device)
        random.random()
        if numpy := sys.modules.get("numpy"):
            numpy.random.random()

    def _collect_late_errors(self) -> Iterator[RecoveryError]:
        """Yield what the tripwire finds once the devices have computed everything."""
        send_comparisons()
        for device in self._devices:
            torch.accelerator.synchronize(device)
        while True:
            try:
                judge_arrived()
            except RecoveryError as error:
                yield error
            else:
                return

    def _choose_format(self, t: Tensor) -> str | None:
        if type(t) is not Tensor or t.layout is not torch.strided or not t.is_floating_point() or 0 in t.stride():
            return None
        if not t.is_contiguous():
            return "contiguous"
        if t.dim() in _CHANNELS_LAST and any(isinstance(m, _ConvNd) for m in self._model.modules()):
            return "channels-last"
        return "transposed" if len(_long_dims(t)) > 1 else None

    def _change_format(self, model: nn.Module, inputs: Any) -> Any:
        """Return the inputs in another memory format; give it to the weights of a copy if it is one of images."""
        names = set()

        def convert(t: Tensor) -> Tensor:
            if (name := self._choose_format(t)) is None:
                return t
            if t.dim() in _CHANNELS_LAST:
                names.add(name)
            return _change_strides(t.detach(), name).requires_grad_(t.requires_grad)

        inputs = map_tensors(convert, inputs)
        if model is not self._model and len(names) == 1 and (name := names.pop()) != "transposed":
            for t in (*model.parameters(), *model.buffers()):
                if t.dim() in _CHANNELS_LAST:  # as in model.to(memory_format=torch.channels_last)
                    t.data = _change_strides(t.data, name)
        return inputs


def _change_strides(t: Tensor, name: str) -> Tensor:
    if name == "contiguous":
        return t.contiguous()
    if name == "channels-last":
        return t.contiguous(memory_format=_CHANNELS_LAST[t.dim()])
    first, second = _long_dims(t)[:2]
    return t.transpose(first, second).contiguous().transpose(first, second)


def _long_dims(t: Tensor) -> list[int]:
    """Return the dimensions of more than one element: the strides of others have no meaning."""
    return [dim for dim, size in enumerate(t.shape) if size > 1]


def _get_rng_states(model: nn.Module) -> list[Tensor]:
    gpus = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]
