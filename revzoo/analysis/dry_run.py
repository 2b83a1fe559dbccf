"""Run a forward and backward of any model and leave no trace in it."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.nn.parameter import is_lazy

from revzoo.analysis.autocast import count_autocast, set_autocast_depth
from revzoo.analysis.fake_tensors import FakeKernelError, find_fake_mode, make_fake, silence_failures
from revzoo.analysis.kept_values import KeptValues
from revzoo.device import has_value, is_sharded
from revzoo.errors import InputError, MissingValueError
from revzoo.runtime.attributes import Contents
from revzoo.runtime.complete_gradients import take_gradients
from revzoo.runtime.forward import processes_communicate
from revzoo.runtime.lazy_logits import LazyLogits
from revzoo.runtime.nested import map_tensors, tensors_in
from revzoo.runtime.settings import Settings

LossFunction = Callable[[Any], Tensor]


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError where PyTorch raises its own errors for too little memory, on a device or on the CPU."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        raise


@contextmanager
def accumulated_gradients(model: nn.Module) -> Iterator[None]:
    """Let every step inside the block begin with the gradients of earlier batches, as it does with gradient accumulation."""

    def add_gradients(model: nn.Module, inputs: Any) -> None:
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p)

    with model.register_forward_pre_hook(add_gradients, prepend=True):
        yield


@contextmanager
def updates_in_backward(model: nn.Module, update_bytes: Sequence[int]) -> Iterator[None]:
    """Let every backward inside the block free each gradient as an optimizer does that steps inside backward.

    No weight changes, but the memory of the updates is taken.

    Args:
        model: its forward begins every step.
        update_bytes: what the update takes of each of the model's parameters.
    """
    with ExitStack() as following:

        def follow(model: nn.Module, inputs: Any) -> None:
            following.close()  # in `isolated` the parameters of every step are others
            sizes = {id(p): size for p, size in zip(model.parameters(), update_bytes, strict=True)}

            def take(p: nn.Parameter) -> None:
                torch.empty(sizes[id(p)], dtype=torch.uint8, device=p.device)
                p.grad = None

            following.enter_context(take_gradients(model.parameters(), take))

        with model.register_forward_pre_hook(follow):
            yield


@contextmanager
def isolated(model: nn.Module, batch: Any, fake: bool = False) -> Iterator[Any]:
    """Yield the batch for a run of the model inside the `with` block, and restore the model afterwards.

    Restored is what `preserve` says; inside, the gradients of parameters start as None. If parameters are FakeTensors or on the
    meta device, or with `fake=True`, the run is under `FakeTensorMode`: shapes and bytes are right, but nothing is allocated or
    computed.

    Args:
        model: any module with a parameter that requires a gradient.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        fake: run under `FakeTensorMode` even if the parameters have values.
    Raises:
        InputError: the model is no module or none of its parameters requires a gradient; the batch has no tensor or no
            example, or has no values although the parameters have some (allowed with `fake`). MissingValueError, which is one:
            the run asks for a value under `FakeTensorMode`.
    """
    require_module(model)
    inputs = require_batch(batch)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("No parameter of the model requires a gradient, so there is no backward to run.")
    if not fake and not all(map(has_value, inputs)) and all(map(has_value, model.parameters())):
        raise InputError("The model's parameters have values. Received: a meta or fake batch. Give both values, or neither.")
    tensors = [*model.parameters(), *model.buffers(), *inputs]
    home = next((t.device for t in [*inputs, *tensors] if not t.is_meta), torch.device("cpu"))
    with _explain_missing_values(model), ExitStack() as stack:
        mode = find_fake_mode(tensors, always=fake)
        stack.enter_context(preserve(model, tensors, fake=mode is not None))
        torch.clear_autocast_cache()  # of casts in earlier runs
        stack.callback(torch.clear_autocast_cache)
        if mode:
            stack.enter_context(silence_failures())
            batch = _map_once(lambda t: make_fake(t, mode, home).requires_grad_(t.requires_grad), batch)
            # `preserve` does not look into modules that torch.jit has compiled.
            convert = partial(make_fake, mode=mode, home=home)
            stack.callback(_replace_tensors(model, "_parameters", lambda p: nn.Parameter(convert(p), p.requires_grad)))
            stack.callback(_replace_tensors(model, "_buffers", convert))
            stack.enter_context(mode)
        else:
            batch = _map_once(lambda t: t.detach().requires_grad_(t.requires_grad), batch)  # t.grad stays as it is
        for p in model.parameters():
            p.grad = None
        stack.enter_context(torch.enable_grad())
        yield batch


@contextmanager
def preserve(model: nn.Module, tensors: Iterable[Tensor] = (), *, fake: bool = False) -> Iterator[None]:
    """Give a model back what it holds now, at the end of the block and of whatever ends it: an error, or Ctrl-C.

    That is the attributes of its modules, with parameters, buffers, submodules, hooks and what is in containers (`Contents`),
    the values of parameters, buffers and the batch, the gradients, training flags, random streams and PyTorch's settings.

    Args:
        model: the model.
        tensors: on whose devices random streams are restored, and which get their values back, besides the parameters.
        fake: whether the run inside is one under `FakeTensorMode`. If not, it has copies of the buffers, and variables that
            functions share with those around them are left: hooks note there what is to be seen of a run.
    """
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    tensors = [*(p for p, *_ in parameters), *tensors]
    # Where processes divide a model, others than its modules exchange tensors and flags, and remember what they did.
    is_shared = not fake and processes_communicate()
    contents = Contents([module._buffers for module in model.modules()] if is_shared else model, follows_functions=fake)
    with ExitStack() as stack:
        stack.enter_context(preserve_random_streams(tensors))
        stack.enter_context(_preserve_settings(next((p.device for p, *_ in parameters), torch.device("cpu"))))
        for parameter, gradient, requires_grad in parameters:
            stack.callback(_restore_parameter, parameter, gradient, requires_grad)
        stack.callback(contents.restore)
        own = {id(t) for t in (*tensors, *model.buffers())}
        plain = [t for t in contents.tensors if id(t) not in own]
        values = KeptValues(plain if fake else [*tensors, *plain])
        stack.callback(values.restore)
        if not fake:
            _replace_tensors(model, "_buffers", _copy_buffer)
        if plain or not fake:
            stack.enter_context(values)
        yield


def _restore_parameter(parameter: nn.Parameter, gradient: Tensor | None, requires_grad: bool) -> None:
    parameter.grad = gradient
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


@contextmanager
def _preserve_settings(device: torch.device) -> Iterator[None]:
    """Put settings in force again that a run has left others, as one does that an error ends inside a captured autocast."""
    settings, grad_mode, depth = Settings(device), torch.is_grad_enabled(), count_autocast()
    entered = settings.enter()
    try:
        yield
    finally:
        settings.leave(entered)
        torch.set_grad_enabled(grad_mode)
        set_autocast_depth(depth)


@contextmanager
def _explain_missing_values(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = _find_asking_module(model, error)
        raise MissingValueError(
            f"Bytes are counted without values. Received: a value that {where} asks for (.item(), float()). Take that out "
            "while they are counted."
        ) from error
    except FakeKernelError as error:
        where = _find_asking_module(model, error)
        raise MissingValueError(f"Bytes are counted without values. Received: {where}, with {error}.") from error


def _find_asking_module(model: nn.Module, error: BaseException) -> str:
    """Return words for the innermost module that was running when an error was raised."""
    names = {id(m): f"{name or 'the model'} ({type(m).__name__})" for name, m in model.named_modules()}
    # Of no other frames: in Python 3.11 and 3.12 the locals of one that holds the error would keep all of them alive.
    calls = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is nn.Module._call_impl.__code__]
    modules = (call.f_locals["self"] for call in reversed(calls))
    return next((names[id(module)] for module in modules if id(module) in names), "a model or a loss")


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set a model to training or eval mode inside the block, and give all modules their own modes back afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        if not (training and model.training):  # then parts of it that are frozen stay in eval mode
            model.train(training)
        yield
    finally:
        for module, before in modes.items():
            module.training = before


@contextmanager
def preserve_random_streams(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the random streams of torch, on the CPU and on the devices of some tensors, of Python and of NumPy."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(mark_python_streams())
        for gpu in {t.device for t in tensors if t.device.type not in ("cpu", "meta") and not isinstance(t, FakeTensor)}:
            stack.enter_context(torch.random.fork_rng(devices=[gpu], device_type=gpu.type))
        yield


def require_batch(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch. Raises InputError if it has none, or no example."""
    inputs = list(tensors_in(batch))
    if not inputs:
        raise InputError(f"The batch must hold at least one tensor. Received: {type(batch).__name__}.")
    if not any(t.numel() for t in inputs):
        raise InputError(f"The batch must hold at least one example. Received: {[tuple(t.shape) for t in inputs]}.")
    return inputs


def require_module(model: object) -> None:
    """Raise InputError unless the model is a module, and all of its parameters have a shape."""
    if not isinstance(model, nn.Module):
        raise InputError(f"The model must be a torch.nn.Module. Received: {type(model).__name__}.")
    if lazy := next((name for name, p in model.named_parameters() if is_lazy(p)), None):
        raise InputError(f"{lazy} has no shape yet. Call the model once with a batch: its lazy layers then get theirs.")


def require_whole(model: nn.Module) -> None:
    """Raise InputError if processes divide the model: without values, nothing can be gathered from them."""
    if any(map(is_sharded, model.parameters())):
        raise InputError(
            f"A training step of a divided {type(model).__name__} is counted before it is divided. Received: parameters that "
            "are shards (DTensor). Give the whole model, which may be on the meta device; its plan can be applied to the "
            "divided one."
        )


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Call the model with a batch: a tensor, positional arguments in a tuple or list, or keyword arguments in a mapping."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def compute_loss(loss: LossFunction | None, outputs: Any) -> Tensor:
    """Return the loss of what the model returned; without a loss function, the sum of it.

    Raises:
        InputError: the loss is not a single number, or does not depend on a parameter.
    """
    total = (loss or linear_loss)(outputs)
    if not (isinstance(total, Tensor) and total.numel() == 1 and total.requires_grad):
        received = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        without = " without a gradient" if isinstance(total, Tensor) and not total.requires_grad else ""
        raise InputError(f"A loss is one number with a gradient. Received: {received}{without}. Return a mean or a sum.")
    return total


def linear_loss(outputs: Any) -> Tensor:
    """Return the sum of all outputs that require a gradient, of complex ones that of their real parts.

    It saves no tensor for backward.

    The gradient of `y.sum()` is one scalar expanded to the shape of y. Here it is a tensor with memory of its own, as after
    a real loss: its bytes are counted, and no kernel has to copy an expanded scalar first.

    Raises:
        InputError: no output requires a gradient.
    """
    parts = [_Sum.apply(y) for y in select_differentiable(outputs)]
    return sum(parts[1:], parts[0])


def compute_usual_loss(outputs: Any) -> Tensor:
    """Return cross-entropy of what are logits, as far as one can tell, or else a sum."""
    logits = getattr(outputs, "logits", outputs)
    dims = (2,) if logits is outputs else (2, 3)
    if not (isinstance(logits, Tensor) and logits.is_floating_point() and logits.dim() in dims):
        return linear_loss(outputs)
    return compute_cross_entropy(logits)


def compute_cross_entropy(logits: Tensor) -> Tensor:
    """Return the loss of logits (..., V) of classes or tokens, where all labels are 0."""
    logits = logits.flatten(0, -2).float()
    return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


def select_differentiable(outputs: Any) -> list[Tensor]:
    """Return those tensors of a model's outputs that require a gradient.

    Logits that are not there yet are left out; where there is nothing else, they are made.

    Raises:
        InputError: there is none.
    """
    tensors = [y for y in tensors_in(outputs) if y.requires_grad]
    if not tensors:
        raise InputError("No output of the model depends on a parameter that requires a gradient.")
    return [y for y in tensors if not isinstance(y, LazyLogits)] or [y.make() for y in tensors if isinstance(y, LazyLogits)]


def mark_python_streams() -> Callable[[], None]:
    """Return what sets the random streams of Python and NumPy back to where they are now."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()

    def rewind() -> None:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

    return rewind


class Paths:
    """Where the steps and layers of a model are, which are called by their names within a chain."""

    def __init__(self, model: nn.Module):
        self._paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)

    def find(self, module: nn.Module, name: str) -> str:
        """Return the path of the module in the model; of one in several places, the first path that ends with this name."""
        return next((path for path in self._paths.get(id(module), ()) if f".{path}".endswith(f".{name}")), name)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = y.shape, y.dtype
        return y.sum().real

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].to(ctx.dtype).expand(ctx.shape).contiguous()


def _map_once(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return a batch with a function applied to every tensor; one that is in it twice, such as tokens and labels, still is."""
    known: dict[int, Tensor] = {}

    def convert(t: Tensor) -> Tensor:
        if id(t) not in known:
            known[id(t)] = function(t)
        return known[id(t)]

    return map_tensors(convert, batch)


def _copy_buffer(buffer: Tensor) -> Tensor:
    # Forward cannot write to an expanded view, and a copy would be larger.
    expanded = buffer.layout is torch.strided and 0 in buffer.stride()
    return buffer if expanded else buffer.clone()


def _replace_tensors(model: nn.Module, table: str, convert: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Replace the tensors of every module by converted ones; shared tensors stay shared. Return what puts them back.

    Args:
        table: attribute of a module that holds the tensors by name, `_parameters` or `_buffers`.
    """
    replacements, before = dict[int, Tensor](), list[tuple[dict[str, Tensor | None], str, Tensor]]()
    for module in model.modules():
        entries: dict[str, Tensor | None] = getattr(module, table)
        for name, t in entries.items():
            if t is not None:
                if id(t) not in replacements:
                    replacements[id(t)] = convert(t)
                entries[name] = replacements[id(t)]
                before.append((entries, name, t))

    def restore() -> None:
        for entries, name, t in before:
            entries[name] = t

    return restore
