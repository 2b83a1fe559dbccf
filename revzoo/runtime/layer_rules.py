"""Which layers are inverted, and how: read from the modules alone, as they are in this forward.

A layer with hooks counts as one without an inverse: a hook may change what the layer returns. So does a layer whose `forward`
was overridden without its `inverse`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeGuard, cast

from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.invertible import Coupled
from revzoo.runtime.compiling import is_compiled
from revzoo.runtime.inventory import defines_inverse
from revzoo.runtime.mode import Mode

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Layer:
    """One layer of a chain, and its mode in this forward call."""

    module: nn.Module
    name: str
    mode: Mode = Mode.INVERT

    @property
    def is_inverted(self) -> bool:
        """Whether its input is rebuilt from its output."""
        return self.mode.inverts and has_inverse(self.module)


def has_inverse(module: nn.Module) -> bool:
    """Return whether a module is a layer whose input its own `inverse` can rebuild."""
    return defines_inverse(module) and not _overrides_forward(module) and not _has_hooks(module) and not is_compiled(module)


def find_layers(f: Callable[..., Any]) -> list[Layer] | None:
    """Return the layers of a step's f, some of which can be inverted one by one; None if f is not made of such layers."""
    if not isinstance(f, nn.Sequential) or not _contains_inverse(f) or not _is_plain_sequential(f):
        return None
    layers = list(expand(Layer(module, name) for name, module in f._modules.items()))
    return layers if any(layer.is_inverted and not isinstance(layer.module, Bijection) for layer in layers) else None


def is_made_of_layers(module: nn.Module) -> bool:
    """Return whether mode `invert` goes through a module, a layer or the f of a step, by the inverses of layers.

    Hooks would change that: what has some is called as a whole.
    """
    return has_inverse(module) or find_layers(module) is not None


def expand(layers: Iterable[Layer]) -> Iterator[Layer]:
    """Yield the layers, and the layers of every inverted `nn.Sequential` among them in its place."""
    for layer in layers:
        if layer.mode.inverts and _is_plain_sequential(layer.module):
            inner = cast(nn.Sequential, layer.module)._modules.items()  # not named_children, which passes over repetitions
            yield from expand(Layer(module, f"{layer.name}.{name}") for name, module in inner)
        else:
            yield layer


def list_layers(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, Literal["layer", "bijection", "node"]]]:
    """Yield the layers of a module of a network without coupling: name, module, and role.

    An `nn.Sequential` with a layer that has an inverse stands for its layers, anything else for itself. Hooks make no
    difference here: the names of a network's units do not depend on them.
    """
    if isinstance(module, Bijection):
        yield name, module, "bijection"
    elif isinstance(module, nn.Sequential) and _contains_inverse(module):
        for child, layer in module.named_children():
            yield from list_layers(f"{name}.{child}", layer)
    else:
        yield name, module, "layer" if defines_inverse(module) else "node"


def is_coupled(module: nn.Module) -> TypeGuard[Coupled]:
    """Return whether a module is `Coupled`, with its own `forward` and `inverse` and no others."""
    return isinstance(module, Coupled) and _find_definer(type(module), "forward", "inverse") is Coupled and _is_own(module)


def is_channelwise(module: nn.Module) -> bool:
    """Return whether a layer says that it treats each channel by itself, and nothing has been overridden since."""
    definer = _find_definer(type(module), "is_channelwise", "forward", "forward_keeping", "inverse")
    if "is_channelwise" not in vars(definer) or not getattr(definer, "is_channelwise", False) or not _is_own(module):
        return False
    # Only forward_keeping is told which channels it gets, and which numbers of its own belong to them.
    return hasattr(definer, "forward_keeping") or all(t.numel() == 1 for t in chain(module.parameters(), module.buffers()))


def starts_in_halves(layers: Iterable[Layer], x: Tensor) -> bool:
    """Return whether the first layers take x in halves because a coupled one after them needs halves anyway."""
    first = next((layer.module for layer in layers if not is_channelwise(layer.module)), None)
    return first is not None and is_coupled(first) and x.dim() > 1 and x.size(1) % 2 == 0


def _contains_inverse(f: nn.Sequential) -> bool:
    """Return whether a layer has an inverse."""
    return any(defines_inverse(m) or (isinstance(m, nn.Sequential) and _contains_inverse(m)) for m in f._modules.values())


def _overrides_forward(module: nn.Module) -> bool:
    """Return whether forward was overridden without `inverse`, or without `forward_keeping`, which runs in its place."""
    own, kind = vars(module), type(module)
    forward = _find_definer(kind, "forward", "__call__")
    for name in ("inverse", "forward_keeping"):
        if name in own or not hasattr(kind, name):
            continue
        definer = _find_definer(kind, name)
        if "forward" in own or (forward is not definer and issubclass(forward, definer)):
            return True
    return False


def _is_plain_sequential(module: Callable[..., Any]) -> bool:
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    return not _has_hooks(module) and not is_compiled(module)


def _find_definer(kind: type, *names: str) -> type:
    """Return the first class in the order of inheritance that defines one of the names."""
    return next(each for each in kind.__mro__ if any(name in vars(each) for name in names))


def _is_own(module: nn.Module) -> bool:
    """Return whether a module has its methods from its class."""
    return not any(name in vars(module) for name in ("forward", "forward_keeping", "inverse"))


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)
