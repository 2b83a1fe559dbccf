"""The parts a spec can name. Importing this package fills the registries.

A part knows nothing of modes, streams' partners or schedules; attention, MLP, norms, drop path and patch embedding are
timm's, with timm's parameter names.
"""

from revzoo.parts import attention, conv, fuse, head, init, mlp, split, stem, transition
from revzoo.parts.site import Shape, Site

__all__ = ["Shape", "Site", "attention", "conv", "fuse", "head", "init", "mlp", "split", "stem", "transition"]
