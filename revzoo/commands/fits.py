"""`revzoo fits`: whether a training step of any network fits a card, how it can be made to, and up to which size."""

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from revzoo.commands.model_options import (
    BATCH_HELP,
    create_loss,
    create_optimizer,
    declare_name,
    is_any_module,
    read_name,
    require_optimizer,
)
from revzoo.commands.parser import DTYPE_HELP, DTYPES, JSON_HELP, NAME_HELP, Parser, positive_count
from revzoo.commands.plan import OTHER_NAMES
from revzoo.errors import CheckpointError, InputError, UnknownNameError, explain_missing
from revzoo.format import format_count
from revzoo.hub import is_foreign
from revzoo.planning.card import parse_card

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "Count whether a training step fits a card, and what makes it fit."

_RANK = 8  # of adapters, which is also peft's default
_NO_OPTIMIZER = "none"
_NOTES = {
    "planned": "the plan with the least work that fits; where everything or nothing does, one that takes little.",
    "reversible": "8 bits kept of every element and step, which changes the network's function a little.",
    "random signs": "one bit kept, of a random sign in training; in evaluation the network's function stays.",
}


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo fits`."""
    parser.epilog = "Bytes and FLOPs are counted without weights, so networks of any size can be asked for on any machine."
    declare_name(parser, f"{NAME_HELP}, or {OTHER_NAMES}")
    parser.add_argument(
        "--card", metavar="SIZE", help="memory of the card, such as 24GB (default: that of the CUDA device, else 24GB)"
    )
    parser.add_argument("--batch", type=positive_count, metavar="N", help=BATCH_HELP)
    parser.add_argument(
        "--tokens", type=positive_count, metavar="N", help="tokens of each text; the longest text is then looked for"
    )
    parser.add_argument("--dtype", choices=DTYPES, help=DTYPE_HELP)
    parser.add_argument("--lora", action="store_true", help=f"train adapters of rank {_RANK} by peft; other weights are frozen")
    parser.add_argument(
        "--optimizer", metavar="NAME", default="adamw", help="a timm optimizer, or none (default: adamw, as on GPUs: foreach)"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Count a network's training step in every way; print the answer."""
    card = None if arguments.card is None else parse_card(arguments.card)
    name, overrides = read_name(arguments.name, of_any_module=True)
    if arguments.optimizer != _NO_OPTIMIZER:
        require_optimizer(arguments.optimizer)
    of_the_zoo = not is_any_module(name)
    if of_the_zoo and (arguments.tokens is not None or arguments.lora):
        raise InputError(
            f"--tokens and --lora: for networks that are not the zoo's. Received: {name}. Its texts are set by input.length=N."
        )
    if overrides and not of_the_zoo:
        raise InputError(f"Overrides: for models of the zoo. Received: {name} {' '.join(overrides)}. Leave them out.")
    from revzoo.display.console import print_renderable, print_text, show_status

    with show_status("counting a training step") as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about names and settings of theirs
        from revzoo.on_card import fits

        model, batch, loss = _create(arguments, name, overrides, of_the_zoo)
        if arguments.lora:
            model = _add_adapters(model)
        optimizer = None if arguments.optimizer == _NO_OPTIMIZER else create_optimizer(arguments.optimizer, model)
        for group in [] if optimizer is None else optimizer.param_groups:
            if group.get("foreach", True) is None:  # PyTorch then decides by the device, and here is none
                group["foreach"] = True
        answer = fits(
            model, batch, card, optimizer=optimizer, loss=loss, vary_length=arguments.tokens is not None, report=report
        )
    answer = replace(answer, model=os.path.basename(name.rstrip("/")).removeprefix("timm:"))
    if arguments.json:
        print(json.dumps({"answer": str(answer), "limit_bytes": answer.limit_bytes, **asdict(answer)}, indent=2))
        return 0
    from revzoo.display.tables.fits import tabulate_fits

    print_text(str(answer))
    print_renderable(tabulate_fits(answer))
    print_text(_describe(model, batch, arguments))
    for method in answer.methods:
        if method.name in _NOTES and not method.problem:
            print_text(f"{method.name}: {_NOTES[method.name]}")
    return 0


def _create(
    arguments: argparse.Namespace, name: str, overrides: Sequence[str], of_the_zoo: bool
) -> tuple["nn.Module", Any, Any]:
    """Return a network without values, a batch and, for a model of the zoo, its loss."""
    import torch

    from revzoo.runtime.nested import map_tensors

    dtype = getattr(torch, arguments.dtype or "float32")
    if of_the_zoo:
        from revzoo.analysis.counting import default_batch_size
        from revzoo.model.create import create

        model = create(name, overrides=overrides, device="meta", dtype=dtype)
        batch = model.example_input(arguments.batch or default_batch_size(model.spec.input))
        return model, batch, create_loss(None, model)
    module, batch = _create_any_module(name, arguments.batch, arguments.tokens)
    if arguments.dtype is not None:
        module, batch = module.to(dtype), map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
    config = getattr(module, "config", None)
    if config is not None and getattr(config, "use_cache", False):
        config.use_cache = False  # as trainers have it: keys and values are for generation
    return module, batch, None


def _create_any_module(name: str, size: int | None, tokens: int | None) -> tuple["nn.Module", Any]:
    import torch

    from revzoo.graph.named_module import create_named_module

    if is_foreign(name):
        try:
            with torch.device("meta"):
                return create_named_module(name, size, tokens)
        except (CheckpointError, UnknownNameError):
            raise
        except Exception:  # some networks compute with numbers of theirs while they are made; a mistake comes again
            pass
    return create_named_module(name, size, tokens)


def _add_adapters(module: "nn.Module") -> "nn.Module":
    with explain_missing("peft", "--lora"):
        import peft
    try:
        return peft.get_peft_model(module, peft.LoraConfig(r=_RANK))
    except ValueError as error:
        raise InputError(
            f"peft knows no default places for adapters in a {type(module).__name__} ({error}). Name a function of yours that "
            "returns the network with adapters and a batch: package.module:function."
        ) from error


def _describe(model: "nn.Module", batch: Any, arguments: argparse.Namespace) -> str:
    """Return what was counted, in words."""
    from revzoo.runtime.nested import tensors_in

    every = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = f"{format_count(every)} parameters" + (f", {format_count(trained)} of them trained" if trained < every else "")
    shapes = ", ".join(str(list(t.shape)) for t in tensors_in(batch))
    return f"{parameters}, in {arguments.dtype or 'float32'}; batch of {shapes}; optimizer {arguments.optimizer}."
