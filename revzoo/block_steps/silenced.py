"""Submodules that return zeros for a while, without being run: a block is run for one of its residual branches alone.

    x + attention(norm1(x)), then y + mlp(norm2(y))        with the second one silenced:  x + attention(norm1(x)) + 0

Each submodule's call is replaced by one that checks whether the submodule is silenced in the present context. Nothing has to be
known about the code around it. Hooks of a silenced submodule do not run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from revzoo.block_steps.conventions import replace_state
from revzoo.errors import InputError
from revzoo.runtime.ownership import ModuleReference


@dataclass(frozen=True)
class Branch:
    """One of the two residual branches of a block, which one step runs. Submodules are given by their paths in the block.

    Args:
        parts: the submodules that compute it.
        silent: those that its step does not run, each with what it returns instead (None in place of the state).
        needed: those of them that must be called: a block that does not call them has computed their branch in another way.
    """

    parts: tuple[str, ...]
    silent: Mapping[str, Any]
    needed: tuple[str, ...] = ()


@dataclass
class _Scope:
    """What is silenced.

    Args:
        returns: what each silenced module returns besides the state.
        watched: the modules that run and whose results are noted, with their paths.
        dtype: of the zeros.
        called: the silenced modules that have been called.
        returned: what the watched modules have returned besides the state, by path.
    """

    returns: dict[nn.Module, Any]
    watched: dict[nn.Module, str]
    dtype: torch.dtype
    called: set[nn.Module] = field(default_factory=set)
    returned: dict[str, Any] = field(default_factory=dict)


_scope: ContextVar[_Scope | None] = ContextVar("silenced", default=None)


class _Switch:
    """What stands in place of a module's call: it returns zeros while the module is silenced."""

    def __init__(self, module: nn.Module):
        self._module = ModuleReference(module)
        self.own_call = module.__dict__.get("_call_impl")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        scope, module = _scope.get(), cast(nn.Module, self._module())
        if scope is not None and module in scope.returns:
            scope.called.add(module)
            return replace_state(scope.returns[module], _make_zeros(args, kwargs, scope.dtype))
        own_call = partial(type(module)._call_impl, module) if self.own_call is None else self.own_call
        value = own_call(*args, **kwargs)
        if scope is not None and (path := scope.watched.get(module)) is not None:
            scope.returned[path] = replace_state(value, None)
        return value


@contextmanager
def silence(
    block: nn.Module, branch: Branch, name: str, dtype: torch.dtype, returns: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Silence what one step of a block does not run; yield what the parts of its branch return, without the state.

    Args:
        block: the block. Its submodules are looked up again in every call: adapters may have replaced them.
        branch: what runs, and what does not.
        name: of the step, for messages.
        dtype: of the zeros.
        returns: what silenced submodules return in place of what `branch` says, by path.
    Raises:
        InputError: a submodule is compiled, or has not been called in a run that came to its end.
    """
    silenced = {block.get_submodule(path): (returns or {}).get(path, value) for path, value in branch.silent.items()}
    scope = _Scope(silenced, {block.get_submodule(path): path for path in branch.parts}, dtype)
    for module in (*scope.returns, *scope.watched):
        _install(module, name)
    token = _scope.set(scope)
    try:
        yield scope.returned
    finally:
        _scope.reset(token)
    if missed := [path for path in branch.needed if block.get_submodule(path) not in scope.called]:
        raise InputError(
            f"{name} runs its block without {missed[0]}, but the block now computes without calling that submodule, so both "
            "steps would compute it. Make whole blocks reversible, without split=, or call the submodule in forward."
        )


def find_silent(block: nn.Module, branch: Branch) -> list[nn.Module]:
    """Return the submodules of a block that a step does not run."""
    return list(dict.fromkeys(block.get_submodule(path) for path in branch.silent))


def remove_switches(block: nn.Module) -> None:
    """Give all submodules their own call back."""
    for module in block.modules():
        if (switch := _get_switch(module)) is not None:
            if switch.own_call is None:
                del module.__dict__["_call_impl"]
            else:
                module.__dict__["_call_impl"] = switch.own_call


def _install(module: nn.Module, name: str) -> None:
    if module._compiled_call_impl is not None:
        raise InputError(
            f"{name} is one of two steps of a block, and a {type(module).__name__} in it is compiled, so it cannot be left out "
            "of the other step. Compile the submodules of it, or make whole blocks reversible, without split=."
        )
    if _get_switch(module) is None:
        module.__dict__["_call_impl"] = _Switch(module).call


def _get_switch(module: nn.Module) -> _Switch | None:
    switch = getattr(module.__dict__.get("_call_impl"), "__self__", None)
    return switch if isinstance(switch, _Switch) else None


def _make_zeros(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Return zeros shaped like the first floating-point tensor that a module is given."""
    tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
    if (x := next(tensors, None)) is None:
        raise InputError("A submodule that is given no floating-point tensor cannot be one branch of a block.")
    return x.new_zeros(x.shape, dtype=dtype)
