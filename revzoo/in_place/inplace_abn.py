"""Let an ordinary network keep the output of BatchNorm and activation alone, in place of both inputs.

Which BatchNorms can do so is found by what happens in a forward of the network: every one is made foldable
(`inplace_abn/foldable_norm.py`), one training step is run on a batch, and its graph tells which of them were folded. The
others become what they were.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revzoo.analysis.dry_run import (
    call,
    in_mode,
    isolated,
    linear_loss,
    preserve_random_streams,
    require_module,
    select_differentiable,
)
from revzoo.device import has_value
from revzoo.errors import InputError, join_names
from revzoo.format import format_bytes
from revzoo.inplace_abn.foldable_norm import FoldableBatchNorm2d, FoldableBatchNormAct2d, read_fold_inputs
from revzoo.inplace_abn.function import InPlaceABNFunction
from revzoo.model.model import Model
from revzoo.runtime.compiling import is_compiled
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.runtime.nested import tensors_in

_FOLDABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm2d: FoldableBatchNorm2d,
    BatchNormAct2d: FoldableBatchNormAct2d,
}
_KEPT_RELU = "followed by ReLU, which cannot be undone: relu_slope=0.01 makes it leaky"


@dataclass(frozen=True)
class FoldedNorm:
    """A BatchNorm that was folded into what comes after it.

    Args:
        name: of the BatchNorm.
        activation: what comes after it: leaky_relu, elu, or identity for a convolution or product that keeps its input.
        adds_shortcut: whether the shortcut of a residual block is added in between.
        channels: number of channels.
        weak_channels: those whose weight is now too near 0 to divide by, and whose normalised input is kept.
    """

    name: str
    activation: str
    adds_shortcut: bool
    channels: int
    weak_channels: int


@dataclass(frozen=True)
class InPlaceABNReport:
    """What `inplace_abn_` did with a network.

    Args:
        folded: the BatchNorms that keep no input any more.
        left: names of the others, with the reason.
        replaced_relus: names of the ReLUs that have become leaky.
        relu_slope: their slope.
        difference: of the outputs before and after, in training mode on the batch: the largest difference as a share of the
            largest output. None for a network without values.
        bytes_before: what was kept from forward to backward on the batch, outputs included.
        bytes_after: what is kept now.
    """

    folded: tuple[FoldedNorm, ...]
    left: tuple[tuple[str, str], ...]
    replaced_relus: tuple[str, ...]
    relu_slope: float | None
    difference: float | None
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        joins = sum(norm.adds_shortcut for norm in self.folded)
        weak, channels = sum(norm.weak_channels for norm in self.folded), sum(norm.channels for norm in self.folded)
        lines = [
            f"BatchNorms that keep no input: {len(self.folded)}, {joins} of them at the end of a residual block",
            f"kept for backward on this batch: {format_bytes(self.bytes_before)}, now {format_bytes(self.bytes_after)} "
            f"({1 - self.bytes_after / self.bytes_before:.0%} less)",
        ]
        if self.replaced_relus:
            lines.append(
                f"ReLUs that are now leaky with slope {self.relu_slope:g}, another function: {len(self.replaced_relus)}"
            )
        if self.difference is not None:
            lines.append(f"outputs differ by at most {self.difference:.1e} of the largest, in training mode on this batch")
        lines.append(
            f"weights keep their sign and have no floor: {weak} of {channels} channels are so near 0 that their input is kept"
        )
        return "\n".join([*lines, *(f"left: {name} ({reason})" for name, reason in self.left)])


def inplace_abn_(model: nn.Module, batch: Any = None, *, relu_slope: float | None = None) -> InPlaceABNReport:
    """Change a network in place so that BatchNorm and activation keep their output alone (in-place activated BatchNorm).

    Modules, weights, buffers and state-dict keys stay, and so does the function, in training and in eval mode. Only what is
    kept from forward to backward changes. Where code between BatchNorm and activation adds the shortcut of a residual block,
    the shortcut is kept, which is the output of another activation and kept anyway.

    Leaky ReLU and ELU can be undone, ReLU cannot. With `relu_slope` the ReLUs after BatchNorms become leaky, which is another
    function: fine-tune the network. The report says how far its outputs are off.

    Args:
        model: any module with `nn.BatchNorm2d` or timm's `BatchNormAct2d`, before it is compiled. If it is in training mode,
            BatchNorms in eval mode (frozen) are left.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments. One training step is run
            on it and leaves no trace. None: random images of the size that a model of timm or revzoo says.
        relu_slope: > 0, for example 0.01. None: networks with ReLU keep what they kept.
    Raises:
        InputError: a compiled model, a second call, no batch and no size, a slope <= 0, or nothing that can be folded.
    Cost: one forward and backward, and another forward, of the batch. In training, backward undoes the activation, and a GPU is
        waited for once per BatchNorm.
    Source: Rota Bulo et al. 2018, "In-Place Activated BatchNorm"; differs from it as `revzoo/inplace_abn` says.
    """
    require_module(model)
    if is_compiled(model):
        raise InputError("A compiled model keeps what its compiler chose. Call inplace_abn_ before torch.compile.")
    if relu_slope is not None and not relu_slope > 0:
        raise InputError(f"ReLUs become leaky with a slope > 0. Received: relu_slope={relu_slope}. Use 0.01.")
    if batch is None:
        with preserve_random_streams(model.parameters()):
            batch = _make_batch(model)
    norms, left = _find_norms(model)
    if not norms and any(type(module) in _FOLDABLE.values() for module in model.modules()):
        raise InputError("inplace_abn_ has already been called with this model: its BatchNorms keep no input. Go on as it is.")
    with in_mode(model, training=True):
        before, bytes_before, _ = _run(model, batch)
        relus: dict[str, nn.Module] = {}
        try:
            for norm in norms.values():
                norm.__class__ = _FOLDABLE[type(norm)]
            found, reasons = _find_followers(model, batch, norms)
            relus = {} if relu_slope is None else found
            for relu in relus.values():
                relu.__class__ = nn.LeakyReLU
                cast(Any, relu).negative_slope = relu_slope
            after, bytes_after, nodes = _run(model, batch, backward=True)
            folded = tuple(nodes[name] for name in norms if name in nodes)
            ordinary = {name: norm for name, norm in norms.items() if name not in nodes}
            left |= {name: reasons[norm] for name, norm in ordinary.items()}
            if not folded:
                received = join_names([f"{name} {reason}" for name, reason in left.items()], most=3)
                received = received if left else "the model has no BatchNorm2d"
                raise InputError(f"No BatchNorm can keep its output in place of its input. Received: {received}.")
            _restore(ordinary.values(), ())
            return InPlaceABNReport(
                folded, tuple(left.items()), tuple(relus), relu_slope, _compare(before, after), bytes_before, bytes_after
            )
        except BaseException:
            _restore(norms.values(), relus.values())
            raise


def _make_batch(model: nn.Module) -> Any:
    """Return two random examples of the size that the model says."""
    if isinstance(model, Model):
        return model.example_input(2)
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    if size is None:
        raise InputError(
            "The model is run to find what comes after each BatchNorm, and this one does not say the size of its input. "
            "Received: no batch. Use inplace_abn_(model, batch)."
        )
    reference = next(model.parameters())
    return torch.randn(2, *size, dtype=reference.dtype, device=reference.device)


def _find_norms(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the BatchNorms that may become foldable, and why the others may not, by name."""
    norms: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, norm in model.named_modules():
        if not isinstance(norm, _BatchNorm) or type(norm) in _FOLDABLE.values():
            continue
        if type(norm) not in _FOLDABLE:
            left[name] = f"a {type(norm).__name__}, not nn.BatchNorm2d"
        elif norm._forward_hooks:
            left[name] = "has forward hooks, which see its output"
        elif model.training and not norm.training:
            left[name] = "in eval mode"
        else:
            norms[name] = norm
    return norms, left


def _run(model: nn.Module, batch: Any, backward: bool = False) -> tuple[list[Tensor], int, dict[str, FoldedNorm]]:
    """Return the outputs in training mode, the bytes kept for backward, and the folded BatchNorms by name."""
    with isolated(model, batch) as inputs:
        live = LiveBytes()
        known = live.watch([*model.parameters(), *model.buffers(), *tensors_in(inputs)])
        with live:
            outputs = call(model, inputs)
            kept_bytes = live.alive(without=known, at=live.now())
        nodes = _find_folded(model, select_differentiable(outputs))
        try:
            if backward:
                linear_loss(outputs).backward()
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise InputError(
                "The model changes in place what an in-place ABN has to keep. Replace the in-place operation, for example "
                f"x *= gate by x = x * gate. PyTorch says: {error}"
            ) from error
        return [y.detach() for y in tensors_in(outputs)], kept_bytes, nodes


def _find_folded(model: nn.Module, outputs: list[Tensor]) -> dict[str, FoldedNorm]:
    """Return the BatchNorms that were folded, from the graph of the outputs."""
    names = {module: name for name, module in model.named_modules()}
    folded, seen, waiting = dict[str, FoldedNorm](), set[Any](), [y.grad_fn for y in outputs]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if type(node).__name__ == f"{InPlaceABNFunction.__name__}Backward":
            name, channels = names[node.layer], node.layer.num_features
            folded[name] = FoldedNorm(name, node.activation.name, node.adds_shortcut, channels, node.weak_channels)
    return folded


def _find_followers(
    model: nn.Module, batch: Any, norms: Mapping[str, nn.Module]
) -> tuple[dict[str, nn.Module], dict[nn.Module, str]]:
    """Return the ReLUs that are called with the output of a foldable BatchNorm, by name, and why a BatchNorm may be left."""
    relus = dict[str, nn.Module]()
    reasons = dict.fromkeys(norms.values(), "is not called with this batch")

    def note(module: nn.Module, args: tuple[Any, ...], name: str) -> None:
        if module in reasons:
            reasons[module] = (
                "followed by code in which nothing keeps its output or is a leaky ReLU or ELU with a slope > 0"
                if module.training
                else "called in eval mode"
            )
        origin = read_fold_inputs(args[0]) if args else None
        if origin is not None and type(module) is nn.ReLU:
            relus[name], reasons[origin.layer] = module, _KEPT_RELU
        elif origin is not None and reasons[origin.layer] != _KEPT_RELU:
            follower = type(module).__name__ if any(module.children()) else repr(module)
            reasons[origin.layer] = (
                f"followed by {name} ({follower}): of activations, only leaky ReLU and ELU with a slope > 0 can be undone"
            )

    with ExitStack() as stack, isolated(model, batch) as inputs:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(note, name=name)).remove)
        call(model, inputs)
    return relus, reasons


def _restore(norms: Iterable[nn.Module], relus: Iterable[nn.Module]) -> None:
    """Give modules their first class back."""
    for norm in norms:
        norm.__class__ = next((plain for plain, foldable in _FOLDABLE.items() if foldable is type(norm)), type(norm))
    for relu in relus:
        if type(relu) is nn.LeakyReLU:
            cast(nn.Module, relu).__class__ = nn.ReLU
            del relu.negative_slope


def _compare(before: list[Tensor], after: list[Tensor]) -> float | None:
    """Return the largest difference of floating outputs as a share of the largest output."""
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a.is_floating_point() and a.numel()]
    if not pairs or not all(has_value(a) for a, _ in pairs):
        return None
    largest = max(float(a.abs().max()) for a, _ in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / (largest or 1.0)
