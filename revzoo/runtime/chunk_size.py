"""How many tokens are in a chunk of a loss."""

CHUNK_BYTES = 256 * 2**20  # at most
_BYTES = 8  # of an output and token: the logit in float32, and its logarithm of the softmax, which the loss keeps
_CHUNKS, _LEAST = 8, 64  # so many chunks at least, if each then has that many tokens: fewer are slow, and save little more


def choose_chunk(width: int, count: int) -> int:
    """Return how many of `count` tokens are in a chunk of a head with `width` outputs."""
    return max(min(CHUNK_BYTES // (_BYTES * width), max(-(-count // _CHUNKS), _LEAST)), 1)
