"""The parts a spec can name. Importing this package registers all of them.

A part knows its own input and nothing of the model around it: neither the other stream, nor the mode of backward, nor the
schedule. Attention, MLP, norms, drop path and patch embedding are timm's, with timm's parameter names; parts for text have
the parameter names of Transformers.

Each role has its own folder or file; in a folder, parts of a kind share a file: `branches/attention.py`. `layers/` holds what
several parts are built from, `context.py` what the builder hands to a part.
"""

from revzoo.parts import branches, fuses, heads, inits, splits, stems, transitions
from revzoo.parts.context import BuildContext, Shape

__all__ = ["BuildContext", "Shape", "branches", "fuses", "heads", "inits", "splits", "stems", "transitions"]
