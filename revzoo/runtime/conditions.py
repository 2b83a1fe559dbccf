"""Running a function again under the conditions of its first run.

Besides its inputs, a call of f depends on settings (`settings.py`), the random streams (`random_state.py`), and what its module
holds (`inventory.py`). The first run notes them, every later one restores them. The user's settings, random streams and
BatchNorm statistics are the same before and after, and what f sets on its modules in a second run is undone.
"""

from collections.abc import Callable, Mapping
from itertools import compress
from operator import attrgetter
from typing import Any

from torch import Tensor

from revzoo.device import find_graph
from revzoo.errors import RecoveryError
from revzoo.runtime.attributes import Attributes
from revzoo.runtime.forward import Forward, take_turn
from revzoo.runtime.inventory import Inventory, Tensors, find_plain_tensors, read_training, set_training, take_inventory
from revzoo.runtime.random_state import RandomState, find_generators

_get_version: Callable[[Tensor], int] = attrgetter("_version")
_get_strides: Callable[[Tensor], tuple[int, ...]] = Tensor.stride


class Conditions:
    """The conditions under which `f` is called, besides its inputs. They are noted when this is made, right before the call.

    Args:
        f: the function.
        name: name of the step, for messages.
        forward: what it shares with the other calls of the forward.
        inventory: what f holds now, if that has just been found.
    """

    __slots__ = (
        "_graph", "_modules", "_plain", "_statistics", "_strides", "_versions", "fixed", "forward", "inventory", "name",
        "random",
    )  # fmt: skip

    def __init__(self, f: Callable[..., Any], name: str, forward: Forward, inventory: Inventory | None = None):
        self.name = name
        self.forward = forward
        self.inventory = inventory = take_inventory(f) if inventory is None else inventory
        self._modules, fixed = inventory.modules, inventory.fixed  # as long as it may run again
        # FSDP exchanges the memory of tensors.
        self._strides = [] if forward.is_one_of_several else list(map(_get_strides, compress(fixed, inventory.has_strides)))
        self.fixed = fixed + forward.side_tensors  # parameters, buffers and side inputs, which must not be modified
        self._versions = list(map(_get_version, self.fixed))
        if inventory.statistics:  # before the first run, where its output may depend on them
            moving = zip(inventory.statistics, inventory.only_moves, strict=True)
            self._statistics = [None if moves else _clone(buffers) for buffers, moves in moving]
        self._graph: object = None
        # Tensors that f may change in place; after the first run, those that it has changed.
        self._plain = find_plain_tensors(self._modules) if self._watches_attributes else {}
        generators = forward.generators
        if not inventory.devices <= forward.devices:
            generators = find_generators(inventory.devices | forward.devices)
        self.random = RandomState(generators)

    def end_first_run(self) -> None:
        """Note how the random streams have moved, and which tensors."""
        if self._plain:
            now = find_plain_tensors(self._modules)
            self._plain = {at: version for at, version in self._plain.items() if now.get(at) != version}
            self.inventory.learned.sets_attributes |= bool(self._plain)
        self.random.end_first_run()
        if self.random.has_drawn:
            self._graph = find_graph()

    def require_repeatable(self) -> None:
        """Raise RecoveryError if f has changed a buffer or parameter of its own, so that a second run would not repeat it."""
        has_replaced = self.is_observed and not self.inventory.has_same_entries()
        if changed := self.find_changed() or (self.inventory.find_replaced() if has_replaced else None):
            raise RecoveryError(
                f"{self.name} changes its {changed!r} in forward, so a second run would not repeat the first. "
                f"Set the schedule of {self.name} to 'store'. (BatchNorm's running statistics need no change; layers that set "
                "their weights in their first call, as lazy ones, need one under torch.no_grad() first; instead of "
                "nn.Embedding(max_norm=...), limit its weight after optimizer.step().)"
            )

    def run_again(self, run: Callable[..., Any], *args: Any) -> Any:
        """Return run(*args), which calls f under the recorded conditions. The present ones are restored after it.

        Raises:
            RecoveryError: a parameter, buffer or side input was changed in place or replaced since the first run.
        """
        self.require_unchanged()
        inventory, random, settings = self.inventory, self.random, self.forward.settings
        learned = inventory.learned
        if random.has_drawn and find_graph() is not self._graph:
            raise RecoveryError(
                f"{self.name} draws random numbers, and its forward and backward are not captured in one CUDA graph, so the "
                "second run would draw others. Capture both in one graph (torch.cuda.make_graphed_callables makes two), or set "
                "its schedule to 'store'."
            )
        states: list[Tensor] | None = None
        training, statistics, entered, attributes = inventory.training, None, None, None
        turn = take_turn(self.forward.device)
        try:  # at once: Ctrl-C in between would keep the turn for good
            training = read_training(self._modules)
            if training != inventory.training:
                set_training(self._modules, inventory.training)
            if inventory.statistics:
                statistics = self._rewind_statistics()
            # FSDP gathers weights before a call and frees them later, however the call ends.
            if self._watches_attributes and not self.forward.is_one_of_several:
                attributes = Attributes(*self._modules)
                for place, key in self._plain:  # the run changes a copy
                    holder = self._modules[place].__dict__
                    if isinstance(tensor := holder.get(key), Tensor):
                        holder[key] = tensor.detach().clone()
            learned.trials -= 1
            states = random.rewind()
            entered = settings.enter()
            return run(*args)
        finally:
            try:
                if entered is not None and settings.leave(entered):
                    learned.sets_attributes = True
                if states is not None:
                    random.restore(states)
                if attributes is not None:
                    learned.sets_attributes |= attributes.restore()
                if statistics is not None:
                    for buffers, present in zip(inventory.statistics, statistics, strict=True):
                        buffers.update(present)
                if training != inventory.training:
                    set_training(self._modules, training)
            finally:
                turn.release()

    def require_unchanged(self) -> None:
        """Raise RecoveryError if a parameter, buffer or side input was changed in place or replaced since the first run."""
        if changed := self.find_changed():
            raise RecoveryError(
                f"{changed!r} of {self.name} was changed in place between forward and backward, for example by "
                "optimizer.step(). Run backward first, or set the schedule to 'store' and let autograd say where. With an "
                "optimizer inside backward (register_post_accumulate_grad_hook), no step may end by adding a parameter: its "
                "gradient is complete before the step runs again."
            )
        strided = list(compress(self.fixed, self.inventory.has_strides)) if self._strides else []
        for tensor, now, strides in zip(strided, map(_get_strides, strided), self._strides, strict=True):
            if now != strides:
                raise RecoveryError(
                    f"{self.inventory.name(tensor)!r} of {self.name} has another order of memory than in forward, as after "
                    "model.to(memory_format=torch.channels_last), in which kernels round and draw differently. Change it "
                    "before forward."
                )
        if self.inventory.has_same_entries():
            return
        if replaced := self.inventory.find_replaced():
            raise RecoveryError(
                f"{replaced!r} of {self.name} was another tensor or module in forward, as under torch.func.functional_call or "
                "after load_state_dict(assign=True). Run backward first, or set the schedule to 'store'."
            )

    @property
    def is_observed(self) -> bool:
        """Whether it is to be found out what f does besides computing its result."""
        return self.inventory.learned.trials > 0 or self.forward.round is not None

    @property
    def _watches_attributes(self) -> bool:
        return self.inventory.learned.sets_attributes or self.is_observed

    @property
    def draws_the_same(self) -> bool:
        """Whether the second run that is under way has drawn as many random numbers as the first.

        Known where it began at the recorded place of the random streams.
        """
        is_known = self.random.has_drawn or self.forward.round is not None
        return not is_known or self.random.has_drawn_all

    @property
    def spacing(self) -> float:
        """Relative spacing of the coarsest numbers that f computes with, as far as its parameters and the settings show."""
        return max(self.forward.settings.spacing, self.inventory.spacing)

    def holds_moving(self, tensor: Tensor) -> bool:
        """Return whether a tensor that autograd saves may be a statistic that has moved by the second run."""
        return tensor.dim() == 1 and any(len(tensor) % size == 0 for size in self.inventory.moving_sizes)

    def _rewind_statistics(self) -> list[Tensors]:
        """Give norms copies of their statistics to move; return the dictionaries to restore."""
        present = [dict(buffers) for buffers in self.inventory.statistics]
        for buffers, now, earlier in zip(self.inventory.statistics, present, self._statistics, strict=True):
            buffers.update(_clone(now if earlier is None else earlier))
        return present

    def find_changed(self) -> str | None:
        """Return the name of a parameter, buffer or side input that was changed in place since this was made."""
        now = list(map(_get_version, self.fixed))
        if now == self._versions:
            return None
        tensor = next(t for t, a, b in zip(self.fixed, now, self._versions, strict=True) if a != b)
        return self.inventory.name(tensor)


def _clone(buffers: Mapping[str, Tensor | None]) -> Tensors:
    return {key: b if b is None else b.clone() for key, b in buffers.items()}
