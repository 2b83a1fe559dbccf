"""What a training step takes in several ways, next to the memory of a card: the answer of `revzoo fits`, in words."""

from contextlib import suppress
from dataclasses import dataclass

from revzoo.errors import InputError
from revzoo.format import format_bytes
from revzoo.planning.amount import USABLE_SHARE, read_amount

_LEAST_CARD = 10**5  # bytes; "24" and "24576" mean larger units


@dataclass(frozen=True)
class Method:
    """One way to run a training step.

    Args:
        name: "stored", "checkpointed", "inverted", "planned", "reversible", "random signs"; with ", chunked loss" or not.
        kept_bytes: of activations from forward to backward.
        peak_bytes: of all memory together.
        work: FLOPs over those of storing everything.
        largest: examples, or tokens of a text, that fit the card; 0 if none does.
        problem: why there is no such step; the numbers are then 0.
    """

    name: str
    kept_bytes: int = 0
    peak_bytes: int = 0
    work: float = 0.0
    largest: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Fits:
    """What fits a card. Printed, it says how a "no" becomes a "yes".

    Args:
        model: what is trained.
        size: examples in the batch, or tokens in a text, by `unit`.
        unit: "batch" or "tokens".
        card_bytes: memory of the card. Nine tenths of it may be taken.
        fixed_bytes: weights, gradients and optimizer state.
        methods: the first stores everything.
    """

    model: str
    size: int
    unit: str
    card_bytes: int
    fixed_bytes: int
    methods: tuple[Method, ...]

    @property
    def limit_bytes(self) -> int:
        """What a step may take."""
        return int(self.card_bytes * USABLE_SHARE)

    @property
    def card(self) -> str:
        """The memory of the card, as on its box."""
        return f"{self.card_bytes / 1e9:.3g} GB" if self.card_bytes >= 1e9 else f"{self.card_bytes / 1e6:.3g} MB"

    def does_fit(self, method: Method) -> bool:
        """Return whether the step's peak is within nine tenths of the card."""
        return not method.problem and method.peak_bytes <= self.limit_bytes

    def __str__(self) -> str:
        stored, *others = self.methods
        takes = f"{self.model} at {self._describe_size(self.size)} takes {format_bytes(stored.peak_bytes)} stored"
        best = max(self.methods, key=lambda method: method.largest)
        if self.does_fit(stored):
            more = f"; {best.name} up to {best.largest:,}" if best.largest > stored.largest else ""
            return f"{takes}: it fits {self.card}, up to {self._describe_size(stored.largest)}{more}."
        takes += f": it does not fit {self.card}"
        if fitting := [method for method in others if self.does_fit(method)]:
            least = min(fitting, key=lambda method: method.work)
            return f"{takes}; {least.name} it does, at {least.work:.2f} of the work."
        if best.largest:
            return f"{takes} in any way; {best.name} {self._describe_size(best.largest)} would."
        return (
            f"{takes} in any way. {format_bytes(self.fixed_bytes)} are weights, gradients and optimizer state: adapters, "
            "weights in bfloat16 or an optimizer of less state need fewer."
        )

    def _describe_size(self, size: int) -> str:
        return f"batch {size:,}" if self.unit == "batch" else f"{size:,} tokens"


def parse_card(card: str | int) -> int:
    """Return the memory of a card in bytes, given as bytes or as a size such as "24GB".

    Raises:
        InputError: it is neither, or too small for a card.
    """
    with suppress(InputError):  # of a budget, which may be other things, too
        number, unit = read_amount(card)
        if unit == "bytes" and number >= _LEAST_CARD:
            return int(number)
    raise InputError(f"A card has a size such as '24GB'. Received: {card!r}.")
