"""Printing tables."""

import sys

from rich.console import Console, RenderableType

_WIDTH = 140  # columns, where the output is no terminal whose width is known


def print_renderable(renderable: RenderableType) -> None:
    """Print a table or a group of them to the standard output."""
    Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH).print(renderable)
