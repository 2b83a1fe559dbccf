"""One call of one function: the tensors that autograd saves in it are dropped, and refilled by a second run.

The forward runs as ordinary autograd code under `saved_tensors_hooks`: the pack hook drops each tensor and leaves the number of
its slot. Unpacking the first slot in backward asks a recoverer (`segment.py`) for the second run, which refills all slots,
unless that has been done ahead (`lookahead.py`). Where autograd saves nothing but inputs and parameters of the call, as in a
linear layer or a convolution, no second run is needed: they are handed over as they are.

In backward: unpack -> recover (the recoverer finds the input) -> refill = hand over, or run again under the conditions of the
first run (`conditions.py`).

Source: the hooks are `torch.autograd.graph.saved_tensors_hooks`, as in non-reentrant `torch.utils.checkpoint`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from revzoo.errors import RecoveryError
from revzoo.runtime import seams
from revzoo.runtime.call_watch import CallWatch
from revzoo.runtime.compiling import around, call_as_around, call_uncompiled, is_compiled, leave_uncompiled, warn_of_uncompiled
from revzoo.runtime.conditions import Conditions
from revzoo.runtime.forward import Forward, second_run
from revzoo.runtime.inventory import Inventory
from revzoo.runtime.refill_hooks import AllRefilled, Handle, Recoverer, RefillHooks, detach, make_difference_error
from revzoo.runtime.seams import Keeper
from revzoo.runtime.transforms import explain_conflict

_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
_NOTHING: tuple[None, int] = (None, 0)
OUTPUT = -1  # in place of the number of an input


class RecordedCall:
    """One call of `f` under hooks that drop what autograd saves.

    f may differentiate inside its own forward (the forces of an energy). It is then run again at once, up to where it is.

    Args:
        f: the step or node.
        name: its name, for messages.
        forward: what it shares with the other calls of the forward.
        selective: keep the outputs of compute-intensive operations from the first run to the second, unless f is compiled: its
            operations cannot be observed.
        watched: whether the tensors saved last are read whole to be compared. Not needed where the next state is compared.
            None: what is saved is not compared at all.
        inventory: what f holds now, if that has just been found.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        name: str,
        forward: Forward,
        *,
        selective: bool = False,
        watched: bool | None = True,
        inventory: Inventory | None = None,
    ):
        self.f = f
        self.name = name
        self.forward = forward
        self._side = forward.side
        self._inventory = inventory
        self._reads_whole = watched
        self.kept_products = seams.keep_products() if selective and not is_compiled(f) else None
        self._keepers: list[Keeper] = [] if self.kept_products is None else [self.kept_products]
        self._kept_slots: dict[int, tuple[Tensor, int]] = {}  # what regions keep of what autograd saves
        self._watch: CallWatch | None = None
        self._dropped: list[tuple[torch.Size, torch.dtype]] = []
        self._refilled: dict[int, tuple[Tensor, int]] = {}  # by slot: the tensor and its version
        # By slot: which input was saved, or that the output was, or what is kept with its version. None: f has to run again.
        self._sources: list[int | tuple[Tensor, int]] | None = []
        self._given: Sequence[Tensor] = ()  # the inputs, during the first run
        self._keeps = False  # whether something is kept in it
        self._requires_grad: list[bool] = []
        self._is_fake = False  # whether it runs without values
        self.place: int | None = None  # among the items of its segment
        self.outer: RecordedCall | None = None  # the call that may have to run again for this one's input
        self._find_handle: Callable[[], Handle | None] | None = None

    def first_run(self, recoverer: Recoverer, *inputs: Tensor) -> Any:
        """Run f on `inputs` and drop what autograd saves; backward will ask `recoverer` to recover this call.

        Args:
            recoverer: gets the inputs back.
            inputs: arguments of f.
        """
        forward = self.forward
        self.conditions = conditions = Conditions(self.f, self.name, forward, self._inventory)
        if not conditions.inventory.learned.may_keep_products:
            self.kept_products, self._keepers = None, []
        self._requires_grad = list(map(_requires_grad, inputs))
        self._is_fake = isinstance(inputs[0], FakeTensor)
        handle = Handle(self, recoverer)
        self._find_handle = ref(handle)
        try:
            if forward.round is not None and forward.round.compares and self._reads_whole is not None:
                self._watch = CallWatch(inputs[0], conditions, reads_whole=self._reads_whole)
            if forward.is_one_of_several:  # FSDP frees weights after forward, and gathers them again when f runs again
                self._sources = None
            regions = None
            if forward.keep or conditions.inventory.learned.regions or conditions.is_observed:
                regions = seams.keep_regions(self.f, self.name, forward, conditions)
            if regions is not None:
                self._keepers.append(regions)
            self._given, self._keeps = inputs, bool(self._keepers)
            if self.kept_products is not None:
                self.kept_products.begin(conditions.fixed, conditions.is_observed)
            with saved_tensors_hooks(self._pack, handle.unpack), ExitStack() as stack:
                for keeper in self._keepers:
                    stack.enter_context(keeper.record())
                out = self._call(*inputs)
            conditions.require_repeatable()
        except BaseException as error:
            if self._watch is not None:
                self._watch.abandon()
            if conflict := explain_conflict(error, self.name):
                raise conflict from error
            if isinstance(error, Exception) and self.name not in str(error):
                kept = " with the outputs of its products kept (mode 'selective')" if self.kept_products is not None else ""
                error.add_note(f"Raised in {self.name}, run{kept} so that backward can run it again.")
            raise
        finally:  # the hooks live as long as the graph, and what they hold would keep the graph of a failed forward alive
            self._given = ()
            self._refilled.clear()  # in case that f has differentiated
            conditions.end_first_run()
        if not self._dropped:
            conditions.inventory.learned.trials -= 1  # there is no second run in which anything could be seen
        if seams.follower is not None:
            seams.follower.announce(self, conditions.fixed)
        if forward.lookahead is not None and self._dropped:
            forward.lookahead.follow(handle)
        if self._watch is not None:
            self._watch.end_first_run()
        if self._keepers:
            self._end_keeping(regions)
            if self._keepers and around.get() is not None:
                warn_of_uncompiled()
        return out

    @leave_uncompiled  # a compiled step calls it
    def _pack(self, tensor: Tensor) -> int | Tensor:
        """Drop a tensor that autograd saves in the first run; return its slot, or the tensor if f only traces with it."""
        if tensor.__class__ is FakeTensor and not self._is_fake:
            if self.forward.lookahead is not None:
                self.forward.lookahead.follows_tracing = True
            return tensor.detach()  # the tensor itself would be a cycle
        dropped = self._dropped
        slot = len(dropped)
        dropped.append((tensor.shape, tensor.dtype))
        if self._sources is not None:
            self._note_source(tensor, self._given)
        for keeper in self._keepers:
            keeper.note_saved(slot, tensor)
        if self._watch is not None:
            self._watch.note(slot, tensor)
        return slot

    def _end_keeping(self, regions: Any) -> None:
        if self.kept_products is not None:
            self.kept_products.end_first_run()
            if self.kept_products.was_written:
                self.conditions.inventory.learned.may_keep_products = False
        if regions is None:
            return
        regions.end_first_run()
        self._kept_slots = regions.slots
        self.conditions.inventory.learned.regions.update(regions.seen_regions)
        if not regions.regions:
            self._keepers.remove(regions)

    @property
    def is_running(self) -> bool:
        """Whether its first run is under way."""
        return bool(self._given)

    def recover_inside(self) -> None:
        """Refill what has been dropped so far, during the first run: f itself asks for it, as it differentiates inside."""
        self.conditions.inventory.learned.differentiates = True
        self.conditions.random.end_first_run()  # so far
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.is_paused = True
        try:
            self.run_again(*self._given, stop_early=True, check_draws=False)
        finally:
            self._keepers = keepers
            for keeper in keepers:
                keeper.is_paused = False

    def _note_source(self, tensor: Tensor, inputs: Sequence[Tensor]) -> None:
        """Note where a tensor that autograd saves comes from, if it need not be computed."""
        assert self._sources is not None
        for place, x in enumerate(inputs):
            if tensor is x:
                self._sources.append(place)
                return
        if isinstance(tensor, nn.Parameter):
            self._sources.append((tensor, tensor._version))
        else:
            self._sources = None

    def hand_over(self, *inputs: Tensor, output: Tensor | None = None) -> bool:
        """Refill what was dropped with what is at hand, if that is all of it; return whether.

        Args:
            inputs: the inputs of the first run, recovered, or none.
            output: its output, if that is a state.

        Raises:
            RecoveryError: a parameter or buffer was changed in place or replaced since the first run.
        """
        sources = self._sources
        if sources is None:
            return False
        at_hand = dict(enumerate(inputs))
        if output is not None:
            at_hand[OUTPUT] = output
        if not all(source in at_hand for source in sources if isinstance(source, int)):
            return False
        self.conditions.require_unchanged()
        for slot, source in enumerate(sources):
            tensor, version = (at_hand[source], at_hand[source]._version) if isinstance(source, int) else source
            self._refilled[slot] = detach(tensor), version
        self.conditions.inventory.learned.trials -= 1
        return True

    def refill(self, *inputs: Tensor, output: Tensor | None = None) -> None:
        """Refill what was dropped, by running f again unless all of it is at hand.

        Args:
            inputs: the inputs of the first run, recovered.
            output: its output, if that is a state.
        """
        if not self.hand_over(*inputs, output=output):
            self.run_again(*inputs, stop_early=True, check_draws=self._watch is None)

    def run_again(self, *inputs: Tensor, refill: bool = True, stop_early: bool = False, check_draws: bool = True) -> Any:
        """Run f once more on detached `inputs`, refilling what was dropped; return its detached output.

        Args:
            inputs: the inputs of the first run, recovered.
            refill: whether to keep the tensors that autograd saves. False where only the output is needed.
            stop_early: end the run when the last dropped tensor has been refilled, and return None.
            check_draws: whether to check that the run draws as many random numbers as the first. Not where values are compared:
                another thread that draws, such as one that loads data, can move the random stream while f draws nothing.

        Raises:
            RecoveryError: what f computes with has changed, or it does something else than in the first run.
        """
        random, kept = self.conditions.random, self.kept_products
        refilled = self._refilled if refill else {} if self.conditions.inventory.learned.differentiates else None
        hooks = RefillHooks(
            self.name, self._dropped, refilled, random if stop_early else None, self._kept_slots, is_fake=self._is_fake
        )
        try:
            out = self.conditions.run_again(self._run_under_hooks, inputs, hooks, check_draws)
        except (Exception, AllRefilled):
            if hooks.error is not None and (kept is None or not kept.has_handed_out):
                raise hooks.error from None
            if kept is not None and kept.has_handed_out and not hooks.has_refilled_all:
                kept.have_fitted = False
            elif not hooks.has_refilled_all:  # TorchScript wraps what ends the run
                raise
            out = None
        finally:
            hooks.end()
        if kept is not None and not kept.have_fitted:
            # What was handed out may have caused what was raised. It is used up: the next run computes everything.
            self._refilled.clear()
            return self.run_again(*inputs, refill=refill, stop_early=stop_early, check_draws=check_draws)
        if hooks.has_refilled_all:
            return None
        if hooks.seen != len(self._dropped):
            raise make_difference_error(self.name, self._dropped, hooks.seen, "nothing")
        return None if stop_early else out

    def _run_under_hooks(self, inputs: Sequence[Tensor], hooks: RefillHooks, check_draws: bool) -> Any:
        inputs = tuple(map(_cut, inputs, self._requires_grad))
        token = second_run.set(True)
        is_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # torch.enable_grad() takes five calls for it
        try:
            with saved_tensors_hooks(hooks.pack, hooks.unpack), ExitStack() as stack:
                for keeper in self._keepers:
                    stack.enter_context(keeper.hand_out())
                out = self._call(*inputs)
        finally:
            torch._C._set_grad_enabled(is_enabled)
            second_run.reset(token)
        if check_draws and not self.conditions.draws_the_same:
            raise RecoveryError(
                f"{self.name} ran differently the second time: it drew another amount of random numbers. Its function must "
                "depend on its input, parameters and torch's random stream alone, and no other thread may draw meanwhile; "
                "otherwise set its schedule to 'store'."
            )
        return out.detach()

    def take(self, slot: int) -> Tensor | None:
        """Return the tensor that has refilled a slot, and leave it to the graph; None if there is none.

        Raises:
            RecoveryError: f has changed it in place after autograd saved it.
        """
        tensor, version = self._refilled.pop(slot, _NOTHING)
        if tensor is not None and tensor._version != version:
            raise RecoveryError(
                f"{self.name} modifies a tensor {tuple(tensor.shape)} in place that its gradient needs. Replace the in-place "
                "operation (mul_, +=) by one that returns a new tensor."
            )
        return tensor

    def free_refilled(self) -> None:
        """Free the refilled tensors that were not unpacked; they can be recovered again."""
        self._refilled.clear()

    def end_runs(self) -> None:
        """Note that this backward will not run f again."""
        if seams.follower is not None:
            seams.follower.dismiss(self, self.conditions.fixed)

    @property
    def is_in_graph(self) -> bool:
        """Whether backward may ask for this call again. One that has dropped nothing is never asked for."""
        return not self._dropped or (self._find_handle is not None and self._find_handle() is not None)

    def free_kept(self) -> None:
        """Free what forward has kept besides the inputs; the call cannot be recovered any more."""
        self._sources = None

    def compare_refilled(self, watch: Any, explained: float | Tensor = 0.0, *, same_input: bool = True) -> None:
        """Compare what a second run has refilled with what autograd saved in the first run.

        Args:
            watch: of the segment.
            explained: the relative error that is predicted for its input.
            same_input: whether its input had the bits of the first run's.
        Raises:
            RecoveryError: something differs by more than rounding explains.
        """
        if self._watch is not None:
            self._watch.compare(self._refilled, watch, explained, same_input=same_input)

    def compute_all(self) -> bool:
        """Forget a second run that was given products of the first; return whether it was such a run.

        Products of this function are not kept any more: something reads or writes them where no dispatch mode sees it.
        """
        if self.kept_products is None or not self.kept_products.has_handed_out:
            return False
        self.conditions.inventory.learned.may_keep_products = False
        self._refilled.clear()
        return True

    def _call(self, *inputs: Tensor) -> Any:
        call = self.f
        if around.get() is not None:  # only operations that are run one by one can be kept
            call = partial(call_uncompiled if self._keeps else call_as_around, call)
        return call(*inputs) if self._side is None else call(*inputs, self._side)


def _cut(x: Tensor, requires_grad: bool) -> Tensor:
    """Return the input of a second run, without the graph that it has come from."""
    return x.detach().requires_grad_(requires_grad)
