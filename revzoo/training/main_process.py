"""Work of one process or of all whose errors every process raises, so that none waits for one that has ended."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

T = TypeVar("T")


def call_on_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Call a function in the main process and return its result, or raise its error, in every process.

    The function must not wait for the other processes, which wait for its end here. If only the main process raised its error,
    the others would wait for good.
    """
    result: T
    [(result, error)] = broadcast_object_list([_call(function) if accelerator.is_main_process else None])
    if error is not None:
        raise error
    return result


def call_on_all(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Call a function in every process and return its result; an error of any of them is raised in every process.

    The function must not wait for the other processes.
    """
    result: T
    result, own = _call(function)
    errors = [error for error in (own, *gather_object([own])) if error is not None]
    if errors:
        raise errors[0]
    return result


def _call(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, _make_portable(error)


def _make_portable(error: Exception) -> Exception:
    """Return the error, or its text as an error where it cannot be sent to other processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an error raises that was not made for it
        return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    return error
