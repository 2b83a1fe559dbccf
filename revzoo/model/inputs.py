"""What a network takes: examples of its spec's input, and the checks in front of the stem."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from revzoo.errors import InputError
from revzoo.spec.schema import ImageInput, Spec, TextInput


def example(spec: Spec, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Return a random batch: images (B, C, H, W) of `dtype`, or ids (B, length) without padding."""
    if isinstance(spec.input, ImageInput):
        return torch.randn(batch_size, spec.input.channels, *spec.input.size, device=device, dtype=dtype)
    text = spec.input
    words = text.vocabulary - (text.padding is not None)
    ids = torch.randint(words, (batch_size, text.length), device=device)
    return ids if text.padding is None else ids + (ids >= text.padding)


def checked_mask(spec: Spec, x: Tensor, attention_mask: Tensor | None, weight: Tensor) -> Tensor | None:
    """Return (B, N), True where a token is, or None where all are tokens: no mask is given and the spec has no padding.

    The values of ids and masks are looked at on the CPU only: elsewhere that would make the host wait.

    Raises:
        InputError: x is not a batch of the spec's input that a network with such a parameter can take, or the mask is not one
            of its tokens, or leaves an example without any.
    """
    if not torch.compiler.is_compiling():
        _check_kind(spec, x, weight)
    if isinstance(spec.input, TextInput):
        _check_ids(spec.name, spec.input, x)
        return _token_mask(spec.input, x, attention_mask)
    expected = (spec.input.channels, *spec.input.size)
    if tuple(x.shape[1:]) != expected:
        raise InputError(
            f"{spec.name} takes images (B, {', '.join(map(str, expected))}). Received: {tuple(x.shape)}. "
            "Another size is set with overrides=['input.size=[H,W]']."
        )
    if attention_mask is not None:
        raise InputError(f"{spec.name} takes images, which have no attention mask. Received: one.")
    return None


def _token_mask(text: TextInput, x: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    if attention_mask is None:
        if text.padding is None:
            return None
        mask = x != text.padding
    else:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != x.shape:
            found = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise InputError(
                f"The attention mask has one entry per token, {tuple(x.shape)}, 1 or True for tokens. Received: {found}."
            )
        if attention_mask.device != x.device:
            raise InputError(
                f"The ids are on {x.device}. Received: an attention mask on {attention_mask.device}. Move it there."
            )
        mask = attention_mask.bool()
        if _readable(mask) and not torch.equal(mask.to(attention_mask.dtype), attention_mask):
            raise InputError(
                "The attention mask is 1 or True for tokens and 0 or False elsewhere. Received: other numbers. A mask that is "
                "added to scores is not taken; use ids != padding."
            )
    if _readable(mask) and not bool(mask.any(1).all()):
        raise InputError(f"Example {int(mask.any(1).int().argmin())} of the batch has no token, only padding. Leave it out.")
    return mask


def _check_kind(spec: Spec, x: object, own: Tensor) -> None:
    text = isinstance(spec.input, TextInput)
    wanted, things = ("token ids (int64 or int32)", "ids") if text else ("floating-point images", "images")
    if not isinstance(x, Tensor) or (x.dtype not in (torch.int64, torch.int32) if text else not x.is_floating_point()):
        received = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{spec.name} takes a tensor of {wanted}. Received: {received}.")
    if isinstance(own, DTensor) or own.is_meta:  # FSDP and Accelerate's offloading bring parameters when they are used
        return
    if x.device != own.device:
        raise InputError(
            f"{spec.name} is on {own.device}. Received: {things} on {x.device}. Move them with x.to('{own.device}')."
        )
    mixed = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # meta has no autocast
    if not text and x.dtype != own.dtype and not mixed:
        raise InputError(
            f"{spec.name} has {own.dtype} parameters. Received: {x.dtype} images. Use x.to({own.dtype}) or autocast."
        )


def _check_ids(name: str, text: TextInput, ids: Tensor) -> None:
    if ids.dim() != 2 or not ids.shape[1]:
        raise InputError(
            f"{name} takes ids (B, N) of 1 to {text.length} tokens. Received: {tuple(ids.shape)}. One text is ids[None]."
        )
    if ids.shape[1] > text.length:
        raise InputError(
            f"{name} takes ids (B, N) of 1 to {text.length} tokens. Received: {tuple(ids.shape)}. Truncate them, or make the "
            "model for longer texts with overrides=['input.length=N']."
        )
    if not _readable(ids) or not ids.numel():
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= text.vocabulary:
        wrong = low if low < 0 else high
        raise InputError(
            f"{name} has a vocabulary of {text.vocabulary} ids, 0 to {text.vocabulary - 1}. Received: id {wrong}. Is this the "
            "tokenizer it was made for? Another vocabulary is set with overrides=['input.vocabulary=N']."
        )


def _readable(x: Tensor) -> bool:
    """Return whether there are values, and looking at them makes neither a device nor a compiler wait."""
    return x.device.type == "cpu" and not isinstance(x, FakeTensor) and not torch.compiler.is_compiling()
