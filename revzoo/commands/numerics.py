"""`revzoo numerics`: what rounding does to rebuilt activations and gradients."""

import argparse
import json
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from revzoo.commands.model_name import declare_name, read_name
from revzoo.commands.parser import (
    DTYPE_HELP,
    DTYPES,
    JSON_HELP,
    Parser,
    positive_count,
    require_png,
)
from revzoo.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from revzoo.analysis.numerics import TrainingPoint
    from revzoo.model.network import Model

SUMMARY = "Measure the noise in rebuilt activations and what it does to gradients."

_POINTS = 20  # measured in a training
_TRAINING_BATCH, _LR = 64, 1e-3


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo numerics`."""
    parser.epilog = "docs/numerics.md says what the figures mean, and what to do about a low ratio of signal to noise."
    declare_name(parser)
    parser.add_argument("--batch", type=positive_count, default=16, metavar="N", help="examples in a batch (default: 16)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=DTYPE_HELP)
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="number format of autocast (default: none)")
    parser.add_argument("--exact", action="store_true", help="keep the streams on a grid, so that inversion does not round")
    parser.add_argument(
        "--updates",
        type=positive_count,
        metavar="N",
        help="also train a model of 8x8 digits for N updates with AdamW, and follow the noise",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw all figures")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Measure a freshly initialised model, and print or draw the report."""
    name, overrides = read_name(arguments.name)
    if arguments.plot is not None:
        require_png(arguments.plot)
    from revzoo.display.console import print_renderable, show_status

    with show_status("measuring rounding errors"):
        import torch

        from revzoo.analysis.numerics import measure_numerics
        from revzoo.model.create import create

        torch.manual_seed(0)
        model = create(name, overrides=overrides, dtype=getattr(torch, arguments.dtype), exact=arguments.exact)
        if arguments.updates is not None:
            _require_digits(model)
        autocast = arguments.autocast
        with nullcontext() if autocast is None else torch.autocast("cpu", getattr(torch, autocast)):
            report = measure_numerics(model, model.example_input(arguments.batch))
            training = [] if arguments.updates is None else _train(model, arguments.updates)
    arithmetic = arguments.dtype + f", autocast {autocast}" * (autocast is not None) + ", exact" * arguments.exact
    title = f"{model.spec.name}, batch of {arguments.batch}, {arithmetic}"
    if arguments.plot is not None:
        from revzoo.display.figures.numerics import plot_numerics

        plot_numerics(title, report, training, arguments.plot)
    if arguments.json:
        about = {"model": model.spec.name, "batch": arguments.batch, "arithmetic": arithmetic}
        print(json.dumps(about | report.to_dict() | {"training": [point.to_dict() for point in training]}, indent=2))
    else:
        from revzoo.display.tables.numerics import tabulate_numerics

        print_renderable(tabulate_numerics(title, report, training))
    return 0


def _require_digits(model: "Model") -> None:
    """Raise InputError unless the model takes the images that a training is on."""
    from revzoo.spec.schema import ImageInput

    if model.spec.input != ImageInput("image", 1, (8, 8)):
        raise InputError(
            f"--updates trains on digits, images of 1 channel and 8x8 pixels. Received: {model.spec.name}. Use rev_vit_digits, "
            "or overrides of a model for images: input.channels=1 input.size=[8,8]."
        )


def _train(model: "Model", updates: int) -> list["TrainingPoint"]:
    """Train on digits, and return what was measured on the way."""
    import torch
    from torch.nn.functional import cross_entropy

    from revzoo.analysis.numerics import follow_training
    from revzoo.data.loading import load_data
    from revzoo.data.options import DataOptions

    data = load_data(DataOptions("digits", _TRAINING_BATCH), model.spec.input, seed=0)
    dtype = next(model.parameters()).dtype

    def draw_batches() -> Iterator[tuple["Tensor", "Tensor"]]:
        for epoch in count():
            data.start_epoch(epoch)
            yield from ((x.to(dtype), labels) for x, labels in data.train)

    optimizer = torch.optim.AdamW(model.parameters(), _LR)
    every = max(1, updates // _POINTS)
    return list(follow_training(model, islice(draw_batches(), updates), optimizer, cross_entropy, every))
