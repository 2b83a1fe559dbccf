"""Planning: the fastest schedule whose training step fits a memory budget.

`profiling/` describes a model by bytes and costs, `solvers/` choose the modes, and `planner.py` joins the two into a `Plan`.
"""
