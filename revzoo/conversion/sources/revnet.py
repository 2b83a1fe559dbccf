"""revnet-public's RevNet, as TensorFlow saved it: the first unit of a stage, numbered 0, is the transition before it."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping, rename
from revzoo.conversion.sources.base import Tensors
from revzoo.conversion.sources.published import PublishedNetwork, PublishedSource
from revzoo.conversion.sources.tensors import add_batch_counts
from revzoo.model.model import Model

_FIRST = "init/init_conv/w"
_NORM = {"weight": "gamma", "bias": "beta", "running_mean": "ema_mean", "running_var": "ema_var"}
_OTHER = {"weight": "w", "bias": "b"}
_RULES = {  # from our keys, blocks named as theirs, to theirs
    r"stem\.conv\.": "init/init_conv/",
    r"stem\.norm\.": "init/init_bn/",
    r"(\w+)\.([fg])\.norm(\d)\.": r"\1/\2/sub\3/bn\3/",
    r"(\w+)\.([fg])\.conv(\d)\.": r"\1/\2/sub\3/conv\3/",
    r"(\w+)\.shortcut(\d)\.": r"\1/x\2_bottleneck/project/",
    r"fuse\.norm\.": "unit_last/final_bn/",
    r"head\.linear\.": "logit/",
}
_IMAGENET = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear", "crop_pct": 0.875, "crop_mode": "squash"}
_CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (1 / 255,) * 3, "crop_pct": 1.0}  # theirs subtract a mean image from bytes


class RevNet(PublishedSource):
    """Published checkpoints such as model.ckpt-600000 of revnet_104.

    Source: revnet-public `resnet/models/resnet_model.py` and `revnet_model.py`. TensorFlow's SAME padding is that of the
    converted network too.
    """

    name = "revnet-public RevNet"
    families, head, parts = ("revnet",), "logit/b", {"split": "channel"}
    rules = _RULES

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a checkpoint has the authors' names, within any scope."""
        return any(key.endswith(_FIRST) for key in tensors)

    def ignores(self, key: str) -> bool:
        """Return whether a variable belongs to training alone."""
        return key.endswith(("/Momentum", "learn_rate", "global_step"))

    def complete(self, description: Any, tensors: Tensors) -> PublishedNetwork:
        """Return the network that a checkpoint has, and how images were prepared for it."""
        network = super().complete(description, self._strip_scope(tensors))
        return replace(network, pretrained_cfg=_IMAGENET if network.spec.stem.arguments.get("pool") else _CIFAR)

    def canonicalise(self, description: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a checkpoint's tensors outside its scope, and 0 for counts of batches, which TensorFlow does not have."""
        complete, _ = add_batch_counts(self._strip_scope(tensors))
        return complete, super().canonicalise(description, tensors)[1]

    def make_spec(self, description: Any, choice: CouplingChoice) -> dict[str, Any]:
        """Return the zoo's spec, padded as TensorFlow pads."""
        spec = super().make_spec(description, choice)
        for part in (spec["stem"], *(stage["transition"] for stage in spec["stages"])):
            part["padding"] = "same"
        return spec

    def name_layers(self, model: Model) -> dict[str, str]:
        """Return the unit that each of our transitions and blocks is."""
        units: dict[str, str] = {}
        for i, stage in enumerate(model.spec.stages):
            units[f"stages.{i}.transition"] = f"unit_{i + 1}_0"
            units |= {f"stages.{i}.blocks.{j}": f"unit_{i + 1}_{j + 1}" for j in range(stage.depth)}
        return units

    def map_tensor(self, ours: str, theirs: str, tensor: Tensor, description: Any) -> TensorMapping:
        """Return the mapping of one tensor: inputs and outputs of weights come last in TensorFlow."""
        place, _, leaf = theirs.rpartition("/")
        leaf = (_NORM if tensor.dim() == 1 and "bn" in place else _OTHER).get(leaf, leaf)
        return TensorMapping((ours,), (f"{place}/{leaf}",), "transposed") if leaf == "w" else rename(ours, f"{place}/{leaf}")

    def _strip_scope(self, tensors: Tensors) -> dict[str, Tensor]:
        scope = next((key.removesuffix(_FIRST) for key in tensors if key.endswith(_FIRST)), "")
        return {key.removeprefix(scope): tensor for key, tensor in tensors.items()}
