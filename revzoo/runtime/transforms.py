"""What can be at work around a forward besides autograd: tracers, forward-mode derivatives, the transforms of `torch.func`.

A tracer writes down operations to be run later without this runtime, and a forward-mode derivative is complete when forward
ends: both have no backward in which a dropped tensor could be recovered. `torch.func` refuses saved-tensor hooks, and so does
`torch.autograd.graph.disable_saved_tensors_hooks`. So everything is stored there.
"""

import sys
import warnings
from functools import cache
from traceback import walk_stack

import torch
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing

from revzoo.errors import InputError, RecoveryError, RevzooError

_FORWARD_MODE = "Jvp"
_OURS = "revzoo.", "torch.", "contextlib"  # modules that no user has written
_LONGEST = 300  # characters of PyTorch's message
_NAMES = {"Grad": "torch.func.grad (vjp, jacrev, hessian)", "Vmap": "torch.vmap", _FORWARD_MODE: "torch.func.jvp (jacfwd)"}


def must_store() -> bool:
    """Return whether forward has to keep every saved tensor, whatever the schedule says."""
    innermost = _find_innermost()
    if innermost is None and not vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]():
        innermost = "torch.autograd.graph.disable_saved_tensors_hooks"
    if innermost is not None and innermost != _FORWARD_MODE:
        _warn_once(innermost)
    return innermost is not None or forward_ad._current_level >= 0 or is_tracing()


@cache
def _warn_once(transform: str) -> None:
    warn_user(
        f"Everything is stored inside {_NAMES.get(transform, transform)}, which does not support the hooks on saved tensors "
        "that recovery needs. To save memory, run forward outside of it, and use torch.autograd.grad or .backward()."
    )


def warn_user(message: str) -> None:
    """Warn at the user's line that has led here."""
    frames = enumerate(walk_stack(sys._getframe()), 1)
    outside = (level for level, (frame, _) in frames if not frame.f_globals.get("__name__", "").startswith(_OURS))
    warnings.warn(message, stacklevel=next(outside, 2))


# Words of PyTorch's errors where hooks or a dispatch mode are around what traces its argument or differentiates by itself, or
# where what is saved has no shape.
_CONFLICTS = "saved tensor hooks", "FakeTensor", "fake mode", "HigherOrderOperator", "NestedTensorImpl"


def explain_conflict(error: BaseException, name: str) -> RecoveryError | None:
    """Return the error for a step whose own code does not run while saved tensors are dropped; None for any other error."""
    if isinstance(error, RevzooError) or not any(words in str(error) for words in _CONFLICTS):
        return None
    return RecoveryError(
        f"{name} cannot drop what autograd saves in it: a transform of torch.func, an operator that traces its argument, as "
        "torch.cond does, or a nested tensor of layout=torch.strided inside does not support that. Set the schedule of "
        f"{name} to 'store'. Received: {type(error).__name__}: {str(error)[:_LONGEST]}"
    )


def refuse_exact_derivatives(remedy: str = "Use exact=False, and m or beta instead of kept_bits.") -> None:
    """Raise InputError where exact arithmetic would be differentiated in another way than by backward; `remedy` allows it."""
    if torch.compiler.is_compiling():
        return
    around = _find_innermost() or ("torch.autograd.forward_ad" if forward_ad._current_level >= 0 else None)
    if around is None and is_tracing() and torch.is_grad_enabled():
        around = "torch.jit.trace outside of torch.no_grad()"
    if around is not None:
        raise InputError(
            "Exact arithmetic rounds, and has a gradient in torch.autograd.grad and .backward() alone. Received: a call inside "
            f"{_NAMES.get(around, around)}. {remedy}"
        )


def _find_innermost() -> str | None:
    """Return the kind of the innermost active transform of torch.func."""
    stack = torch._C._functorch.get_interpreter_stack()
    return stack[-1].key().name if stack else None
