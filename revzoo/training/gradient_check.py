"""Before training goes on: are the gradients of the run's model, with its weights and schedule, those of storing everything?"""

import copy
import math
import warnings
from contextlib import suppress

import torch

from revzoo.analysis.chains import find_chains
from revzoo.analysis.verify import verify
from revzoo.data.random import seeded
from revzoo.device import forget_peak
from revzoo.errors import InputError, RevzooError
from revzoo.runtime.lazy_logits import WholeLogitsWarning
from revzoo.training.run import Run

_EXAMPLES = 2


def describe_gradients(run: Run) -> str:
    """Verify the model on a few random examples and return a line on it; empty for a model that inverts nothing.

    The model, its gradients, its buffers and the random generators are left as they are. Nothing is communicated, so one
    process does it for all.

    Cost: that of `revzoo.verify` with two examples, once.
    """
    if not find_chains(run.model):
        return ""
    # With several processes verify would not copy the model, whose parameters start the exchange of gradients.
    # A divided one every process runs itself.
    is_ddp = run.accelerator.num_processes > 1 and run.mesh is None
    model = copy.deepcopy(run.model) if is_ddp else run.model
    examples = min(_EXAMPLES, run.batch_size)
    lookahead, model.lookahead = model.lookahead, 0  # which changes no bit, and steps aside where verify draws random numbers
    try:
        with seeded(run.recipe.train.seed), run.accelerator.autocast(), warnings.catch_warnings():
            warnings.simplefilter("ignore", WholeLogitsWarning)  # of two examples
            report = verify(model, model.example_input(examples, run.accelerator.device))
    except torch.OutOfMemoryError as error:
        if run.mesh is not None:  # the other processes cannot go on without this one
            raise RevzooError(
                f"There is too little memory to verify gradients on {examples} examples with everything stored. Divide "
                "the network over more processes, or set train.offload=true."
            ) from error
        return "Gradients are not verified: there is too little memory to compare them with those of storing everything."
    finally:
        model.lookahead = lookahead
        forget_peak(run.accelerator.device)  # the peak of verifying is not the peak of training
    if report.ok:
        agreement = "bit-identical" if report.identical else f"relative error {report.gradient_error:.1e}"
        return f"Gradients verified on {examples} examples against storing everything: {agreement}."
    advice = " Use model.schedule=recompute." if math.isfinite(report.gradient_error) else ""
    if advice and not model.exact:
        with suppress(InputError):
            model.coupling.require_exact()
            advice = " Use model.exact=true: inversion is then exact."
    return (
        f"Warning: gradients are not those of storing everything (relative error {report.gradient_error:.1e} on {examples} "
        f"examples). {report.problems[0]}{advice}"
    )
