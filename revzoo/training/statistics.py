"""Statistics of BatchNorm, of which every process has its own while it trains."""

from timm.utils import distribute_bn

from revzoo.training.setup import Run


def share_statistics(run: Run) -> None:
    """Give all processes the same statistics; all processes call this together, before they evaluate or save.

    With DistributedDataParallel they are the first one's, which the next forward takes anyway. Processes that divide a network
    take the mean of theirs. Statistics are linear in those of the batches, so that the mean does not depend, but for rounding,
    on how often it is taken.
    """
    processes, is_divided = run.accelerator.num_processes, run.mesh is not None
    if processes > 1:
        for model in dict.fromkeys([run.model, run.evaluated]) if is_divided else [run.evaluated]:
            distribute_bn(model, processes, reduce=is_divided)
