"""Make the network of a run and the running average of its weights, divided over processes where there is a mesh of them.

A divided network is built on the meta device, divided there, and then given its values, which are those of one process: no
process ever holds the whole.
"""

from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from revzoo.checkpoint.index import find_folder_weights
from revzoo.checkpoint.slices import get_own_part
from revzoo.data.base import Data
from revzoo.data.requirement import count_required_outputs
from revzoo.errors import SpecError, SpecProblem, join_names
from revzoo.model.create import create
from revzoo.model.network import Model
from revzoo.registry import heads
from revzoo.sharding.create import create_sharded
from revzoo.sharding.materialize import allocate_
from revzoo.sharding.shard import shard_
from revzoo.spec import Spec
from revzoo.spec.loading import load_spec
from revzoo.training.options import EmaOptions, ModelOptions, Recipe


def load_model_spec(options: ModelOptions) -> tuple[Spec, bool]:
    """Return the model's spec, and whether an override sets a head without its number of outputs, which the data then fix."""
    try:
        return load_spec(options.name, options.overrides), False
    except SpecError as error:
        if [problem.path for problem in error.problems] != ["head.outputs"]:
            raise
        return load_spec(options.name, [*options.overrides, "head.outputs=1"]), True


def make_network(
    options: ModelOptions, spec: Spec, is_open: bool, data: Data, recipe: Recipe, device: torch.device, mesh: DeviceMesh | None
) -> tuple[Model, ModelEmaV3 | None]:
    """Return the network, frozen as the recipe says, and its running average; no process waits for another one here.

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
    arguments = _choose_arguments(options, spec, is_open, data, recipe)
    if mesh is not None:
        return _make_divided(arguments, recipe, device, mesh)
    model = create(**arguments)
    _freeze(model, recipe)
    if recipe.ema is None:
        return model, None
    # A copy of the bare model: a copy of the one that Accelerate prepares would run the original's weights.
    return model, _average(model, recipe.ema, divided=False).to(device)


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
    return ModelEmaV3(model, options.decay, use_warmup=options.use_warmup, foreach=not divided)


def _choose_arguments(options: ModelOptions, spec: Spec, is_open: bool, data: Data, recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `create` and `create_sharded`, with the outputs that the data need."""
    needed = count_required_outputs(spec, data, recipe.data.name)
    outputs, overrides = options.num_outputs, options.overrides
    if outputs is not None and outputs < needed:
        allowed = f"at least {needed}, the {'classes in the data' if data.num_classes else 'vocabulary'}"
        raise SpecError([SpecProblem(recipe.file, "model.num_outputs", str(outputs), allowed)])
    if "outputs" in heads.arguments(spec.head.type):  # other heads have one output for each id of the vocabulary
        outputs = outputs or needed
        # Pretrained weights may have another head, which is replaced after loading. Without them the head is built with the
        # right size, so that it has the initialisation that the spec asks for.
        fine_tuned = options.pretrained or options.checkpoint is not None or find_folder_weights(options.name) is not None
        overrides = overrides if fine_tuned and not is_open else (*overrides, f"head.outputs={outputs}")
    return {
        "source": options.name,
        "pretrained": options.pretrained,
        "checkpoint": options.checkpoint,
        "num_outputs": outputs,
        "overrides": overrides,
        "schedule": options.schedule,
        "exact": options.exact,
    }


def _freeze(model: Model, recipe: Recipe) -> None:
    """Exclude the parts that the recipe names from training."""
    known = [name for name, _ in model.named_modules() if name]
    for name in recipe.train.freeze:
        if name not in known:
            parts = [part for part in known if part.count(".") < 2]
            raise SpecError(
                [SpecProblem(recipe.file, "train.freeze", repr(name), f"parts of the model, such as {join_names(parts)}")]
            )
        model.get_submodule(name).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise SpecError(
            [SpecProblem(recipe.file, "train.freeze", str(list(recipe.train.freeze)), "some parts of the model, not all")]
        )
