"""Forward and backward of a training step as one CUDA graph (`train.cuda_graph`), which the host starts with one call.

The first batches are trained without a graph: kernels are loaded and chosen, and everything is checked that the host can check.
Then one step is captured, which runs nothing, and from there on replayed. Every batch is copied to where the graph reads; one
of another shape is trained without the graph. Clipping and update are outside of it.

A replay draws the random numbers that the step would draw: PyTorch gives the graph the state of the generator each time.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from revzoo.errors import RevzooError

StepFunction = Callable[[Tensor, Tensor], Tensor]  # of a batch and its targets, adds to the gradients and returns the loss
EAGER_STEPS = 3  # before the capture, as PyTorch advises


class CapturedStep:
    """A training step on a CUDA device that is captured after a few calls, and then replayed.

    Args:
        step: forward and backward.
        parameters: whose gradients it leaves; each call begins with none.
        batch_size: examples of a full batch.
    """

    def __init__(self, step: StepFunction, parameters: Iterable[nn.Parameter], batch_size: int):
        self._step = step
        self._batch_size = batch_size
        self._parameters = [p for p in parameters if p.requires_grad]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream()
        self._eager_left = EAGER_STEPS
        self._inputs: tuple[Tensor, Tensor] | None = None  # where the graph reads
        self._loss: Tensor
        self._gradients: list[Tensor | None]

    def __call__(self, batch: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, detached; it is overwritten by the next call.

        Raises:
            RevzooError: the step cannot be captured.
        """
        if len(batch) != self._batch_size:
            return self._run_eagerly(batch, targets)
        if self._inputs is None:
            self._inputs = batch.clone(), targets.clone()
        if any(x.shape != static.shape for x, static in zip((batch, targets), self._inputs, strict=True)):
            return self._run_eagerly(batch, targets)
        if self._eager_left:
            self._eager_left -= 1
            return self._run_eagerly(batch, targets)
        for static, given in zip(self._inputs, (batch, targets), strict=True):
            static.copy_(given)
        if self._graph is None:
            self._graph = self._capture(*self._inputs)
        self._graph.replay()
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient
        return self._loss

    def _run_eagerly(self, batch: Tensor, targets: Tensor) -> Tensor:
        """Run a step on the stream that is captured later: what autograd keeps of the parameters belongs to one stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._step(batch, targets).detach()
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, batch: Tensor, targets: Tensor) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # A loader's thread allocates pinned memory, which in PyTorch's default mode would end the capture.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = self._step(batch, targets).detach()
        except RevzooError:
            raise
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a spoilt capture raises, too
            reason = str(cause).splitlines()[0].rstrip(".")
            raise RevzooError(
                f"The training step cannot be captured in a CUDA graph: {reason}. Train with train.cuda_graph=false."
            ) from error
        self._gradients = [p.grad for p in self._parameters]
        return graph
