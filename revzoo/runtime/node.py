"""Nodes: the ordinary, non-invertible modules between chains, such as stems, transitions and heads."""

from typing import Any

import torch
from torch import Tensor, nn

from revzoo.errors import InputError
from revzoo.runtime.compiling import exclude_from_compilation, is_exporting
from revzoo.runtime.forward import Forward
from revzoo.runtime.lookahead import Lookahead
from revzoo.runtime.mode import Mode
from revzoo.runtime.observation import begin_call, end_call
from revzoo.runtime.recorded_call import RecordedCall
from revzoo.runtime.round import begin_round
from revzoo.runtime.seams import traces_backward
from revzoo.runtime.segment import KeptStates, SavedInputs
from revzoo.runtime.traced_chain import trace_node
from revzoo.runtime.transforms import must_store


def run_node(module: nn.Module, name: str, mode: Mode | str, *inputs: Tensor, lookahead: Lookahead | None = None) -> Any:
    """Call a module and keep what its mode needs for backward.

    Args:
        module: the node.
        name: its name, for messages.
        mode: `store` keeps what autograd saves, `recompute` the inputs, `selective` the inputs and the outputs of
            compute-intensive operations.
        inputs: arguments of the module.
        lookahead: recovers it ahead of backward. One for all chains and nodes of a forward.
    """
    mode = Mode(mode)
    begin_call(module, inputs)
    if not mode.drops or not torch.is_grad_enabled() or is_exporting():
        out = module(*inputs)
    elif traces_backward():
        out = trace_node(module, mode, *inputs)
    else:
        out = _run_recorded(module, name, mode, *inputs, lookahead=lookahead)
    end_call(module, out)
    return out


@exclude_from_compilation
def _run_recorded(module: nn.Module, name: str, mode: Mode, *inputs: Tensor, lookahead: Lookahead | None) -> Any:
    if must_store():
        return module(*inputs)
    forward = Forward(inputs[0], lookahead=lookahead)
    forward.round = begin_round(module, inputs[0], (mode,))
    with forward:
        call = RecordedCall(module, name, forward, selective=mode.is_selective)
        return call.first_run(SavedInputs(KeptStates(inputs), forward.round), *inputs)


def require_tensors(out: Any, name: str, count: int | None = None) -> None:
    """Check what a part has returned, which may be one that a user registered.

    Args:
        out: what it has returned, in a tuple.
        name: of the part.
        count: number of tensors; None: any.
    Raises:
        InputError: it is something else.
    """
    if not (isinstance(out, tuple) and all(isinstance(each, Tensor) for each in out) and count in (None, len(out))):
        received = ", ".join(type(each).__name__ for each in (out if isinstance(out, tuple) else (out,)))
        raise InputError(f"{name} must return {'two' if count else 'one or more'} tensors. Received: {received}.")
