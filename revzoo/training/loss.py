"""What is minimised: cross-entropy, with weights of classes and with mixup of the batch of all processes.

timm's mixup pairs the first image of a batch with the last, the second with the last but one, and so on. `EpochSampler` gives
both images of a pair to the same process, so nothing is exchanged, and all random numbers follow from a key that is the same
in every process. So the mixed batch is the same, however many processes share it.
"""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from torch import Tensor, nn

from revzoo.data.base import IGNORED, Data
from revzoo.data.random import derive_seed
from revzoo.errors import SpecError, join_names
from revzoo.spec.parsing import to_plain
from revzoo.training.options import Recipe


class Loss(nn.Module):
    """Mean cross-entropy over the labels of a batch that are not IGNORED, each weighted by its class.

    The gradient of an update is the mean of its batches' gradients, however many labels each batch has. Weights are not divided
    by their sum in the batch, as PyTorch does: so it does not matter how processes share one.

    Shapes: logits (B, C), targets (B,) or (B, C) of probabilities; or (B, N, C) and (B, N).
    Args:
        smoothing: label smoothing, in [0, 1); 0 where the targets are smoothed already.
        weights: weight of each class (C,); None: all are 1.
        mixup: mixes this process's share of a batch; None: batches are taken as they are.
    """

    weights: Tensor | None

    def __init__(self, smoothing: float, weights: Tensor | None = None, mixup: "SharedMixup | None" = None):
        super().__init__()
        self.smoothing, self._mixup = smoothing, mixup
        self.register_buffer("weights", weights)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if logits.dim() == 3:
            logits, targets = logits.flatten(0, 1), targets.flatten()
        arguments: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": self.smoothing}
        if self.weights is None:
            return nn.functional.cross_entropy(logits, targets, **arguments)
        total = nn.functional.cross_entropy(logits, targets, self.weights, reduction="sum", **arguments)
        return total / len(targets)

    def mix(self, batch: Tensor, labels: Tensor, *key: int) -> tuple[Tensor, Tensor]:
        """Return what a batch is trained on, and its targets; the key determines all random numbers, in every process alike."""
        return (batch, labels) if self._mixup is None else self._mixup(batch, labels, *key)


def make_loss(recipe: Recipe, data: Data, outputs: int, share: int) -> Loss:
    """Return the loss of a recipe.

    Args:
        recipe: the recipe.
        data: what is trained on.
        outputs: of the model.
        share: number of this process's share of a batch.

    Raises:
        SpecError: the data have no classes, other ones than are weighted, or one of them has no example.
    """
    weights, options = weigh_classes(recipe, data, outputs), recipe.mixup
    if options is None:
        return Loss(recipe.train.label_smoothing, weights)
    mixup = Mixup(**asdict(options), label_smoothing=recipe.train.label_smoothing, num_classes=outputs)
    return Loss(0.0, weights, SharedMixup(mixup, share))  # mixup smooths the targets


def weigh_classes(recipe: Recipe, data: Data, outputs: int) -> Tensor | None:
    """Return the weight of every output, as `train.class_weights` says; None where it says nothing.

    Balanced weights are scikit-learn's: n / (k n_c) for the n_c of n examples that are of class c, of k classes. Over the
    training examples their mean is 1. Outputs without a class have the weight 1.

    Shapes: returns (outputs,).
    Raises:
        SpecError: the data have no classes, other ones than are weighted, or one of them has no example.
    """
    chosen = recipe.train.class_weights
    if chosen is None:
        return None
    classes, names = data.num_classes, data.class_names
    if classes is None or names is None:
        raise _refuse(recipe, "null for a language model, whose labels are not classes")
    if isinstance(chosen, tuple):
        if len(chosen) != classes:
            order = join_names(names)
            raise _refuse(recipe, f"a list of {classes} numbers, for the classes in this order: {order}; or balanced")
        weights = torch.tensor(chosen)
    else:
        if data.train_labels is None:
            raise _refuse(recipe, "a list of numbers: these data do not list their labels (attribute `targets`)")
        counts = torch.bincount(torch.as_tensor(data.train_labels), minlength=classes)
        if missing := [name for name, count in zip(names, counts.tolist(), strict=True) if count == 0]:
            raise _refuse(recipe, f"a list of numbers: there are no training examples of {join_names(missing)}")
        weights = counts.sum() / (classes * counts)
    return torch.cat([weights, torch.ones(outputs - classes)])


def _refuse(recipe: Recipe, allowed: str) -> SpecError:
    return recipe.error("train.class_weights", str(to_plain(recipe.train.class_weights)), allowed)


class SharedMixup:
    """timm's `Mixup` of the whole batch, computed on a process's share of it.

    With mode "batch" one strength holds for all images; with "pair" and "elem" each pair of images draws its own.

    Args:
        mixup: timm's object with its options.
        share: number of this process's share of the batch.
    """

    def __init__(self, mixup: Mixup, share: int):
        self._mixup, self._share = mixup, share

    def __call__(self, images: Tensor, labels: Tensor, *key: int) -> tuple[Tensor, Tensor]:
        """Return mixed images (B, C, H, W) and probabilities (B, classes); NumPy's global generator is seeded by the key."""
        if self._mixup.mode == "batch":
            return self._mix(images, labels, *key)
        targets, half = [], len(images) // 2
        for k in range(half):  # timm's `elem` and `pair` of two images are those of a pair in a larger batch
            pair = [k, len(images) - 1 - k]
            images[pair], probabilities = self._mix(images[pair], labels[pair], *key, self._share * half + k)
            targets.append(probabilities)
        first, second = torch.stack(targets, 1)
        return images, torch.cat([first, second.flip(0)])

    def _mix(self, images: Tensor, labels: Tensor, *key: int) -> tuple[Tensor, Tensor]:
        np.random.seed(derive_seed(*key) % 2**32)
        return self._mixup(images, labels)
