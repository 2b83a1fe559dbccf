"""Make the network of a run and the running average of its weights, divided over processes where there is a mesh of them.

A divided network is built on the meta device, divided there, and then given its values, which are those of one process.
"""

from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from revzoo.checkpoint.index import find_folder_weights, find_shipped_weights
from revzoo.checkpoint.slices import get_own_part
from revzoo.data.base import Data
from revzoo.data.requirement import count_required_outputs
from revzoo.device import is_sharded
from revzoo.errors import InputError, SpecError, join_names
from revzoo.model.create import build_for_weights, create
from revzoo.model.model import Model
from revzoo.registry import heads
from revzoo.sharding.create import allocate_, create_sharded
from revzoo.sharding.shard import shard_
from revzoo.spec import Spec
from revzoo.spec.loading import load_spec
from revzoo.training.options import EmaOptions, ModelOptions, Recipe


def load_model_spec(options: ModelOptions) -> tuple[Spec, bool]:
    """Return the model's spec, and whether an override sets a head without its number of outputs, which the data then fix."""
    try:
        return load_spec(options.name, options.list_overrides()), False
    except SpecError as error:
        if [problem.path for problem in error.problems] != ["head.outputs"]:
            raise
        return load_spec(options.name, [*options.list_overrides(), "head.outputs=1"]), True


def make_network(
    options: ModelOptions, spec: Spec, is_open: bool, data: Data, recipe: Recipe, device: torch.device, mesh: DeviceMesh | None
) -> tuple[Model, ModelEmaV3 | None, list[str]]:
    """Return the network, frozen as the recipe says, its running average, and remarks on its head for the reader.

    No process waits for another one here.

    Args:
        options: what is made.
        spec: what `load_model_spec` returns for the options, with the next one.
        is_open: whether the data fix the number of outputs.
        data: what is trained on.
        recipe: of the run.
        device: of this process. A network that is not divided stays on the CPU: Accelerate moves it.
        mesh: the processes to divide the network over; None: each has all of it.

    Raises:
        SpecError: the data need other outputs, or what is frozen is not in the network, or all of it.
        InputError: weights would have to be adapted to another input or head, and the network is divided.
        CheckpointError: the weights do not fit, or are missing.
    """
    model: Model
    arguments = _choose_arguments(options, spec, is_open, data, recipe)
    if mesh is None:
        model = create(**arguments)
        notes = _renew_head(model, options, spec, is_open, data)
        _freeze(model, recipe)
        # A copy of the bare model: a copy of the one that Accelerate prepares would run the original's weights.
        ema = None if recipe.ema is None else _average(model, recipe.ema, divided=False).to(device)
    else:
        model, ema = _make_divided(arguments, recipe, device, mesh)
        notes = _renew_head(model, options, spec, is_open, data)
    for each in (model,) if ema is None else (model, ema.module):
        each.class_names, each.data_config = data.class_names, data.data_config
    return model, ema, notes


def _renew_head(model: Model, options: ModelOptions, spec: Spec, is_open: bool, data: Data) -> list[str]:
    """Give a head that was trained for other classes new weights; return a line that says so, or none.

    Raises:
        InputError: the model is divided, and its head has as many classes, of other names.
    """
    known, names = model.class_names, data.class_names
    if known is not None and names is not None and known != tuple(names):
        before, now = join_names(known, most=4), join_names(names, most=4)
        if any(map(is_sharded, model.parameters())):
            raise InputError(
                f"The weights are for as many classes, but others, so they need a new head, which is made in one process. "
                f"Received: {now}; the weights are for {before}. Use train.shard=none."
            )
        model.reset_head(model.num_outputs)
        return [f"the head is new, with random weights: its classes are {now}, and were {before}"]
    outputs = spec.head.arguments.get("outputs")
    if options.checkpoint is not None and outputs is not None:  # a file of weights may have another number than the spec
        outputs = build_for_weights(spec, options.checkpoint).num_classes
    if is_open or find_starting_weights(options) is None or outputs in (None, model.num_outputs):
        return []
    return [f"the head is new, with random weights: it has {model.num_outputs} outputs, and had {outputs}"]


def find_starting_weights(options: ModelOptions) -> Path | None:
    """Return the file of the weights that a model starts from; None: random ones.

    Raises:
        UnknownNameError, CheckpointError: there are none where the options say.
    """
    if options.checkpoint is not None:
        return Path(options.checkpoint)
    file = find_folder_weights(options.name)
    return find_shipped_weights(options.name) if file is None and options.pretrained else file


def _make_divided(
    arguments: dict[str, Any], recipe: Recipe, device: torch.device, mesh: DeviceMesh
) -> tuple[Model, ModelEmaV3 | None]:
    precision, offload = recipe.train.mixed_precision, recipe.train.offload
    averaged = list[Model]()  # none or one

    def divide(model: Model) -> None:
        _freeze(model, recipe)
        if recipe.ema is not None:
            averaged.append(deepcopy(model))  # before it is divided, after which it cannot be copied
        for each in (model, *averaged):
            shard_(each, mesh, precision=precision, offload=offload)

    if (tiles := arguments.pop("tiles")) != 1:
        raise recipe.error(
            "model.tiles", str(tiles), "1: parameters are divided over processes, and each tile would gather them"
        )
    model = create_sharded(shard=divide, device=device, offload=offload, **arguments)
    if recipe.ema is None:
        return model, None
    [copy] = averaged
    allocate_(copy, device=device, offload=offload)
    sources = chain(model.parameters(), model.buffers())
    with torch.no_grad():
        for tensor, source in zip(chain(copy.parameters(), copy.buffers()), sources, strict=True):
            get_own_part(tensor).copy_(get_own_part(source))
    # timm copies what it is given, which a divided network does not allow; making this draws no random numbers.
    average = _average(nn.LayerNorm(1), recipe.ema, divided=True)
    average.module = copy.eval()
    return model, average


def _average(model: nn.Module, options: EmaOptions, *, divided: bool) -> ModelEmaV3:
    # One tensor at a time where parameters are divided and buffers are not.
    return _Average(model, options.decay, use_warmup=options.use_warmup, foreach=not divided)


class _Average(ModelEmaV3):
    """timm's running average, but a tensor with two names (tied weights) moves once and not twice."""

    @torch.no_grad()
    def apply_update_(self, model: nn.Module, decay: float) -> None:
        """Move every tensor by 1 - decay of its way to the model's; integers are copied."""
        own, others = (each.state_dict(keep_vars=True).values() for each in (self.module, model))
        pairs = {id(average): (average, value) for average, value in zip(own, others, strict=True)}.values()
        moved = [pair for pair in pairs if pair[0].is_floating_point()]
        if self.foreach:
            torch._foreach_lerp_([average for average, _ in moved], [value for _, value in moved], weight=1 - decay)
        for average, value in pairs:
            if not average.is_floating_point():
                average.copy_(value)
            elif not self.foreach:
                average.lerp_(value, 1 - decay)


def _choose_arguments(options: ModelOptions, spec: Spec, is_open: bool, data: Data, recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `create` and `create_sharded`, with the outputs that the data need."""
    needed = count_required_outputs(spec, data, recipe.data.name)
    outputs, overrides = options.num_outputs, options.list_overrides()
    if outputs is not None and outputs < needed:
        allowed = f"at least {needed}, the {'classes in the data' if data.num_classes else 'vocabulary'}"
        raise recipe.error("model.num_outputs", str(outputs), allowed)
    has_outputs = "outputs" in heads.arguments(spec.head.type) and not spec.head.arguments.get("tied")
    if has_outputs:  # other heads have one output for each id of the vocabulary
        outputs = outputs or needed
        # Pretrained weights may have another head, which is replaced after loading. Without them the head is built with the
        # right size, so that it has the initialisation that the spec asks for.
        overrides = (
            overrides if find_starting_weights(options) is not None and not is_open else [*overrides, f"head.outputs={outputs}"]
        )
    return {
        "source": options.name,
        "pretrained": options.pretrained,
        "checkpoint": options.checkpoint,
        "num_outputs": outputs,
        "overrides": overrides,
        "schedule": options.schedule,
        "tiles": 1 if options.tiles == "auto" else options.tiles,  # a plan sets them
        "exact": options.exact,
    }


def _freeze(model: Model, recipe: Recipe) -> None:
    """Exclude the parts that the recipe names from training."""
    known = [name for name, _ in model.named_modules() if name]
    for name in recipe.train.freeze:
        if name not in known:
            parts = [part for part in known if part.count(".") < 2]
            raise recipe.error("train.freeze", repr(name), f"parts of the model, such as {join_names(parts)}")
        model.get_submodule(name).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise recipe.error("train.freeze", str(list(recipe.train.freeze)), "some parts of the model, not all")
