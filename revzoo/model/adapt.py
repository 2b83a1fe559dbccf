"""Give a network for images of another size, or of more or fewer channels, the weights of the original one."""

from math import prod
from typing import Any, cast

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from revzoo.errors import CheckpointError, join_names
from revzoo.model.builder import build
from revzoo.model.model import Model
from revzoo.model.timm_methods import find_first_convolution
from revzoo.parts.layers.position import resize_biases, resize_distances
from revzoo.spec.schema import ImageInput, Spec


def adapt_input(original: Model, spec: Spec) -> Model:
    """Return the network of a spec with the weights of one that differs in its input, on the same device, of the same dtype.

    Positions are interpolated as timm does. Weights of the first convolution are repeated for more channels, scaled so that
    an image of equal channels gives what it gave before; for one channel they are summed.

    Raises:
        CheckpointError: other tensors have another shape too.
        SpecError: the spec cannot be built.
    """
    like = next(original.parameters())
    with like.device:
        model = build(spec).to(like.dtype)
    own, theirs = model.state_dict(), original.state_dict()
    with torch.no_grad():
        fitted = {key: _fit(key, tensor, original, model) for key, tensor in theirs.items() if key in own}
    tensors = {key: tensor for key, tensor in fitted.items() if tensor is not None and tensor.shape == own[key].shape}
    if misfits := sorted(own.keys() - tensors) or sorted(theirs.keys() - own):
        raise CheckpointError(
            f"The weights of {spec.name} are of another network: not only positions and the first convolution differ, but "
            f"{join_names(misfits)}. Leave out the override that changes these, or the weights."
        )
    if _count_channels(original) != _count_channels(model) and find_first_convolution(model.stem) is None:
        raise CheckpointError(
            f"{spec.name} has no first convolution that could be adapted from {_count_channels(original)} to "
            f"{_count_channels(model)} channels. Leave out input.channels, or the weights."
        )
    model.load_state_dict(tensors)
    model.class_names, model.data_config = original.class_names, original.data_config
    if _count_channels(original) != _count_channels(model):  # these are numbers per channel
        model.data_config = {key: value for key, value in original.data_config.items() if key not in ("mean", "std")}
    return model


def _fit(key: str, tensor: Tensor, original: Model, model: Model) -> Tensor | None:
    """Return a tensor of the original as the model needs it, or None if it cannot be changed that way."""
    owner, _, name = key.rpartition(".")
    old, new = (cast(Any, network).get_submodule(owner) for network in (original, model))
    like = getattr(new, name)
    if name == "pos_embed" and old.grid != new.grid:
        prefix = tensor.shape[1] - prod(old.grid)
        return resample_abs_pos_embed(tensor, list(new.grid), list(old.grid), prefix)
    if name == "relative_position_bias_table" and old.window_size != new.window_size:
        return resize_biases(tensor, tuple(like.shape))
    if name in ("rel_pos_h", "rel_pos_w") and len(tensor) != len(like):
        return resize_distances(tensor, like.shape)
    if key == f"{find_first_convolution(model.stem)}.weight":
        return _fit_channels(tensor, _count_channels(model))
    return tensor


def _count_channels(model: Model) -> int:
    return cast(ImageInput, model.spec.input).channels


def _fit_channels(weight: Tensor, channels: int) -> Tensor:
    """Return the weight (O, C, K, K) of a convolution for another number of channels."""
    count = weight.shape[1]
    if channels == count:
        return weight
    if channels == 1:
        return weight.sum(1, keepdim=True)
    repeated = weight.repeat(1, -(-channels // count), 1, 1)[:, :channels]
    return repeated * (count / channels)
