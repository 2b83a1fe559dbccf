"""Hand out each gradient in backward as soon as it is complete and nothing there needs the parameter as it was.

A post-accumulate hook of the parameter says when its gradient is complete. But a step may still need the parameter after that.
If the last operation of a step adds the parameter, the gradient is ready before the step runs again. And a step that saves
nothing but its input runs again only to rebuild the state before it. So recorded calls announce which parameters they will run
with, and report when they have run for the last time. A gradient that is complete before that waits.

Known inefficiency: a gradient that waits is handed out with the next one that is complete, or never; then it is still there
after backward.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from weakref import WeakSet

from torch import Tensor, nn

from revzoo.runtime import seams


@contextmanager
def take_gradients(parameters: Iterable[nn.Parameter], take: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Call `take` in every backward inside the block with each parameter whose gradient is complete; it may change both.

    Args:
        parameters: those to follow; frozen ones are left out.
        take: called with one at a time. Gradients that wait until the end of backward are not handed out.
    """
    followed = [p for p in parameters if p.requires_grad]
    follower = _Follower(followed, take)
    with ExitStack() as stack:
        stack.callback(setattr, seams, "follower", seams.follower)
        seams.follower = follower
        for p in followed:
            stack.callback(p.register_post_accumulate_grad_hook(follower.note_gradient).remove)
        yield


class _Follower:
    """Knows of some parameters which calls will run with them, and which gradients wait for those."""

    def __init__(self, parameters: list[nn.Parameter], take: Callable[[nn.Parameter], None]):
        self._take = take
        self._calls: dict[int, WeakSet[object]] = {id(p): WeakSet() for p in parameters}
        self._waiting: list[nn.Parameter] = []
        self._lock = Lock()  # devices have a thread each in backward

    def announce(self, call: object, tensors: Iterable[Tensor]) -> None:
        """Note that a call, which only the graph keeps alive, will run again in backward with these tensors as they are now."""
        for calls in self._find_calls(tensors):
            calls.add(call)

    def dismiss(self, call: object, tensors: Iterable[Tensor]) -> None:
        """Note that a call will not run again in this backward."""
        for calls in self._find_calls(tensors):
            calls.discard(call)

    def note_gradient(self, parameter: nn.Parameter) -> None:
        with self._lock:
            waiting = [p for p in self._waiting if p is not parameter and p.grad is not None]
            self._waiting = []
            for p in (*waiting, parameter):
                if self._calls[id(p)]:
                    self._waiting.append(p)
                else:
                    self._take(p)

    def _find_calls(self, tensors: Iterable[Tensor]) -> Iterator[WeakSet[object]]:
        return (self._calls[id(t)] for t in tensors if id(t) in self._calls)
