"""The graph of a module for one batch, captured without computing anything."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.analysis.dry_run import call, isolated, linear_loss
from revzoo.errors import InputError, join_names
from revzoo.runtime.graph.captured_call import capture_calls
from revzoo.runtime.nested import map_tensors, tensors_in


@dataclass(frozen=True)
class Capture:
    """The graph of a module for one batch.

    Args:
        graph: of torch calls; parameters and buffers are inputs.
        inputs: what it is called with, FakeTensors in place of tensors.
        outputs: what the module returned.
        results: the tensors in it, as the graph returned them.
        other_bytes: parameters, buffers and tensors of the batch that the graph does not take.
    """

    graph: GraphModule
    inputs: Sequence[Any]
    outputs: Any
    results: Sequence[Any]
    other_bytes: int

    def rebuild_outputs(self, results: Sequence[Any]) -> Any:
        """Return what the module returns where its graph returns `results`. What it makes of these is without a gradient."""
        by_identity = {id(then): now for then, now in zip(self.results, results, strict=True)}
        return map_tensors(lambda t: by_identity[id(t)] if id(t) in by_identity else t.detach(), self.outputs)

    def compute_loss(self, loss: Callable[[Any], Tensor] | None) -> Callable[[Sequence[Any]], Tensor]:
        """Return the loss as a function of what the graph returns; None is the sum of what the module returns of that."""
        if loss is not None:
            return lambda results: loss(self.rebuild_outputs(results))
        returned = {id(t) for t in tensors_in(self.outputs)}  # also in what cannot be rebuilt, such as a cache
        places = [i for i, then in enumerate(self.results) if id(then) in returned]
        return lambda results: linear_loss([results[i] for i in places])


def capture(module: nn.Module, batch: Any) -> Capture:
    """Return the graph of a module for a batch. Nothing is computed or allocated, and the module is left as it was.

    Args:
        module: any, in the state in which it will be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
    Raises:
        InputError: no module, an unusable batch, no parameter with a gradient, a compiled module, or a forward that is not
            one graph.
    """
    with isolated(module, batch, fake=True) as fake_batch:
        if compiled := [name or "the module" for name, m in module.named_modules() if m._compiled_call_impl is not None]:
            raise InputError(
                f"What compiled code keeps cannot be counted. Received: compiled {join_names(compiled, most=3)}. Plan before "
                "compiling, or call revzoo.release(module) if it was planned before."
            )
        found: list[tuple[GraphModule, Sequence[Any], Sequence[Any]]] = []

        def run_and_note(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                results = graph.forward(*given)
                found.append((graph, given, results))
                return results

            return run

        try:
            with _disable_current_modes(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler asks
                outputs = call(capture_calls(module, run_and_note), fake_batch)
        except DataDependentOutputException as error:
            raise InputError(
                f"The forward of {type(module).__name__} reads the values of tensors ({error}), by which it may decide what to "
                "compute, and without values it cannot be captured. Plan a submodule that does not."
            ) from error
        if len(found) != 1:
            number = f"{len(found)} graphs" if found else "no graph"
            raise InputError(
                f"The forward of {type(module).__name__} is {number} for torch.compile, and one can be planned. "
                "torch._dynamo.explain(module)(batch) says where it breaks: plan a submodule that does not, or mend the break."
            )
        ((graph, inputs, results),) = found
        present = [*module.parameters(), *module.buffers(), *tensors_in(fake_batch)]
        taken = {id(t.untyped_storage()) for t in tensors_in(list(inputs))}
        others = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in present}
        other_bytes = sum(size for storage, size in others.items() if storage not in taken)
        return Capture(graph, inputs, outputs, results, other_bytes)
