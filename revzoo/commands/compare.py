"""`revzoo compare`: what a language model's training step takes stored, checkpointed and reversible, and how fast each is."""

import argparse

from revzoo.commands.model_options import create_optimizer
from revzoo.commands.parser import Parser, declare_import, split_overrides
from revzoo.errors import InputError
from revzoo.planning.card import parse_card

SUMMARY = "Compare memory and speed of a language model's training steps."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo compare`."""
    parser.epilog = "Bytes are counted, as by revzoo fits; a few steps of the recipe's batch run for the tokens per second."
    declare_import(parser)
    parser.add_argument("recipe", nargs="*", help="a recipe of data.name=causal_lm (default: lm), and overrides")
    parser.add_argument(
        "--card", metavar="SIZE", help="memory of the card, such as 24GB (default: that of the CUDA device, else 24GB)"
    )
    parser.add_argument("--meta", action="store_true", help="count bytes and FLOPs only: nothing is allocated, run or timed")


def run(arguments: argparse.Namespace) -> int:
    """Count and time the steps of a recipe's model; print the answer."""
    card = None if arguments.card is None else parse_card(arguments.card)
    recipes, overrides = split_overrides(arguments.recipe)
    if len(recipes) > 1:
        raise InputError(f"One recipe is compared. Received: {', '.join(recipes)}. Overrides look like model.name=rev_gpt_20m.")
    from revzoo.training.recipe import load_recipe

    recipe = load_recipe(recipes[0] if recipes else "lm", overrides)
    if recipe.data.name != "causal_lm" or not isinstance(recipe.data.batch_size, int):
        raise InputError(
            "Steps of language models are compared, with a number of texts. Received: "
            f"data.name={recipe.data.name}, data.batch_size={recipe.data.batch_size}. Name the recipe lm, and a batch size."
        )
    if arguments.meta and recipe.train.mixed_precision != "no":
        raise InputError("Autocast has no meta device. Received: --meta and train.mixed_precision. Leave one of them out.")
    from revzoo.display.console import print_renderable, print_text, show_status
    from revzoo.display.tables.fits import tabulate_fits

    with show_status("loading PyTorch") as report:
        import torch

        from revzoo.model.create import create
        from revzoo.on_card import compare_losses

        torch.manual_seed(recipe.train.seed)
        device = "meta" if arguments.meta else "cuda" if torch.cuda.is_available() else "cpu"
        chosen = recipe.model
        model = create(chosen.name, overrides=chosen.list_overrides(), num_outputs=chosen.num_outputs, device=device)
        optimizer = create_optimizer(recipe.optimizer.opt, model)
        precision = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.train.mixed_precision]
        assert optimizer is not None
        answer, rates = compare_losses(
            model, recipe.data.batch_size, card, optimizer=optimizer, precision=precision, report=report
        )
    print_text(str(answer))
    print_renderable(tabulate_fits(answer, rates))
    return 0
