"""The model of a command: its name and overrides as they are typed, and what `revzoo profile` and `revzoo plan` share."""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from revzoo.commands.parser import DTYPE_HELP, DTYPES, NAME_HELP, Parser, declare_import, split_overrides
from revzoo.errors import InputError, UnknownNameError, find_nearest
from revzoo.hub import HUB_PREFIX, TIMM_PREFIX, is_foreign
from revzoo.spec.loading import find_spec_file
from revzoo.spec.names import ALIKE, model_files
from revzoo.spec.outline import check_names

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from revzoo.analysis.dry_run import LossFunction
    from revzoo.model.model import Model

BATCH_HELP = "examples in a batch (default: 32 images, or 8 texts)"


def declare_name(parser: Parser, name_help: str = NAME_HELP) -> None:
    """Add the name of a model, and its overrides."""
    parser.add_argument("name", nargs="+", help=f"{name_help}, and overrides such as head.outputs=10 or img_size=160")
    declare_import(parser)


def is_any_module(name: str) -> bool:
    """Return whether a name stands for a module that is not the zoo's; a folder may have a colon in its name."""
    return is_foreign(name) or (":" in name and not name.startswith(HUB_PREFIX) and not os.path.exists(name))


def read_name(words: Sequence[str], *, of_any_module: bool = False) -> tuple[str, list[str]]:
    """Return the one name among words, and the overrides.

    Args:
        words: as typed.
        of_any_module: whether it may name a network of timm; "timm:" is then added where it is left out.
    Raises:
        InputError: there is no name, or more than one.
        UnknownNameError: no model has the name.
        SpecError: the overrides have problems.
    """
    names, overrides = split_overrides(list(words))
    if len(names) != 1:
        raise InputError(f"Name one model. Received: {', '.join(names) or 'none'}. Overrides look like head.outputs=10.")
    [name] = names
    try:
        if not (is_any_module(name) or name.startswith(HUB_PREFIX)):
            find_spec_file(name)  # wrong names are refused before torch is imported
            check_names(name, overrides)
    except UnknownNameError:
        if not of_any_module or find_nearest(name, model_files(), ALIKE):
            raise
        from revzoo.display.console import show_status

        with show_status("loading PyTorch"):
            import timm

        if not timm.is_model(name):
            if not name.isidentifier():
                raise
            hint = f" timm has none of this name; one of the hub is hf:{name}."
            raise UnknownNameError("model", name, model_files(), hint) from None
        name = f"{TIMM_PREFIX}{name}"
    return name, overrides


def declare_model(
    parser: Parser, batch: Callable[[str], object], metavar: str, batch_help: str, name_help: str = NAME_HELP
) -> None:
    """Add the arguments that say what to profile.

    Args:
        batch: type of --batch.
        metavar: what --batch takes, in the help.
        batch_help: help of --batch.
        name_help: what may be profiled.
    """
    declare_name(parser, name_help)
    parser.add_argument("--batch", type=batch, metavar=metavar, help=batch_help)
    parser.add_argument("--device", metavar="D", help="where to run (default: cuda if available, else cpu)")
    parser.add_argument("--dtype", choices=DTYPES, help=DTYPE_HELP)
    parser.add_argument(
        "--optimizer",
        type=require_optimizer,
        metavar="NAME",
        help="a timm optimizer, such as adamw, whose state is counted too (default: none)",
    )
    parser.add_argument("--meta", action="store_true", help="count bytes and FLOPs only: nothing is allocated, run or timed")


def require_optimizer(name: str) -> str:
    """Return timm's name of an optimizer, or raise UnknownNameError."""
    from timm.optim import list_optimizers

    if name not in (known := list(map(str, list_optimizers()))):
        raise UnknownNameError("optimizer", name, known)
    return name


def create_model(arguments: argparse.Namespace) -> "Model":
    """Create the model on the device to profile it on, with the same weights every time."""
    name, overrides = read_name(arguments.name)
    if arguments.meta and arguments.device is not None:
        raise InputError(f"Received: --meta and --device {arguments.device}. --meta runs on no device: leave one of them out.")
    import torch

    from revzoo.model.create import create

    torch.manual_seed(0)
    device = "meta" if arguments.meta else arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return create(name, overrides=overrides, device=device, dtype=getattr(torch, arguments.dtype or "float32"))


def create_batch(model: "Model", size: int | None) -> "Tensor":
    """Return random examples; as many as is usual for the kind of input where no number is given.

    Raises:
        BudgetError: a step takes more than is free, even in the modes that keep least.
    """
    from revzoo.analysis.counting import default_batch_size

    size = size or default_batch_size(model.spec.input)
    require_memory(model, size, ["recompute", "invert"], copies=0)
    return model.example_input(size)


def require_memory(model: "Model", size: int, modes: Sequence[str], copies: int) -> None:
    """Raise BudgetError, which says what fits, where a step in the mode that takes least takes more than is free.

    Args:
        model: the model.
        size: examples of the batch.
        modes: the modes of which one has to fit.
        copies: how many more of weights and gradients there are meanwhile.
    """
    from revzoo.analysis.step_memory import measure_modes
    from revzoo.planning.budget import count_model_bytes
    from revzoo.planning.fit import require_fit

    if (device := next(model.parameters()).device).type == "meta":
        return
    present = count_model_bytes(model)

    def count(examples: int) -> int:
        reports, _ = measure_modes(model, model.example_input(examples, "meta"), modes=modes)
        return min(report.peak_bytes + copies * (present + report.gradient_bytes) for report in reports.values())

    require_fit(count, size, device, "--batch ", present_bytes=present)


def create_optimizer(name: str | None, model: "nn.Module") -> "Optimizer | None":
    """Return timm's optimizer of that name for the model, or None without a name."""
    if name is None:
        return None
    from revzoo.training.optimizer import OptimizerError, make_optimizer

    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(f"Nothing is trained: no parameter of the {type(model).__name__} requires a gradient.")
    try:
        return make_optimizer(model, name, lr=1e-3)  # only the size of its state matters
    except OptimizerError as error:
        raise InputError(f"timm's {name} cannot be made here ({error}). Try adamw.") from error


def create_loss(name: str | None, model: "Model") -> "LossFunction | None":
    """Return a loss of what the model returns, by its name; without one cross-entropy, unless the model returns features."""
    if name == "sum" or (name is None and model.spec.head.type == "text_features"):
        return None
    from revzoo.analysis.dry_run import compute_cross_entropy

    return compute_cross_entropy
