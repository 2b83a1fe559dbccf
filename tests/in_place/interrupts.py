"""Errors raised on purpose at calls of revzoo's functions, and everything that has to be as before after them."""

import ast
import logging
import random
import sys
import warnings
from collections import deque
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MethodType

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

import revzoo
from revzoo.runtime import observation, seams, tripwire
from revzoo.runtime.settings import Settings

ROOT = str(Path(revzoo.__file__).parent)


class Stop(Exception):
    """An error of the user's, such as one that forward raises."""


class Interrupt:
    """Raise an error at the beginning of the n-th call of a function of revzoo that is not part of cleaning up.

    What cleans up, the lines in `finally` and `except` and whatever `__exit__` calls, is left to do so: no program survives an
    error at every one of these. Nor are calls interrupted that can raise nothing: callbacks of weak references, and dispatch
    modes inside backward, after which PyTorch's engine hangs or ends the process.
    """

    def __init__(self, at, error):
        self.at, self.error, self.calls, self.where = at, error, 0, None

    def __enter__(self):
        sys.settrace(self._watch)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _watch(self, frame, event, _):
        if event != "call" or self.where or not frame.f_code.co_filename.startswith(ROOT):
            return
        self.calls += 1
        if self.calls >= self.at and not is_cleaning_up(frame):
            self.where = f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_lineno} {frame.f_code.co_qualname}"
            raise self.error


def is_cleaning_up(frame):
    is_first, dispatches = True, False
    while frame is not None:
        code = frame.f_code
        dispatches |= code.co_name == "__torch_dispatch__"
        if dispatches and code is _engine_run_backward.__code__:
            return True
        if code.co_name in ("__exit__", "__del__", "_log_freed") and (code.co_name[:2] == "__" or is_first):
            return True
        if code.co_filename.startswith(ROOT) and frame.f_lineno in find_cleanup(code.co_filename):
            return True
        frame, is_first = frame.f_back, False
    return False


@cache
def find_cleanup(file):
    """Return the lines of a file that are in `finally` or `except`."""
    tries = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.Try)]
    parts = [part for node in tries for part in (*node.handlers, *node.finalbody)]
    return {line for part in parts for line in range(part.lineno, part.end_lineno + 1)}


def count_calls(run):
    """Return how many calls of revzoo's functions there are."""
    with Interrupt(10**9, Stop) as interrupt:
        run()
    return interrupt.calls


class State:
    """A model and the process as they are now."""

    def __init__(self, model):
        self.seen = []  # alive, so that no other object gets the id of one of them
        self.parts = describe_process()
        for path, module in model.named_modules():
            self.parts[f"{path}: class"] = type(module)
            for name, value in vars(module).items():
                self.parts[f"{path}.{name}"] = list(value) if name == "_schedule" else self.describe(value)

    def describe(self, value, depth=0):
        self.seen.append(value)
        kind = type(value)
        if value is None or kind in (int, float, bool, str):
            return value
        if kind is MethodType:  # a new object whenever it is asked for
            return id(value.__self__), id(value.__func__)
        if depth > 5 or issubclass(kind, type | nn.Module):
            return id(value)
        if issubclass(kind, torch.Tensor):
            grad = None if not value.is_leaf else self.describe(value.grad, depth + 1)
            values = value.detach().clone().tolist() if kind in (torch.Tensor, nn.Parameter) else kind
            return id(value), value.requires_grad, grad, str(values)
        inside = []
        if issubclass(kind, dict):
            inside = [part for item in dict.items(value) for part in item]
        elif issubclass(kind, list | tuple | set | deque):
            base = next(base for base in (list, tuple, set, deque) if issubclass(kind, base))
            inside = base.__iter__(value)
            inside = sorted(inside, key=repr) if base is set else inside  # whose order is no part of it
        own = getattr(value, "__dict__", {}) if kind.__module__.partition(".")[0] not in ("revzoo", "torch") else {}
        return id(value), [self.describe(each, depth + 1) for each in (*inside, *own, *own.values())]

    def find_changes(self, model):
        now = State(model).parts
        return [f"{k}: {self.parts.get(k)} -> {now.get(k)}"[:600] for k in self.parts | now if self.parts.get(k) != now.get(k)]


def describe_process():
    torch.autocast_increment_nesting()
    dynamo = torch._dynamo.config
    return {
        "torch stream": torch.get_rng_state().sum().item(),
        "python stream": random.getstate(),
        "numpy stream": str(np.random.get_state()),
        "settings": Settings(torch.device("cpu"))._values,
        "autocast": (torch.autocast_decrement_nesting(), torch.is_autocast_enabled("cuda")),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "stacks": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "fake": torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE),
        "saved tensors hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "transforms": torch._C._functorch.maybe_current_level(),
        "compiler": (dynamo.optimize_ddp, dynamo.recompile_limit, dynamo.accumulated_recompile_limit),
        "compiling": torch.compiler.is_compiling(),
        "callback": torch._C._dynamo.eval_frame.get_eval_frame_callback(),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": (logging.root.level, logging.getLogger("torch._subclasses.fake_tensor").level),
        "revzoo": (seams.follower, tripwire.get_setting(), observation.states.observer, observation.calls.observer),
        "resize": torch.UntypedStorage.resize_,
    }


@contextmanager
def no_unraisable():
    """Note errors that Python could only print."""
    noted, before = [], sys.unraisablehook
    sys.unraisablehook = noted.append
    try:
        yield noted
    finally:
        sys.unraisablehook = before


def interrupt_everywhere(make, run, times, *, changes=False):
    """Interrupt a call in turn at so many of its own; yield where, and what had changed afterwards.

    Args:
        make: returns a model.
        run: the call.
        times: how often; one for each of the calls in `run` takes hours.
        changes: whether the call, if it succeeds, changes the model.
    """
    model, total = make(), count_calls(lambda: run(make()))
    for turn in range(times):
        before, error, raised = State(model), (KeyboardInterrupt, Stop)[turn % 2], None
        with no_unraisable() as unraisable:
            try:
                with Interrupt(1 + turn * total // times, error) as interrupt:
                    run(model)
            except BaseException as received:
                raised = type(received)
        found = before.find_changes(model) if raised or not changes else []
        if error is KeyboardInterrupt and interrupt.where and not raised and not unraisable:
            found.append("Ctrl-C was swallowed")
        if found:
            yield interrupt.where, raised, found
        if found or not raised:
            model = make()
