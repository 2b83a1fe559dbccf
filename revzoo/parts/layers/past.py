"""What a decoder keeps of the tokens that it has read, so that the next one costs the work of one token.

B examples, K heads of keys and values, N tokens, C channels of a head.
"""

from torch import Tensor, nn


class Past:
    """Keys and values of the tokens read so far, for each attention of a network.

    Args:
        context: most tokens that there will be.
    """

    def __init__(self, context: int):
        self.context = context
        self.length = 0  # tokens that all of the network has read
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(self, attention: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values of new tokens, (B, K, N, C), and return those of all tokens."""
        if attention not in self._kept:
            batch, heads, _, channels = keys.shape
            shape = batch, heads, self.context, channels
            self._kept[attention] = keys.new_empty(shape), values.new_empty(shape)
        end = self.length + keys.shape[2]
        for kept, new in zip(self._kept[attention], (keys, values), strict=True):
            kept[:, :, self.length : end] = new
        all_keys, all_values = (kept[:, :, :end] for kept in self._kept[attention])
        return all_keys, all_values
