"""The coupling that a user chooses for a converted network, and what it changes in the spec."""

from dataclasses import dataclass
from typing import Any, Literal

from revzoo.bounds import Sign

CouplingName = Literal["additive", "dual_residual", "momentum"]
B_ARGUMENTS = {"momentum": "m", "dual_residual": "beta"}  # the argument of each coupling that sets b


@dataclass(frozen=True)
class CouplingChoice:
    """The coupling that a network is converted to.

    Args:
        name: "momentum" and "dual_residual" start as nearly the original's function, "additive" as another function.
        kept_bits: s of b = 2^-s on a grid; None: floating point.
        b: size of b where kept_bits is None: m of momentum, beta of dual_residual. With 0 the network is the original's
            function itself and cannot be inverted.
        sign: of b, with momentum and kept bits: "random" is drawn for each example in training, with b = 0 in evaluation.
    """

    name: CouplingName = "momentum"
    kept_bits: int | None = 8
    b: float = 0.0
    sign: Sign = "fixed"

    @property
    def is_additive(self) -> bool:
        """Whether a step adds f to the older stream; the current one is no term of its own."""
        return self.name == "additive"

    @property
    def fuse(self) -> Literal["mean", "last"]:
        """How the two streams become one: except with the additive coupling, the newer stream is the original's only one."""
        return "mean" if self.is_additive else "last"

    def describe(self, residual: bool) -> dict[str, Any]:
        """Return the coupling as a spec has it.

        Args:
            residual: True if f is a branch, so the coupling adds the current state; False if f contains its own residual
                (sub-blocks of post-norm transformers, blocks of a ResNet).
        """
        if self.is_additive:
            return {"type": "additive"}
        size = {B_ARGUMENTS[self.name]: self.b} if self.kept_bits is None else {"kept_bits": self.kept_bits}
        if self.name == "momentum":
            sign = {} if self.sign == "fixed" else {"sign": self.sign}
            return {"type": "momentum", **size, **sign, "gain": 1.0, "residual": residual}
        return {"type": "dual_residual", **size, "alpha": 1.0 if residual else 0.0}
