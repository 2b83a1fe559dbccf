"""The two residual branches of a block: which submodules compute them, and whether one can run without the other.

A block is split into x + first(x) and y + second(y) by running its own code with the other branch silenced: its submodules
return zeros instead of running. A copy of the block is then tested with the arguments of a batch, in evaluation and in
training: the two steps must return what the block returns, and set the attributes that it sets; where tensors have no values
(on the meta device), only shapes are compared. State and parameters are random, since biases and scales that happen to be zero
would hide a difference. In both runs every function draws the same random numbers.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from revzoo.analysis.dry_run import preserve_random_streams
from revzoo.block_steps.branch import Branch, leave_out_unreturned, note_groups, silence, try_groups
from revzoo.block_steps.conventions import find_state, get_state, leave_out_caches, put_state
from revzoo.device import has_value
from revzoo.errors import ConversionError, UnknownNameError, join_names
from revzoo.in_place.block_lists import BlockLists
from revzoo.in_place.similarity import run_network
from revzoo.runtime.independence import randomize
from revzoo.runtime.nested import map_tensors, tensors_in

Split = tuple[str | Sequence[str], str | Sequence[str]]
Branches = tuple[Branch, Branch]
_Run = Callable[[Tensor], Any]  # of a block, with the state given

# Submodules that compute a branch, by its name. The first that a block has are taken, so those that have more come first.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "attention": (
        "self_attn encoder_attn", "self_attn cross_attn", "attn crossattention",
        "layer.0.SelfAttention layer.1.EncDecAttention", "layer.0.SelfAttention",
        "self_attn", "self_attention", "attention", "attn",
    ),
    "mlp": (
        "intermediate output.dense", "layer.2.DenseReluDense", "layer.1.DenseReluDense", "fc1 fc2", "linear1 linear2",
        "feed_forward", "block_sparse_moe", "mlp", "ffn", "ff", "moe",
    ),
}  # fmt: skip
_SPACINGS = 4.0  # by how many relative spacings of its numbers rounding may change a state
_USUAL = "Leave out split= to make whole blocks the steps."


def find_branches(model: nn.Module, lists: BlockLists, split: Split, batch: Any) -> dict[nn.Module, Branches]:
    """Return the two branches of every block.

    Args:
        model: the network.
        lists: of its blocks.
        split: the names of the branches, or the submodules that compute them.
        batch: for the network; each block is tested with the arguments that it has on it.
    Raises:
        UnknownNameError: a block has no such submodules.
        ConversionError: the two branches, one after the other, are not the block.
    """
    branches: dict[nn.Module, Branches] = {}
    with ExitStack() as stack:
        for blocks in lists.values():
            for name, block in blocks.items():
                trial = _Trial(block, name, *(_find_parts(block, name, part) for part in split))

                def split_block(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trial: _Trial = trial) -> None:
                    if block not in branches:
                        branches[block] = trial.split(args, kwargs)
                        for branch in branches[block]:
                            note_groups(block.get_submodule(branch.parts[0]), branch.groups)

                stack.callback(block.register_forward_pre_hook(split_block, with_kwargs=True).remove)
        run_network(model, batch)
    if missed := [name for blocks in lists.values() for name, block in blocks.items() if block not in branches]:
        raise ConversionError(f"{missed[0]} is not called as a module with this batch, so it cannot be split. {_USUAL}")
    return branches


def _find_parts(block: nn.Module, name: str, branch: str | Sequence[str]) -> tuple[str, ...]:
    """Return the paths of the submodules that compute a branch."""
    paths = {path for path, _ in block.named_modules() if path}
    if isinstance(branch, str) and branch in LAYOUTS:
        layouts = (tuple(layout.split()) for layout in LAYOUTS[branch])
        if parts := next(filter(paths.issuperset, layouts), None):
            return parts
    elif missing := [path for path in ([branch] if isinstance(branch, str) else branch) if path not in paths]:
        raise UnknownNameError(f"submodule of {name}", missing[0], sorted(paths | set(LAYOUTS)))
    else:
        return (branch,) if isinstance(branch, str) else tuple(branch)
    raise ConversionError(
        f"{name}, a {type(block).__name__}, has no submodule that is known as {branch!r}. Name those that compute the branch: "
        f"split=('attn', ('fc1', 'fc2')). It has: {join_names([child for child, _ in block.named_children()])}."
    )


class _SameDraws(TorchFunctionMode):
    """Every function draws the same random numbers whenever it is called, so two runs have the same masks.

    Args:
        device: of the state.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.default_generator.manual_seed(0)
        if self._device.type not in ("cpu", "meta"):
            torch.get_device_module(self._device).manual_seed(0)
        return func(*args, **(kwargs or {}))


class _Trial:
    """A copy of a block, run with random states and parameters.

    Args:
        block: the block.
        name: of it.
        parts: of each branch, the submodules that compute it.
    """

    def __init__(self, block: nn.Module, name: str, *parts: tuple[str, ...]):
        self._block = block
        self._name = name
        self._parts = parts

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Branches:
        """Find the two residual branches by running a copy of the block on random states, and test them with these arguments.

        Raises:
            ConversionError: it has no two branches, or they do not add up to the block.
        """
        state, key = find_state(self._block, self._name, args, kwargs)
        given = leave_out_caches(args, kwargs)
        with preserve_random_streams([state, *self._block.parameters()]):
            try:
                self._block = copy.deepcopy(self._block)
                randomize([*self._block.modules()])
                for p in self._block.parameters():
                    p.requires_grad_(p.is_floating_point())
                x = torch.randn_like(state)

                def run(x: Tensor) -> Any:
                    args, kwargs = put_state(x, key, *given)
                    return self._block.forward(*args, **kwargs)

                return self._find_and_test(run, x)
            except ConversionError:
                raise
            except Exception as error:
                raise ConversionError(
                    f"{self._name} cannot run one of its branches without the other: {type(error).__name__}: {error}. {_USUAL}"
                ) from error
            finally:
                del self._block  # the copy has the hook that has called this, which holds all blocks: a cycle

    def _find_and_test(self, run: _Run, x: Tensor) -> Branches:
        first, second = self._parts
        rest = list(_find_rest(self._block, "", {*first, *second}))
        watched = Branch((*first, *second, *rest), {})
        self._block.eval()
        with silence(self._block, watched, self._name, x.dtype) as scope:
            run(x)
        returns = {path: map_tensors(lambda _: None, value) for path, value in scope.returned.items()}
        branches = (
            self._make_branch(first, second, rest, returns, run, x),
            self._make_branch(second, first, rest, returns, run, x),
        )
        self._require_single_statistics(branches)
        for training in (False, True):
            self._block.train(training)
            with _SameDraws(x.device):
                with silence(self._block, watched, self._name, x.dtype):
                    whole = run(x)
                attributes = self._read_attributes()
                value = self._run_branches(branches, run, x)
            self._require_same_state(get_state(whole), get_state(value))
            self._require_same_rest([*tensors_in(whole)], [*tensors_in(value)], "returns besides its state")
            self._require_same_rest(attributes, self._read_attributes(), "sets as an attribute")
        if unknown := [path for path in rest if all(path in branch.silent for branch in branches)]:
            raise ConversionError(
                f"{unknown[0]} of {self._name} does nothing on this batch, so it may belong to either of the two steps. "
                f"{_USUAL}"
            )
        one, other = (replace(branch, groups=try_groups(self._block, branch, self._name, run, x)) for branch in branches)
        return one, other

    def _run_branches(self, branches: Branches, run: _Run, x: Tensor) -> Any:
        """Return what the block returns when its branches run in two steps."""
        value, returned = x, dict[str, Any]()
        for branch in branches:
            with silence(self._block, branch, self._name, x.dtype, returned) as scope:
                value = run(get_state(value))
            returned = leave_out_unreturned(scope.returned, value)
        return value

    def _read_attributes(self) -> list[Tensor]:
        """Return the tensors that modules hold as attributes, which are no parameters or buffers."""
        values = (each for module in self._block.modules() for each in vars(module).values())
        return [t for each in values if isinstance(each, Tensor | tuple | list) for t in tensors_in(each)]

    def _require_same_state(self, whole: Tensor, split: Tensor) -> None:
        if not has_value(whole):
            return
        difference = float((split - whole).double().norm() / whole.double().norm())
        if difference > _SPACINGS * torch.finfo(whole.dtype).eps:
            first, second = self._parts
            raise ConversionError(
                f"{self._name} cannot be two steps, {join_names(first)} added to the state, then {join_names(second)}: this "
                f"returns something else than the block, by {difference:.1e} of its size. Either the two run side by side (as "
                "in GPT-J) or in another order, or there is a norm after a sum (as in BERT), or a branch adds the state itself "
                f"(BLOOM), or something else is added. {_USUAL}"
            )

    def _require_same_rest(self, whole: Sequence[Tensor], split: Sequence[Tensor], what: str) -> None:
        if len(whole) != len(split) or not all(map(_is_alike, whole, split)):
            raise ConversionError(f"{self._name} {what} a tensor that changes when its two branches run in two steps. {_USUAL}")

    def _make_branch(
        self,
        parts: tuple[str, ...],
        other: tuple[str, ...],
        rest: Sequence[str],
        returns: Mapping[str, Any],
        run: _Run,
        x: Tensor,
    ) -> Branch:
        """Return the branch that is left when the parts of the other one are silenced, and what then gets only zeros."""
        needed = tuple(path for path in other if path in returns)
        if not needed:
            raise ConversionError(
                f"{self._name} does not call {join_names(other)} as a submodule, so this branch cannot be left out. {_USUAL}"
            )
        branch = Branch(parts, {path: returns.get(path) for path in other}, needed)
        given = dict[str, bool]()  # of each submodule that is given a state: whether it is anything but zeros
        with ExitStack() as stack, torch.enable_grad(), silence(self._block, branch, self._name, x.dtype):
            for path in rest:

                def note(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
                    if tensors:
                        given[path] = given.get(path, False) or any(not has_value(t) or bool(t.any()) for t in tensors)

                stack.callback(self._block.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True).remove)
            out = get_state(run(x))
            leaves = {key: p for key, p in self._block.named_parameters() if p.requires_grad}
            reached = set[str]()
            if out.requires_grad:
                gradients = torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True)
                reached = {key for key, g in zip(leaves, gradients, strict=True) if g is not None}

        def is_idle(path: str) -> bool:
            own = {key for key in leaves if key.startswith(f"{path}.")}
            return not given[path] or (bool(own) and not own & reached)

        idle = {path: returns.get(path) for path in rest if path in given and is_idle(path)}
        return replace(branch, silent={**branch.silent, **idle})

    def _require_single_statistics(self, branches: Branches) -> None:
        for path, module in self._block.named_modules():
            runs = [not any(f"{path}.".startswith(f"{silent}.") for silent in branch.silent) for branch in branches]
            if isinstance(module, _NormBase) and module.track_running_stats and all(runs):
                raise ConversionError(
                    f"{path} of {self._name} runs in both steps, and its statistics would move twice. Name it together with "
                    f"the branch that it belongs to: split=(({path!r}, 'attn'), 'mlp'). {_USUAL}"
                )


def _find_rest(module: nn.Module, prefix: str, parts: set[str]) -> Iterator[str]:
    """Yield the paths of the outermost submodules that neither are in a branch nor have parts of one."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in parts:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or any(part.startswith(f"{path}.") for part in parts):
            yield from _find_rest(child, f"{path}.", parts)
        else:
            yield path


def _is_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same but for rounding."""
    if not has_value(a):
        return (a.shape, a.dtype) == (b.shape, b.dtype)
    if (a.shape, a.dtype) != (b.shape, b.dtype) or torch.equal(a, b) or not a.is_floating_point():
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool((a - b).double().norm() <= _SPACINGS * torch.finfo(a.dtype).eps * a.double().norm())
