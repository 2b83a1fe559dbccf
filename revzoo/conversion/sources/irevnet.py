"""pytorch-i-revnet's i-RevNet, whose blocks are numbered through the network and whose layers within a block."""

from typing import Any

from torch import Tensor

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.sources.base import Tensors
from revzoo.conversion.sources.published import PublishedSource
from revzoo.conversion.sources.tensors import add_batch_counts
from revzoo.model.model import Model

_LAYERS = {"norm1": 0, "conv1": 2, "norm2": 3, "conv2": 5, "norm3": 7, "conv3": 9}  # their numbers within a block
_RULES = {  # from our keys, blocks numbered through the network, to theirs; the first block lacks a norm and its activation
    **{rf"blocks\.0\.f\.{layer}\.": f"stack.0.bottleneck_block.{i - 2}." for layer, i in _LAYERS.items()},
    **{rf"blocks\.(\d+)\.f\.{layer}\.": rf"stack.\1.bottleneck_block.{i}." for layer, i in _LAYERS.items()},
    r"head\.norm\.": "bn1.",
    r"head\.linear\.": "linear.",
}


class IRevNet(PublishedSource):
    """Published checkpoints such as that of irevnet_300, and those of the CIFAR networks that the authors' code trains.

    Source: pytorch-i-revnet `models/iRevNet.py`; `ILSVRC_main.py` writes the checkpoints.
    """

    name = "pytorch-i-revnet i-RevNet"
    families, head, parts = ("irevnet",), "linear.bias", {"split": "channel"}
    rules = _RULES

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file has the authors' keys."""
        return any(key.startswith("stack.0.bottleneck_block.") for key in tensors)

    def name_layers(self, model: Model) -> dict[str, str]:
        """Return the number of each of our blocks, which is one step."""
        steps = [entry.name.rpartition(".")[0] for entry in model.layout() if entry.kind == "step"]
        return {block: f"blocks.{i}" for i, block in enumerate(steps)}

    def make_spec(self, description: Any, choice: CouplingChoice) -> dict[str, Any]:
        """Return the zoo's spec, with all channels of zeros behind the image where channels are padded."""
        spec = super().make_spec(description, choice)
        if spec["stem"]["type"] == "pad_channels":
            spec["stem"]["zeros"] = "end"
        return spec

    def canonicalise(self, description: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors, and 0 for the counts of batches that it may lack."""
        complete, notes = add_batch_counts(tensors)
        if self._load_spec(description).stem.type == "pad_channels":
            notes.append("Stream 2 begins as zeros, which are rebuilt by exact arithmetic alone: train with model.exact=true")
        return complete, super().canonicalise(description, tensors)[1] + notes
