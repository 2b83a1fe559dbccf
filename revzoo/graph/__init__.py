"""Plans for any module, reversible or not: what backward needs is kept within a budget, and made again where it is not.

    compiled_call                           a module's call under torch.compile, of which nothing stays
    expansion -> atoms -> digest -> capture its graphs, in pieces that can run again by themselves, and what tells graphs apart
    step_record                             one training step in FakeTensors: what it allocates, saves and computes
    span_choices -> equal_spans, nesting    what may be kept, and which pieces are made again together
    remaking                                what several of them make again
    front -> module_planner                 the least work for every budget; the plan is counted before its peak is promised
    counted_step, call_times                what a planned step does; how long its pieces take
    module_plan                             a plan, saved and applied
    spans -> spanned_graph -> recovery      the graph run by a plan, and what backward makes again
    table, figure                           a plan for the reader

Everything outside this package uses the names below, and the command `named_module`, `table` and `figure`.
"""

from revzoo.graph.counted_step import CallDetails, FrontPoint, Phase, PlanDetails
from revzoo.graph.module_plan import ModulePlan, release
from revzoo.graph.module_planner import plan_module, reforward

__all__ = ["CallDetails", "FrontPoint", "ModulePlan", "Phase", "PlanDetails", "plan_module", "reforward", "release"]
