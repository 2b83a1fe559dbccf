"""Plans under torch.compile: a graph in which a planned module runs is cut, so that it stays within the budget.

The compiler traces forward and backward into one joint graph, which its backend divides. In between, the search runs on that
graph: on what is compiled, with whatever is compiled together with the module. So it does not matter in which order one plans
and compiles, nor what: the module, its blocks, or the step around it.

What this takes of PyTorch that is private is in this file, and was tried with 2.10 and 2.14. Inductor has a setting for another
partitioner. For all others there is a pass before the partitioner; that then has to leave equal operations apart.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import SymInt, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.eval_frame import cached_backends
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch import config as autograd_config
from torch._functorch import partitioners
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils.hooks import RemovableHandle

from revzoo.errors import RevzooError
from revzoo.format import format_bytes
from revzoo.graph.compiled_call import is_own_backend
from revzoo.graph.front import find_front
from revzoo.graph.inversion import has_chains, invert
from revzoo.graph.joint_graph import JointGraph
from revzoo.graph.joint_record import record_joint
from revzoo.graph.partition import cut, is_cut
from revzoo.graph.spans import Spans
from revzoo.graph.step_record import Record
from revzoo.runtime.transforms import warn_user


@dataclass(frozen=True)
class Limit:
    """What a training step of a module may take.

    Args:
        name: of the module.
        activation_bytes: the peak of all memory, less weights, buffers, batch and all gradients.
        stored_bytes: the same if everything is stored.
        gradient_bytes: of all its parameters.
        loss_bytes: what the loss takes.
        parameter_bytes: of the parameters in the graph that is compiled, where they get a gradient.
        trained_bytes: of all its parameters that get one.
        is_measured: whether the compiled step was measured with it, so that no warning of what is counted is due.
    """

    name: str
    activation_bytes: int
    stored_bytes: int
    gradient_bytes: int
    loss_bytes: int
    parameter_bytes: int = 0
    trained_bytes: int = 0
    is_measured: bool = field(default=False, kw_only=True)

    @classmethod
    def unite(cls, limits: Sequence["Limit"]) -> "Limit":
        """Return the limit of all together."""
        name, *sizes = zip(*(astuple(each)[:-1] for each in limits), strict=True)
        return cls(" and ".join(name), *map(sum, sizes), is_measured=any(each.is_measured for each in limits))


_MOST = 0.99  # of the parameters that are trained: a graph with as much of them is that of the whole module
_has_compiled_others = False  # the compiler itself forgets that when it is reset
_limits: WeakKeyDictionary[nn.Module, tuple[Limit, RemovableHandle]] = WeakKeyDictionary()
"""What planned modules may take, and their hooks."""


def carry_limit(module: nn.Module, limit: Limit | None) -> None:
    """Keep what is compiled with a module within a limit from now on; None ends that. What was compiled is compiled anew."""
    if limit is None and module not in _limits:
        return
    if limit is None:
        _, hook = _limits.pop(module)
        hook.remove()
    else:
        _limits[module] = limit, module.register_forward_pre_hook(_look_at_backend)
        set_up()
    global _has_compiled_others
    _has_compiled_others |= not all(map(is_own_backend, cached_backends.values()))
    if _has_compiled_others:
        torch.compiler.reset()


def set_up() -> None:
    """Have all backends call this file. PyTorch's settings may be those of one thread."""
    if not isinstance(inductor_config.custom_partitioner_fn, _Partitioner):
        inductor_config.custom_partitioner_fn = _Partitioner(inductor_config.custom_partitioner_fn)
    if getattr(autograd_config.joint_custom_pass, "func", None) is not _pass:
        autograd_config.joint_custom_pass = partial(_pass, autograd_config.joint_custom_pass)
    if getattr(merge := vars(partitioners)["fx_graph_cse"], "func", None) is not _merge_equal:
        vars(partitioners)["fx_graph_cse"] = partial(_merge_equal, merge)


def _look_at_backend(*_: Any) -> None:
    """Set up in the thread of a call; say that nothing is cut where the backend has no joint graph. It is a hook."""
    if torch.compiler.is_dynamo_compiling():
        _warn_of_backend()
    else:
        set_up()


def prepare_chain() -> int:
    """Set up for a reversible chain that is being traced, whose numbers are constants of the graph.

    Returns: 0 where the backend traces no backward of which its own could be a part; 1 where a second run may round otherwise
        than the first, since a backend that fuses operations does not promise that; 2 where exact arithmetic keeps its bits.
    """
    set_up()
    output = InstructionTranslator.current_tx().output
    for name in ("specialize_float", "specialize_int"):
        output.add_cleanup_hook(partial(setattr, dynamo_config, name, getattr(dynamo_config, name)))
        setattr(dynamo_config, name, True)
    name = _get_backend_name()
    return 0 if _traces_no_backward(name) else 2 if name.startswith(("aot_eager", "inductor")) else 1


def _get_backend_name() -> str:
    return str(getattr(InstructionTranslator.current_tx().output.compiler_fn, "__name__", ""))


def _traces_no_backward(name: str) -> bool:
    return "eager" in name and not name.startswith("aot")


@torch.compiler.assume_constant_result  # run while the compiler traces
def _warn_of_backend() -> None:
    set_up()
    if _traces_no_backward(name := _get_backend_name()):
        warn_user(
            f"The backend {name!r} of torch.compile has no graph of backward to cut: what it compiles stores everything. "
            'Take "inductor" or "aot_eager", or leave the planned module uncompiled.'
        )


class _Partitioner(CustomPartitionerFn):
    """Inductor's partitioner, after a cut."""

    def __init__(self, other: CustomPartitionerFn | None):
        self._other = other

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        _cut_as_planned(gm, joint_inputs, partitioners.get_default_op_list().is_fusible, is_inductor=True)
        partition: Callable[..., tuple[GraphModule, GraphModule]] = (
            self._other or partitioners.min_cut_rematerialization_partition
        )
        return partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """Return what tells apart in the compiler's caches how graphs are cut."""
        own = get_hash_for_files(tuple(map(str, sorted(Path(__file__).parents[1].rglob("*.py")))))
        return own, self._other and self._other.uuid(), repr(_list_limits()), _ends_in_break()


def _pass(other: Callable[..., GraphModule] | None, graph: GraphModule, inputs: Any) -> GraphModule:
    graph = other(graph, inputs) if other is not None else graph
    if not isinstance(V.get_fake_mode(), FakeTensorMode):  # that Inductor sets
        _cut_as_planned(graph, inputs)
    return graph


def _merge_equal(merge: Callable[..., Graph], graph: Graph, *args: Any, **kwargs: Any) -> Graph:
    return graph if is_cut(graph) else merge(graph, *args, **kwargs)


def _list_limits() -> list[Limit]:
    """Return the limits of the modules with parameters in what is compiled now."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return []
    traced = context.fake_mode.fake_tensor_converter.meta_converter.describer.lookup_tensor
    limits = list[Limit]()
    parts = {part for module in _limits for part in module.modules() if part is not module}  # which keep the plan of the whole
    for module, (limit, _) in _limits.items():
        if module not in parts and (own := [p for p in module.parameters() if p in traced]):
            inside, every = (sum(p.nbytes for p in ps if p.requires_grad) for ps in (own, module.parameters()))
            limits.append(replace(limit, parameter_bytes=inside, trained_bytes=min(every, limit.gradient_bytes)))
    return limits


def _ends_in_break() -> bool:
    """Return whether what is compiled now is followed by other graphs of the same code."""
    try:
        end = InstructionTranslator.current_tx().output.compile_subgraph_reason
    except AttributeError:  # no code is traced now: backward is compiled when it first runs, and there is no other graph
        return False
    return end is not None and end.graph_break


def _list_changed() -> list[int]:
    """Return the numbers of the inputs that the graph changes, or that are changed once it has run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and "inner_meta" not in frame.f_locals:  # PyTorch's function that calls the partitioner
        frame = frame.f_back
    if frame is None:
        raise RevzooError(
            f"Plans are not carried out by torch.compile in PyTorch {torch.__version__}: it does not say which inputs a graph "
            "changes. Take a version that docs/compatibility.md names, or revzoo.release(module)."
        )
    return [i for i, each in enumerate(frame.f_locals["inner_meta"].input_info) if each.mutates_data]


def _cut_as_planned(
    module: GraphModule, inputs: Any, is_fusible: Callable[[Node], bool] = lambda _: False, is_inductor: bool = False
) -> None:
    """Cut a joint graph so that its step stays within the limits of the modules in it, if that needs a cut."""
    if not isinstance(inputs, tuple) or not inputs[1]:
        return
    has_reversible, limits = has_chains(module.graph), _list_limits()
    if has_reversible or limits:
        module.graph.eliminate_dead_code()  # which has no place among the others
    if has_reversible:
        invert(JointGraph.read(module.graph, len(inputs[0]), _list_changed(), is_fusible), is_inductor)
        module.recompile()
    if not limits:
        return
    read = partial(JointGraph.read, num_inputs=len(inputs[0]), changed=_list_changed(), is_fusible=is_fusible)
    joint, limit = read(module.graph), Limit.unite(limits)
    step = record_joint(joint, limit.loss_bytes)
    is_whole = limit.parameter_bytes >= _MOST * limit.trained_bytes
    if not is_whole:  # others run between its forward and its backward
        step = record_joint(joint, step.peak_bytes + limit.stored_bytes)
    elif _ends_in_break():
        alive = sum(each.bytes for each in step.storages if each.saved_by or each.last_use == len(step.atoms))
        following = max(0, limit.stored_bytes + limit.gradient_bytes - alive)  # in other graphs
        step = record_joint(joint, step.loss_bytes + following)
    most = _find_peak(step, limit, is_whole, any(isinstance(node.meta.get("val"), SymInt) for node in joint.inputs))
    most -= sum(atom.draws for atom in joint.atoms) * torch.get_rng_state().nbytes  # which are kept for what draws again
    if step.peak_bytes <= most:
        return
    front = find_front(step, budget=most)
    points = [peak for peak, _ in front.list_points()]

    def choose(number: int) -> Spans:
        return front.make_spans(front.choose(points[number - 1]) or ())

    number = max(1, bisect_right(points, most))
    while (counted := _count(module.graph, spans := choose(number), step.loss_bytes, read)) > most and number > 1:
        number = max(1, min(number - 1, bisect_right(points, points[number - 1] - (counted - most))))
    if is_whole and counted > most and not limit.is_measured:
        warn_user(
            f"What is compiled with {limit.name} needs {format_bytes(counted - most)} more than planned, and takes the least "
            "that it can. Plan with a larger budget, or for a smaller batch."
        )
    cut(joint, spans)
    module.recompile()


def _count(graph: Graph, spans: Spans, loss_bytes: int, read: Callable[[Graph], JointGraph]) -> int:
    """Return the peak of a graph's step if it is cut. The search predicts less where spans overlap in backward."""
    copied, nodes = Graph(), dict[Node, Node]()
    copied.output(copied.graph_copy(graph, nodes))
    cut(read(copied), spans.rename(nodes))
    return record_joint(read(copied), loss_bytes).peak_bytes


def _find_peak(step: Record, limit: Limit, is_whole: bool, is_for_any_batch: bool) -> int:
    """Return the peak that a step may have.

    Of a module in several graphs, each keeps its part of what the budget leaves beside the inside of one.
    """
    kept = sum(storage.bytes for storage in step.storages if storage.saved_by)
    gradients, room, of = step.left_bytes - step.fixed_bytes, limit.activation_bytes, max(1, limit.stored_bytes)
    stored = kept + max(step.gradient_bytes) - gradients
    if is_for_any_batch:  # it keeps the same part of each
        room = min(room, room * stored // of)
    if is_whole:
        return step.left_bytes + room
    passed = max(0, gradients - limit.parameter_bytes)  # from graph to graph
    return step.fixed_bytes + step.loss_bytes + max(0, max(0, room - stored) * (kept + passed) // of - passed)
