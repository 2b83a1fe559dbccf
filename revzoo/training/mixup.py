"""Mixup and cutmix of the batch of all processes, of which each has a share.

timm pairs the first image of a batch with the last, the second with the last but one, and so on. `EpochSampler` gives both
images of a pair to the same process, so nothing is exchanged, and all random numbers follow from a key that is the same in
every process. So the mixed batch is the same, however many processes share it.
"""

import numpy as np
import torch
from timm.data import Mixup
from torch import Tensor

from revzoo.data.random import derive_seed


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
        mixed: tuple[Tensor, Tensor] = self._mixup(images, labels)
        return mixed
