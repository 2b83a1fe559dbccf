"""scikit-learn's handwritten digits: 1797 grey images of 8x8 pixels in ten classes, without a download.

The split is fixed: every fifth image of each class, in scikit-learn's order, is for testing (355 images); the other
1442 are for training. Pixels are normalised by the mean and standard deviation of the training images.
"""

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

from revzoo.data.base import Examples
from revzoo.data.options import DataOptions
from revzoo.data.random import make_generator
from revzoo.errors import DataError
from revzoo.spec.schema import ImageInput

_WHITE = 16  # the largest value of a pixel


class Digits(Examples):
    """Digits shifted by up to `shift` pixels in each direction, differently in every epoch; returned a whole batch at a time.

    Shapes: images (n, 1, 8, 8), labels (n,).
    """

    label_noun = "images"
    class_names = tuple("0123456789")

    def __init__(self, images: Tensor, labels: Tensor, shift: int, seed: int):
        self.labels, self.shift, self.seed = labels, shift, seed
        self.padded = nn.functional.pad(images, [shift] * 4, value=float(images.min()))
        self.start_epoch(0)

    def __len__(self) -> int:
        return len(self.labels)

    def start_epoch(self, epoch: int) -> None:
        """Draw by how much each digit is shifted in this epoch."""
        size = (len(self), 2)
        self.corners = torch.randint(0, 2 * self.shift + 1, size, generator=make_generator(self.seed, epoch, 1))

    def list_contents(self) -> list[bytes]:
        """Return the labels: the digits are always the same."""
        return [self.labels.numpy().tobytes()]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        which = torch.tensor(indices)
        side = torch.arange(self.padded.shape[-1] - 2 * self.shift)
        rows, columns = (self.corners[which].T[:, :, None] + side).unbind()  # (B, 8) each
        images = self.padded[which[:, None, None], 0, rows[:, :, None], columns[:, None, :]]
        return images[:, None], self.labels[which]


def load_digits(options: DataOptions, input: ImageInput, seed: int) -> tuple[Digits, Digits]:
    """Return the training digits and the test digits.

    Raises:
        DataError: the model does not take 8x8 images of one channel, or the shift is as large as an image.
    """
    if (input.channels, *input.size) != (1, 8, 8):
        size = "x".join(map(str, input.size))
        raise DataError(
            f"Digits are images of 1 channel and 8x8 pixels. Received: a model for {input.channels} channels and {size}. "
            "Use model.name=rev_vit_digits or revnet_digits, or model.overrides=[input.channels=1,input.size=[8,8]]."
        )
    if options.shift >= 8:
        raise DataError(f"Digits have 8x8 pixels. Received: data.shift={options.shift}. Use data.shift=7 or less.")
    pixels, classes = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).to(torch.float32).view(-1, 1, 8, 8)
    labels = torch.from_numpy(classes).to(torch.int64)
    rank = np.array([np.sum(classes[:i] == label) for i, label in enumerate(classes)])  # index within the sample's class
    test = torch.from_numpy(rank % 5 == 4)
    mean, std = images[~test].mean(), images[~test].std()
    images = (images - mean) / std
    test_digits = Digits(images[test], labels[test], 0, seed)
    test_digits.data_config = {"mean": (float(mean) / _WHITE,), "std": (float(std) / _WHITE,), "crop_pct": 1.0}
    return Digits(images[~test], labels[~test], options.shift, seed), test_digits
