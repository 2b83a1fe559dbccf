"""Two steps in place of one block: the first runs it for one of its residual branches, the second for the other.

    w[k+1] = a w[k] + b w[k-1] + c (w[k] + attention(w[k]))
    w[k+2] = a w[k+1] + b w[k] + c (w[k+1] + mlp(w[k+1]))

Each step runs the block's own code with what the other one runs silenced (`silenced.py`), so that norms, dropout, drop path and
scales stay the block's. In backward only one branch at a time keeps what autograd saves in it.
"""

from typing import Any

from torch import Tensor, nn

from revzoo.block_steps.chain import Arguments, BlockChain, BlockOutput, BlockStep
from revzoo.block_steps.conventions import find_state, get_state, put_state
from revzoo.block_steps.silenced import Branch, find_silent, remove_switches, silence
from revzoo.runtime.nested import map_tensors, tensors_in


class BranchStep(BlockStep):
    """A step whose f is one residual branch of a block, with the sum. That of the first branch replaces the block's `forward`.

    Args:
        block: the block.
        chain: what it shares with the other steps of its list.
        index: its place among them.
        branch: the branch.
        following: for the first branch, the step of the second.
    """

    following: "BranchStep | None"

    def __init__(self, block: nn.Module, chain: BlockChain, index: int, branch: Branch, following: "BranchStep | None" = None):
        super().__init__(block, chain, index)
        self.branch = branch
        self.__dict__["following"] = following  # no submodule: f is one branch

    @property
    def silent_modules(self) -> list[nn.Module]:
        """What does not run in this step."""
        return find_silent(self.block, self.branch)

    def remove(self) -> None:
        super().remove()
        remove_switches(self.block)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block returns, with the state after next in place of its own."""
        if self.following is None:
            raise AssertionError("Only the step of the first branch stands in place of a block.")
        _, key = find_state(self.block, self.name, args, kwargs)
        first = BlockOutput()
        state = get_state(self.run(args, kwargs, first, {}))
        extras, first.extras = first.extras, {}  # the graph holds it
        return self.following.run(*put_state(state, key, args, kwargs), BlockOutput(), extras)

    def forward(self, state: Tensor, arguments: Arguments) -> Tensor:
        """Return f(w[k]): what the block returns in place of the state, if all that the other step runs returns zeros."""
        returned = arguments.returned
        is_first_run = returned.dtype is None
        with silence(self.block, self.branch, self.name, arguments.dtype, arguments.extras) as seen:
            out = super().forward(state, arguments)
        if is_first_run and self.following is not None:
            returned.extras = leave_out_unreturned(seen, returned.value)
        return out


def leave_out_unreturned(seen: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return what submodules have returned, without tensors that the block does not return: nobody needs those any more."""
    handed_on = {id(t) for t in tensors_in(value)}
    return {path: map_tensors(lambda t: t if id(t) in handed_on else None, part) for path, part in seen.items()}
