"""A call of a module under `torch.compile`. The module stays as it is, and nothing of the call stays in the compiler.

The compiler holds what it makes where no garbage collector looks: with the code of functions, in tables of its own, and among
the globals of the function that it was given. So that function has code and globals of its own, the backend owns neither the
module nor the call, and what was made is taken out when the call ends.

A number that differs from the last call, such as an annealed temperature, becomes an input of the graph. Sizes of tensors are
always constants.
"""

import linecache
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any, cast
from weakref import finalize, ref

import torch
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.convert_frame import input_codes, output_codes
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, cached_backends
from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper
from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic
from torch._dynamo.types import GuardFail
from torch._dynamo.utils import get_metrics_context, guard_failures
from torch._dynamo.variables import builder
from torch._guards import CompileContext, TracingContext
from torch.fx import GraphModule
from torch.fx.graph_module import _loader

from revzoo.graph.assumption import WrongAnswerError, assuming, run_if, take_out
from revzoo.graph.expansion import expand_calls
from revzoo.runtime.compiling import capturing

Runner = Callable[..., Any]
Compile = Callable[[GraphModule, Sequence[Any]], Runner]
_waiting = list["_Backend"]()  # to be forgotten when nothing is being compiled
_SUBMODULE = re.compile(r"\._modules\['(\w+)'\]")  # in the compiler's words
_MOST_GRAPHS = 1024  # of one piece of code, such as the forward of a class that is not captured in one graph with its caller's


class CompiledCall:
    """A call of a module that runs captured graph by captured graph.

    Args:
        module: the module.
        compile: gets each graph with its inputs, and returns the function that runs it. It owns neither the module nor this.
        follows_numbers: whether numbers that change become inputs. If not, each value has a graph.

    Attributes:
        assumes: whether calls are captured with answers to what their code asks of values, as long as these are right.
        assumed: whether the last call was.
    """

    def __init__(self, module: nn.Module, compile: Compile, follows_numbers: bool = False):
        def call_module(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # The compiler counts captures by code object and gives up after a few.
        code, own = call_module.__code__.replace(), {"__builtins__": __builtins__, "__name__": __name__}
        function = FunctionType(code, own, closure=call_module.__closure__)
        self.backend = backend = _Backend(module, compile, defaultdict(FrameStateSizeEntry) if follows_numbers else None)
        self._run: Runner = torch._dynamo.config.patch(
            allow_rnn=True,  # as a call of the graph
            allow_unspec_int_on_nn_module=True,  # as an input of the graph, where it changes
            assume_static_by_default=True,
            automatic_dynamic_shapes=True,  # of what `_follow` says
            optimize_ddp=False,  # under DistributedDataParallel the compiler would cut the graph at its buckets
            skip_nnmodule_hook_guards=False,  # hooks may come and go
            recompile_limit=_MOST_GRAPHS,
            accumulated_recompile_limit=_MOST_GRAPHS,
        )(torch._dynamo.optimize(backend, guard_fail_fn=backend.note_failure)(function))
        self.assumes = self.assumed = True
        self.forget = partial(_forget, backend)  # drop what was compiled: the next call compiles anew
        finalize(self, _forget, backend)

    @property
    def has_numbers(self) -> bool:
        """Whether a number has changed, so that it is an input."""
        return any(entry.scalar is auto_dynamic for entry in (self.backend.numbers or {}).values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first, self.assumed = _loader.next_id, self.assumes
        try:
            with capturing(), assuming(self.assumes):
                return self._run(*args, **kwargs)
        except WrongAnswerError:
            self.assumed = False
            with capturing(), assuming(False):
                return self._run(*args, **kwargs)
        finally:
            self.backend.sources += range(first, _loader.next_id)
            for _ in range(len(_waiting)):
                _forget(_waiting.pop(0))


class _Backend:
    """What the compiler holds of a call.

    Args:
        module, compile: as for `CompiledCall`.
        numbers: what they have been so far, by the code that reads them and their name there; None: they are constants.

    Attributes:
        reason: what was so in an earlier call and is not any more, for which another graph had to be made.
    """

    def __init__(self, module: nn.Module, compile: Compile, numbers: dict[Any, FrameStateSizeEntry] | None):
        self.numbers = numbers
        self._module = ref(module)
        self.reason = ""
        self.environments = list[Any]()  # in which graphs were made
        self.sources = list[int]()  # numbers of graphs' texts, which PyTorch keeps
        self._compile = compile

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        self.environments.append(cast(Any, TracingContext.get().fake_mode).shape_env)
        if (module := self._module()) is not None:
            for each in (*module.parameters(), *module.buffers()):
                vars(each).pop("_dynamo_static_input_type", None)  # the compiler's mark
        conditions = take_out(graph)
        expand_calls(graph)
        return partial(run_if, conditions, self._compile(graph, inputs))

    def note_failure(self, failure: GuardFail) -> None:
        _, _, condition = failure.reason.partition(": ")
        self.reason = _SUBMODULE.sub(r".\1", condition).partition("  ")[0]


def is_own_backend(backend: Any) -> bool:
    """Return whether a backend of the compiler is that of a `CompiledCall`, or none."""
    return backend is None or isinstance(backend, _Backend)


def _forget(backend: _Backend) -> None:
    """Take out what the compiler has made with a backend: with the module's own functions too, if it ended a graph in them."""
    if CompileContext.try_get() is not None:  # the garbage collector runs while the compiler reads what would be freed
        _waiting.append(backend)
        return
    cached_backends.pop(id(backend), None)
    get_metrics_context()._edits.clear()  # tracebacks, which pile up
    while backend.sources:
        source = f"<eval_with_key>.{backend.sources.pop()}"
        _loader.eval_cache.pop(source, None)
        linecache.cache.pop(source, None)
    while backend.environments:
        if (each := backend.environments.pop()) is not None:
            each.tracked_fakes = None  # a cycle is never freed in which a view has its base, or a parameter its gradient
    guards = set[int]()
    for codes in (input_codes, output_codes):
        codes.seen = [each for each in codes.seen if each() is not None]
        for code in (cast(CodeType, each()) for each in codes.seen):
            entries = _debug_get_cache_entry_list(code)
            own = [entry for entry in entries if entry.backend is backend]
            guards.update(id(entry.guard_manager) for entry in own)
            if own and len(own) == len(entries):
                guard_failures.pop(code, None)
                reset_code(code)
            else:  # it is compiled without a plan, too
                for entry in own:
                    cast(Any, entry.guard_manager).extra_state.invalidate(entry, DeletedGuardManagerWrapper("released"))
    for each in list(vars(finalize)["_registry"]):  # of types, which live as long as the process
        _, function, *_ = each.peek() or (None, None)
        manager = getattr(getattr(function, "func", None), "__self__", None)
        if isinstance(manager, CheckFunctionManager):
            guard = getattr(manager, "guard_manager", None)
            if id(guard) in guards or isinstance(guard, DeletedGuardManagerWrapper):
                each.detach()


_process: Callable[..., FrameStateSizeEntry] = vars(builder)["process_automatic_dynamic"]


def _follow(tx: Any, name: str, entry: FrameStateSizeEntry, **options: Any) -> FrameStateSizeEntry:
    """Say for calls of this file what differs from earlier ones, in place of the compiler: numbers, but no sizes."""
    backend = getattr(tx.output.compiler_fn, "_torchdynamo_orig_backend", None)
    if not isinstance(backend, _Backend):
        return _process(tx, name, entry, **options)
    if backend.numbers is None or entry.scalar is auto_dynamic:  # a tensor
        return entry
    key = tx.f_code.co_filename, tx.f_code.co_firstlineno, name
    backend.numbers[key] |= entry
    return backend.numbers[key]


vars(builder)["process_automatic_dynamic"] = _follow
