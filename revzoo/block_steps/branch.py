"""Two steps in place of one block: the first runs it for one of its residual branches, the second for the other.

    w[k+1] = a w[k] + b w[k-1] + c (w[k] + attention(w[k]))
    w[k+2] = a w[k+1] + b w[k] + c (w[k+1] + mlp(w[k+1]))

Each step runs the block's own code with what the other one runs silenced, so that norms, dropout, drop path and scales stay the
block's. In backward only one branch at a time keeps what autograd saves in it.

    x + attention(norm1(x)), then y + mlp(norm2(y))        with the second one silenced:  x + attention(norm1(x)) + 0

A silenced submodule returns zeros without being run: its call is replaced by one that checks whether the submodule is silenced
in the present context. Nothing has to be known about the code around it. Hooks of a silenced submodule do not run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from revzoo.block_steps.block_chain import Arguments, BlockChain, BlockOutput, BlockStep
from revzoo.block_steps.conventions import find_state, get_state, put_state, replace_state
from revzoo.block_steps.head_groups import HeadGroup, can_be_cut, count_groups, find_projections, only_heads
from revzoo.device import has_value
from revzoo.errors import InputError
from revzoo.runtime.independence import describe_code, on_trial, randomize
from revzoo.runtime.inventory import Inventory, take_inventory
from revzoo.runtime.nested import map_tensors, tensors_in
from revzoo.runtime.ownership import ModuleReference


@dataclass(frozen=True)
class Branch:
    """One of the two residual branches of a block, which one step runs. Submodules are given by their paths in the block.

    Args:
        parts: the submodules that compute it.
        silent: those that its step does not run, each with what it returns instead (None in place of the state).
        needed: those of them that must be called: a block that does not call them has computed their branch in another way.
        groups: into how many groups the heads of its attention can be put, if it is the state plus that.
    """

    parts: tuple[str, ...]
    silent: Mapping[str, Any]
    needed: tuple[str, ...] = ()
    groups: int = 1


class BranchStep(BlockStep):
    """A step whose f is one residual branch of a block, with the sum. That of the first branch replaces the block's `forward`.

    Args:
        block: the block.
        chain: what it shares with the other steps of its list.
        index: its place among them.
        branch: the branch.
        following: for the first branch, the step of the second.
    """

    following: "BranchStep | None"

    def __init__(self, block: nn.Module, chain: BlockChain, index: int, branch: Branch, following: "BranchStep | None" = None):
        super().__init__(block, chain, index)
        self.branch = branch
        self.acts_on = "tokens" if following is None else "examples"
        self.__dict__["following"] = following  # no submodule: f is one branch

    @property
    def silent_modules(self) -> list[nn.Module]:
        """What does not run in this step."""
        return list(dict.fromkeys(self.block.get_submodule(path) for path in self.branch.silent))

    def remove(self) -> None:
        super().remove()
        remove_switches(self.block)

    def advance(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.following is None:
            raise AssertionError("Only the step of the first branch stands in place of a block.")
        _, key = find_state(self.block, self.name, args, kwargs)
        first = BlockOutput()
        state = get_state(self.run(args, kwargs, first, {}))
        extras, first.extras = first.extras, {}  # the graph holds it
        return self.following.run(*put_state(state, key, args, kwargs), BlockOutput(), extras)

    def cut_terms(self, state: Tensor, arguments: Arguments, count: int) -> list[Arguments]:
        """Return the side inputs of terms whose sum is f(x) - x, at most count of them: an attention's groups of heads."""
        most = 1 if self.branch.groups == 1 else self._count_groups(state, arguments)
        groups = max(n for n in range(1, min(count, most) + 1) if most % n == 0)
        return [arguments._replace(group=HeadGroup(i, groups)) for i in range(groups)] if groups > 1 else []

    def _count_groups(self, state: Tensor, arguments: Arguments) -> int:
        """Return into how many groups the heads can be put; tried again if something in the attention has been exchanged."""
        block, attention = self.block, self.block.get_submodule(self.branch.parts[0])
        if not can_be_cut(attention):
            return 1
        if not has_value(state):  # where nothing is computed, parameters are others for a while
            return self.branch.groups
        tested, key = _get_verdicts(attention)
        if key in tested:
            return tested[key][0]

        def run(x: Tensor) -> Any:
            positional, keywords = put_state(x, arguments.key, arguments.positional, arguments.keywords)
            return self.call_block(*positional, **keywords)

        whole = Inventory(block)
        with on_trial(whole, state.device):
            randomize(whole.modules)
            count = try_groups(block, self.branch, self.name, run, torch.randn_like(state, dtype=arguments.dtype))
        tested[key] = count, None
        return count

    def forward(self, state: Tensor, arguments: Arguments) -> Tensor:
        """Return f(w[k]): what the block returns in place of the state, if all that the other step runs returns zeros.

        Of a group of heads, it is what the attention returns.
        """
        returned, group = arguments.returned, arguments.group
        is_first_call = returned.dtype is None  # of this forward
        with silence(self.block, self.branch, self.name, arguments.dtype, arguments.extras) as scope:
            scope.group, scope.ends_early = group, group is not None and not is_first_call
            out = super().forward(state, arguments)
        if is_first_call and self.following is not None:
            returned.extras = leave_out_unreturned(scope.returned, returned.value)
        return out if group is None else cast(Tensor, scope.state)


def note_groups(attention: nn.Module, groups: int) -> None:
    """Note that the heads of an attention can be put into groups, as long as nothing in it is exchanged."""
    tested, key = _get_verdicts(attention)
    tested[key] = groups, None


def _get_verdicts(attention: nn.Module) -> tuple[dict[Any, tuple[int, str | None]], Any]:
    inventory = take_inventory(attention)
    return inventory.tested, ("groups", describe_code(inventory.modules))


def try_groups(block: nn.Module, branch: Branch, name: str, run: Callable[[Tensor], Any], x: Tensor) -> int:
    """Return into how many groups the heads of a branch can be put: 1 unless it is the state plus the sum of their results.

    Groups are run with their gradients, which a checkpoint inside would not know. Parameters of the attention are changed.

    Args:
        block: the block, with random parameters.
        branch: the branch.
        name: of its step.
        run: the block, of a state.
        x: a random state.
    """
    attention, flags = block.get_submodule(branch.parts[0]), [(module, module.training) for module in block.modules()]
    if len(branch.parts) > 1 or not can_be_cut(attention) or (count := count_groups(attention)) == 1:
        return 1
    groups = [HeadGroup(i, count) for i in range(count)]
    *inputs, output = (cast(nn.Module, each) for each in find_projections(attention))
    x, projected = x.detach().requires_grad_(), list[Tensor]()
    try:
        with torch.no_grad(), only_heads(attention, groups[0]):
            for each in inputs:  # what mixes heads, such as a norm over all of them, shows where they differ
                cast(Tensor, each.weight).mul_(4)
        for training in (True, False):
            block.train(training)
            results = list[list[Tensor]]()
            for group in (HeadGroup(0, 1), *groups):
                with torch.enable_grad(), silence(block, branch, name, x.dtype) as scope:
                    scope.group = group
                    run(x)
                results.append([scope.state, *torch.autograd.grad(scope.state, x, torch.ones_like(scope.state))])
            with (
                torch.enable_grad(),
                silence(block, branch, name, x.dtype),
                output.register_forward_hook(lambda _, args, out: projected.append(out)),
            ):
                out = get_state(run(x))
            if not _is_sum(out, x, projected[-1]):
                return 1
    except Exception:  # it wants all of its heads
        return 1
    finally:
        for module, flag in flags:
            module.training = flag
    whole, *terms = results  # in evaluation
    limit = min(0.05, 256 * max(torch.finfo(dtype).eps for dtype in (x.dtype, torch.float32)))  # norms are in float32
    pairs = zip(whole, [cast(Tensor, sum(each)) for each in zip(*terms, strict=True)], strict=True)
    return count if all(not has_value(a) or bool((a - b).norm() <= limit * a.norm()) for a, b in pairs) else 1


def _is_sum(out: Tensor, x: Tensor, term: Tensor) -> bool:
    """Return whether out is x plus the term and nothing else, by autograd's graph."""
    waiting, ends = [out.grad_fn], []
    while waiting:
        node: Any = waiting.pop()
        if node is not term.grad_fn and node.name() == "AddBackward0" and node._saved_alpha == 1:
            waiting += [following for following, _ in node.next_functions if following is not None]
        else:
            ends.append(node is term.grad_fn or getattr(node, "variable", None) is x)
    return len(ends) == 2 and all(ends)


def leave_out_unreturned(seen: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return what submodules have returned, without tensors that the block does not return: nobody needs those any more."""
    handed_on = {id(t) for t in tensors_in(value)}
    return {path: map_tensors(lambda t: t if id(t) in handed_on else None, part) for path, part in seen.items()}


@dataclass
class Scope:
    """One run of a block.

    Args:
        returns: what each silenced module returns besides the state.
        watched: the modules that run and whose results are noted, with their paths.
        dtype: of the zeros.

    Attributes:
        group: the heads of the attention that run; None for all, in a run that is recorded to its end.
        ends_early: whether the run, and the context, end with a group's result.
        called: the silenced modules that have been called.
        returned: what the watched modules have returned besides the state, by path.
        state: what the attention has returned, of a group.
    """

    returns: dict[nn.Module, Any]
    watched: dict[nn.Module, str]
    dtype: torch.dtype
    group: HeadGroup | None = None
    ends_early: bool = False
    called: set[nn.Module] = field(default_factory=set)
    returned: dict[str, Any] = field(default_factory=dict)
    state: Any = None


class _BranchEnded(BaseException):  # no error
    pass


_scope: ContextVar[Scope | None] = ContextVar("silenced", default=None)


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
        path = None if scope is None else scope.watched.get(module)
        if scope is None or path is None:
            return own_call(*args, **kwargs)
        with only_heads(module, scope.group):
            value = own_call(*args, **kwargs)
        scope.returned[path] = replace_state(value, None)
        if scope.group is not None:
            scope.state = get_state(value)
            if scope.ends_early:
                raise _BranchEnded
            torch.set_grad_enabled(False)  # until `silence` ends: what comes after is not recorded, and does not run again
        return value


@contextmanager
def silence(
    block: nn.Module, branch: Branch, name: str, dtype: torch.dtype, returns: Mapping[str, Any] | None = None
) -> Iterator[Scope]:
    """Silence what one step of a block does not run; yield what is noted of its run.

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
    scope = Scope(silenced, {block.get_submodule(path): path for path in branch.parts}, dtype)
    for module in (*scope.returns, *scope.watched):
        _install(module, name)
    token, is_enabled = _scope.set(scope), torch.is_grad_enabled()
    try:
        yield scope
    except _BranchEnded:
        return
    finally:
        _scope.reset(token)
        torch.set_grad_enabled(is_enabled)
    if missed := [path for path in branch.needed if block.get_submodule(path) not in scope.called]:
        raise InputError(
            f"{name} runs its block without {missed[0]}, but the block now computes without calling that submodule, so both "
            "steps would compute it. Make whole blocks reversible, without split=, or call the submodule in forward."
        )


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
