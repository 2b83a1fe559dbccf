"""What makes the imports of a command cheaper."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Let Python look for no garbage inside.

    Importing torch and timm makes objects that stay. As they become more, Python looks through all of them again and again,
    which is a sixth of the time of their import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
