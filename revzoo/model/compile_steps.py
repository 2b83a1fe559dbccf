"""Compile the reversible steps of a model, each distinct one once."""

from typing import Any

from torch import nn

from revzoo.errors import InputError
from revzoo.model.network import Network
from revzoo.runtime.chain import ReversibleChain


def compile_steps(model: nn.Module, **options: Any) -> None:
    """Compile every reversible step with `torch.compile`, in place.

    Steps of the same classes, shapes and settings share one graph, so a deep network compiles as fast as a shallow one.
    Parameters, state-dict keys and classes stay as they are; every mode, `exact`, kept bits and autocast work as before. A deep
    copy of the model, and a model that was pickled, is not compiled, as with `nn.Module.compile`.

    Not worth it for few updates: a graph takes seconds to compile. Plan first: what compiled code keeps cannot be counted.

    Args:
        model: a `revzoo.Model`, a `ReversibleChain`, or a module that contains some.
        **options: arguments of `torch.compile`, such as `mode` or `dynamic`.
    Raises:
        InputError: the model has no reversible steps, or would put each of them in a CUDA graph.
    """
    asked = options.get("mode") in ("reduce-overhead", "max-autotune") or (options.get("options") or {}).get(
        "triton.cudagraphs"
    )
    if asked and isinstance(model, nn.Module) and any(p.is_cuda for p in model.parameters()):
        raise InputError(
            "Each step would be a CUDA graph of its own, and the next one would overwrite states that backward needs. "
            f"Received: {options}. Compile with mode='max-autotune-no-cudagraphs', or without, and capture the whole training "
            "step: docs/gpu.md."
        )
    chains = [m for m in model.modules() if isinstance(m, Network | ReversibleChain)] if isinstance(model, nn.Module) else []
    steps = [entry.module for chain in chains for entry in chain.layout() if entry.kind == "step"]
    if not steps:
        raise InputError(
            "compile_steps takes a revzoo.Model, a ReversibleChain or a module that contains one. Received: "
            f"{type(model).__name__}. Use torch.compile for other modules."
        )
    from revzoo.model.compiled_step import compile_calls  # takes longer to import than PyTorch itself

    compile_calls(list(dict.fromkeys(steps)), **options)
