"""The model that users have: a network that knows its spec, checks its input, and has the methods of timm and the hub."""

from collections.abc import Sequence
from math import inf
from typing import cast

import torch
from torch import Tensor

from revzoo.errors import InputError, PartArgumentError
from revzoo.model import inputs
from revzoo.model.generate import generate
from revzoo.model.hub_methods import HubMethods
from revzoo.model.timm_methods import TimmMethods
from revzoo.registry import couplings
from revzoo.runtime.coupling import Coupling
from revzoo.runtime.lookahead import begin_lookahead
from revzoo.spec.edit import with_coupling, with_outputs
from revzoo.spec.schema import Spec


class Model(HubMethods, TimmMethods):
    """A reversible network built from a spec; make one with `revzoo.create` or `revzoo.build`.

    Shapes: x: images (B, C, H, W) of the spec's channels and size, or ids (B, N) with N up to the spec's length.
        attention_mask: (B, N), 1 or True for tokens; by default all ids but the spec's padding. Texts only.
        Returns logits, (B, outputs) or (B, N, outputs), depending on the head.
    """

    spec: Spec
    _class_names: tuple[str, ...] | None = None

    @property
    def num_outputs(self) -> int:
        """Size of the logits' last dimension: the number of classes or, for a language model, of ids."""
        return cast(int, self.head.outputs)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, in the order of the outputs; None where nobody has named them.

        They are saved with the weights. There may be fewer than outputs. A new head has none.

        Raises:
            InputError: another thing than names, or more of them than outputs, is assigned.
        """
        return self._class_names

    @class_names.setter
    def class_names(self, names: Sequence[str] | None) -> None:
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            raise InputError(f"class_names is a list of strings. Received: {names!r}.")
        if names is not None and len(names) > self.num_outputs:
            raise InputError(f"{self.spec.name} has {self.num_outputs} outputs. Received: {len(names)} class_names.")
        self._class_names = None if names is None else tuple(names)

    def set_coupling(self, **arguments: object) -> None:
        """Change arguments of the coupling, such as `kept_bits=4`, in the model and in its spec.

        The weights stay the same, but the function changes. Fine-tuning of a converted network moves its coupling this way.

        Args:
            **arguments: new values by name. None resets an argument to its default; arguments not given keep their values.

        Raises:
            InputError: an argument that the coupling does not have, or a value that it does not allow.
        """
        spec = with_coupling(self.spec, arguments)
        try:
            coupling: Coupling = couplings[spec.coupling.type](**spec.coupling.arguments)
        except PartArgumentError as error:
            raise InputError(f"The coupling {spec.coupling.type} cannot take these arguments. {error}") from error
        if self._exact:
            coupling.require_exact()
        self.spec, self.coupling = spec, coupling
        self._store_what_rounds()

    def reset_head(self, num_outputs: int) -> None:
        """Replace the last linear layer by a new one with random weights and `num_outputs` outputs, in the spec too.

        Raises:
            InputError: `num_outputs` is not an integer >= 1, or the head's outputs are the ids of a vocabulary.
        """
        like = None if self.num_classes else next(self.parameters())
        self.head.reset(check_num_outputs(num_outputs), like)
        self.spec, self.class_names = with_outputs(self.spec, num_outputs), None

    def example_input(self, batch_size: int = 1, device: torch.device | str | None = None) -> Tensor:
        """Return a random batch: images (batch_size, C, H, W), or ids (batch_size, length) without padding."""
        reference = next(self.parameters())
        return inputs.make_example(self.spec, batch_size, device or reference.device, reference.dtype)

    def forward_features(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the input of the head: the fused and normalised streams, before pooling unless the fuse pools.

        Shapes: x, attention_mask: as for the model. Returns (B, N, D) or (B, C', H', W'), depending on the fuse.
        Raises:
            InputError: `x` is not a batch of the spec's input, or the mask does not fit.
        """
        return self._compute_features(x, inputs.make_mask(self.spec, x, attention_mask), begin_lookahead(self._lookahead))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, inputs.make_mask(self.spec, x, attention_mask))

    def generate(
        self, ids: Tensor, *, tokens: int = 100, temperature: float = 1.0, top_k: int | None = None, seed: int | None = None
    ) -> Tensor:
        """Continue texts of a causal language model, one token after the other, up to the spec's length.

        Keys and values of all attentions are kept, so that a new token costs the work of one token.

        Shapes: ids: (B, N) with 1 <= N < the spec's length; returns (B, N + tokens), or fewer where the length is reached.
        Args:
            ids: the texts, all of one length and without padding.
            tokens: how many to add.
            temperature: by which logits are divided before a token is drawn, >= 0; 0: the most probable token is taken.
            top_k: draw among this many of the most probable tokens, >= 1; None: among all.
            seed: of the draws; None: another one each time.

        Raises:
            InputError: the network is no causal language model, the ids do not fit it, or another argument is out of range.
        """
        inputs.make_mask(self.spec, ids, None)
        if not (isinstance(tokens, int) and tokens >= 0 and 0 <= temperature < inf and (top_k is None or top_k >= 1)):
            received = f"tokens={tokens!r}, temperature={temperature!r}, top_k={top_k!r}"
            raise InputError(f"tokens and temperature are not negative, and top_k is at least 1. Received: {received}.")
        return generate(self, ids, tokens, temperature, top_k, seed)


def check_num_outputs(num_outputs: object) -> int:
    """Return `num_outputs`, or raise InputError if it is not an integer >= 1."""
    if not isinstance(num_outputs, int) or isinstance(num_outputs, bool) or num_outputs < 1:
        raise InputError(f"num_outputs is an integer >= 1. Received: {num_outputs!r}.")
    return num_outputs
