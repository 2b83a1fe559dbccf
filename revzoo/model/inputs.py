"""The input of a network: make random batches, check given ones, and make the attention mask."""

import torch
from torch import Tensor

from revzoo.device import has_value
from revzoo.errors import InputError
from revzoo.spec.schema import ImageInput, Spec, TextInput


def make_example(spec: Spec, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Return a random batch: images (batch_size, C, H, W) of `dtype`, or ids (batch_size, length) without padding."""
    if isinstance(spec.input, ImageInput):
        return torch.randn(batch_size, spec.input.channels, *spec.input.size, device=device, dtype=dtype)
    text = spec.input
    num_ids = text.vocabulary - (text.padding is not None)
    ids = torch.randint(num_ids, (batch_size, text.length), device=device)
    return ids if text.padding is None else ids + (ids >= text.padding)


def make_mask(spec: Spec, x: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Check a batch and return its attention mask.

    The values of ids and masks are checked on the CPU only: reading them on another device would make the host wait for it.

    Args:
        spec: the network's spec.
        x: the batch: images or ids.
        attention_mask: the mask that the caller gave, (B, N), 1 or True for tokens; None: all ids but the spec's padding.

    Returns:
        (B, N), True for tokens. None if all ids are tokens (no mask was given and the spec has no padding), and for images.

    Raises:
        InputError: the network cannot take the batch, or the mask does not fit it or leaves an example without a token.
    """
    text = isinstance(spec.input, TextInput)
    if not isinstance(x, Tensor) or (x.dtype not in (torch.int64, torch.int32) if text else not x.is_floating_point()):
        kind = "token ids (int64 or int32)" if text else "floating-point images"
        received = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{spec.name} takes a tensor of {kind}. Received: {received}.")
    if isinstance(spec.input, TextInput):
        _check_ids(spec.name, spec.input, x)
        return _make_token_mask(spec.input, x, attention_mask)
    expected = (spec.input.channels, *spec.input.size)
    if tuple(x.shape[1:]) != expected:
        raise InputError(
            f"{spec.name} takes images (B, {', '.join(map(str, expected))}). Received: {tuple(x.shape)}. One image is x[None]; "
            "others are taken with overrides=['input.channels=C'] or overrides=['input.size=[H,W]']."
        )
    if attention_mask is not None:
        raise InputError(f"{spec.name} takes images, which have no attention mask. Received: an attention mask. Leave it out.")
    return None


def _make_token_mask(text: TextInput, x: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    if attention_mask is None:
        if text.padding is None:
            return None
        mask = x != text.padding
    else:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != x.shape:
            received = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise InputError(
                f"The attention mask has one entry per token, {tuple(x.shape)}, 1 or True for tokens. Received: {received}."
            )
        mask = attention_mask.bool()
        if _can_read(mask) and not torch.equal(mask.to(attention_mask.dtype), attention_mask):
            raise InputError(
                "The attention mask is 1 or True for tokens and 0 or False elsewhere. Received: other numbers. A mask of "
                "numbers to be added to the attention scores is not accepted; use ids != padding."
            )
    if _can_read(mask) and not bool(mask.any(1).all()):
        raise InputError(f"Example {int(mask.any(1).int().argmin())} of the batch has no token, only padding. Leave it out.")
    return mask


def _check_ids(name: str, text: TextInput, ids: Tensor) -> None:
    if ids.dim() != 2 or not 1 <= ids.shape[1] <= text.length:
        raise InputError(
            f"{name} takes ids (B, N) of 1 to {text.length} tokens. Received: {tuple(ids.shape)}. One text is ids[None]; "
            "truncate longer ones, or make the model for them with overrides=['input.length=N']."
        )
    if not _can_read(ids) or not ids.numel():
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= text.vocabulary:
        wrong = low if low < 0 else high
        raise InputError(
            f"{name} has a vocabulary of {text.vocabulary} ids, 0 to {text.vocabulary - 1}. Received: id {wrong}. Is this the "
            "tokenizer that the model was made for? Another vocabulary is set with overrides=['input.vocabulary=N']."
        )


def _can_read(x: Tensor) -> bool:
    """Return whether a tensor has values that can be read without waiting for a device or breaking a compiled graph."""
    return x.device.type == "cpu" and has_value(x) and not torch.compiler.is_compiling()
