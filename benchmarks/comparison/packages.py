"""Other packages, driven by their public classes with their defaults: one function makes the steps of a chain into a module.

The modules take and return one tensor that holds both streams side by side. A package is imported when its function is called;
its ImportError is for the caller to report.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from comparison.net import Net


def make_memcnn(steps: Sequence[nn.Module], net: Net) -> nn.Module:
    """Return additive couplings of memcnn, each in a wrapper that inverts it."""
    from memcnn import AdditiveCoupling, InvertibleModuleWrapper

    return nn.Sequential(*(InvertibleModuleWrapper(AdditiveCoupling(f, g, split_dim=net.features)) for f, g in _pair_up(steps)))


def make_revtorch(steps: Sequence[nn.Module], net: Net) -> nn.Module:
    """Return the sequence of RevTorch."""
    from revtorch import ReversibleBlock, ReversibleSequence

    blocks = (ReversibleBlock(f, g, split_along_dim=net.features) for f, g in _pair_up(steps))
    out: nn.Module = ReversibleSequence(nn.ModuleList(blocks))
    return out


def make_revlib(steps: Sequence[nn.Module], net: Net) -> nn.Module:
    """Return the sequence of revlib, in its default memory mode."""
    from revlib import ReversibleSequential

    out: nn.Module = ReversibleSequential(*steps, split_dim=net.features)
    return out


def make_reformer_pytorch(steps: Sequence[nn.Module], net: Net) -> nn.Module:
    """Return the sequence of reformer_pytorch, which splits dimension 2 whatever it is."""
    from reformer_pytorch.reversible import ReversibleSequence

    out: nn.Module = ReversibleSequence(nn.ModuleList(nn.ModuleList(pair) for pair in _pair_up(steps)))
    return out


def make_xformers(steps: Sequence[nn.Module], net: Net) -> nn.Module:
    """Return the sequence that early releases of xformers have; it splits the last dimension."""
    from xformers.components.reversible import ReversibleSequence

    out: nn.Module = ReversibleSequence(nn.ModuleList(nn.ModuleList(pair) for pair in _pair_up(steps)))
    return out


def make_freia(steps: Sequence[nn.Module], net: Net) -> nn.Module:
    """Return NICE blocks of FrEIA, which split dimension 1; they are invertible, but save no memory."""
    from FrEIA.framework import SequenceINN
    from FrEIA.modules import NICECouplingBlock

    sequence = SequenceINN(2 * net.shape[1], *net.shape[2:])
    for pair in _pair_up(steps):
        parts = iter(pair)
        sequence.append(NICECouplingBlock, subnet_constructor=lambda *_, parts=parts: next(parts))
    return _WithoutJacobian(sequence)


class _WithoutJacobian(nn.Module):
    """Leave out the log-determinant of the Jacobian that FrEIA returns as well."""

    def __init__(self, sequence: nn.Module):
        super().__init__()
        self.sequence = sequence

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.sequence(x, jac=False)[0]
        return out


def _pair_up(steps: Sequence[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    """Return (F, G) of every block."""
    return list(zip(steps[::2], steps[1::2], strict=True))
