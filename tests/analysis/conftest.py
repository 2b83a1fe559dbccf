"""Small modules that the analysis tests build on."""

import pytest
from torch import nn


@pytest.fixture
def perceptron() -> nn.Module:
    """Return Linear-ReLU-Linear without biases; with 512 rows of 256 floats every activation has 512 KiB."""
    return nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 256, bias=False))


@pytest.fixture
def convolutions() -> nn.Module:
    """Return a network whose forward changes state: BatchNorm its buffers, dropout the random generator."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 6 * 6, 4)
    )
