"""The image models in timm's registry; `import revzoo.timm` calls `register_models`."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from numbers import Integral
from operator import index
from typing import Any

from timm.models import PretrainedCfg, generate_default_cfgs, register_model
from timm.models._features import FeatureGetterNet
from torch import nn

from revzoo.checkpoint.facts import IMAGE_FACTS
from revzoo.checkpoint.index import read_index
from revzoo.errors import InputError, join_names
from revzoo.model.create import create
from revzoo.model.timm_methods import POOLS
from revzoo.spec.loading import load_spec
from revzoo.spec.names import data_root, shipped_model_files
from revzoo.spec.schema import ImageInput
from revzoo.spec.synonym import TIMM
from revzoo.spec.tree import load_tree

__all__ = ["register_models"]  # timm's `register_model` adds the models' names
default_cfgs: dict[str, Any] = {}  # and takes from here what it says about weights
_SOURCES = ("url", "hf_hub_id", "state_dict")  # of weights, which are not read here
_DATA = (*IMAGE_FACTS, "test_crop_pct", "label_names", "label_descriptions")


@cache
def register_models() -> None:
    """Register every image model with timm, under its own name; those with shipped weights as pretrained."""
    files, kinds = shipped_model_files(), dict[str, str]()
    for name, entry in read_index().items():
        spec = load_spec(name)
        if isinstance(spec.input, ImageInput):
            size, outputs = (spec.input.channels, *spec.input.size), spec.head.arguments["outputs"]
            weights = PretrainedCfg(file=str(data_root() / "weights" / entry.file), input_size=size, num_classes=outputs)  # type: ignore[arg-type]
            default_cfgs.update(generate_default_cfgs({name: weights}))
    for name, file in files.items():
        family = file.parent.name
        if family not in kinds:  # all members of a family take the same kind of input, and reading each takes a second
            kinds[family] = load_tree(file, files).value["input"].value["kind"].value
        if kinds[family] == "image":
            register_model(_make_entry(name))


def _make_entry(name: str) -> Callable[..., nn.Module]:
    """Return the function that timm calls to create a model."""

    def make(
        pretrained: bool = False,
        pretrained_cfg: str | Mapping[str, Any] | PretrainedCfg | None = None,
        pretrained_cfg_overlay: Mapping[str, Any] | None = None,
        cache_dir: object = None,
        *,
        features_only: bool = False,
        out_indices: int | tuple[int, ...] | None = None,
        **arguments: Any,
    ) -> Any:
        settings = _read_settings(name, pretrained_cfg) | dict(pretrained_cfg_overlay or {})
        model = _create(name, pretrained, settings, **arguments)
        model.data_config = {**model.data_config, **{key: settings[key] for key in _DATA if key in settings}}
        if not features_only:
            return model
        model.reset_classifier(0)
        count = len(model.feature_info)
        if out_indices is None:
            out_indices = count if len(model.stages) > 1 else min(3, count)
        return FeatureGetterNet(model, out_indices, prune=False)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"The reversible network {name} of revzoo."
    return make


def _create(
    name: str,
    pretrained: bool,
    settings: Mapping[str, Any],
    *,
    num_classes: int | None = None,
    global_pool: str | None = None,
    overrides: Sequence[str] = (),
    **arguments: Any,
) -> Any:
    """Create a model from timm's arguments, and those of `revzoo.create`, which refuses all others."""
    if global_pool is not None and global_pool not in POOLS:
        raise InputError(f"global_pool of {name} is {join_names(list(map(repr, POOLS)))}. Received: {global_pool!r}.")
    headless = pretrained and num_classes == 0  # the weights have a classifier, which is removed when they are loaded
    values = {path: _write(key, arguments.pop(key)) for key, path in TIMM.items() if key in arguments}
    if global_pool is not None and not headless:
        values["head.pool"] = POOLS[global_pool]
    if num_classes is not None and not pretrained:
        values[TIMM["num_classes"]] = str(num_classes)
    if twice := values.keys() & {word.partition("=")[0] for word in overrides}:
        raise InputError(
            f"{name} is given {join_names(sorted(twice))} twice, by timm's argument and in overrides. Leave one out."
        )
    if pretrained and (sources := [key for key in _SOURCES if settings.get(key)]):
        raise InputError(
            f"Weights of {name} are read from a file. Received: {join_names(sources)}. Use pretrained_cfg_overlay="
            "{'file': PATH}, or revzoo.create('hf-hub:OWNER/NAME')."
        )
    shipped = default_cfgs[name].default.file if name in default_cfgs else None
    file = settings.get("file") if pretrained and settings.get("file") != shipped else None
    with warnings.catch_warnings():
        if not overrides:  # the weights may be of another spec, in what was asked for here
            warnings.filterwarnings("ignore", message=".*(saved from|made for) another spec")
        model = create(
            name,
            pretrained=pretrained and file is None,
            checkpoint=file,
            num_outputs=index(num_classes) if pretrained and num_classes else None,
            overrides=[*overrides, *(f"{path}={value}" for path, value in values.items())],
            **arguments,
        )
    if headless:
        model.reset_classifier(0, global_pool)
    return model


def _read_settings(name: str, pretrained_cfg: str | Mapping[str, Any] | PretrainedCfg | None) -> dict[str, Any]:
    """Return the settings of a pretrained_cfg, without those that say nothing."""
    if isinstance(pretrained_cfg, str) and pretrained_cfg:
        raise InputError(f"{name} has no weights tagged {pretrained_cfg!r}. Use {name!r} alone.")
    given = asdict(pretrained_cfg) if isinstance(pretrained_cfg, PretrainedCfg) else dict(pretrained_cfg or {})
    default = asdict(PretrainedCfg())
    return {key: value for key, value in given.items() if value != default.get(key)}


def _write(key: str, value: Any) -> str:
    """Return the value of an override; an image of one side is a square."""
    if key != "img_size":
        return str(value)
    sides = (value, value) if isinstance(value, Integral) else value
    return f"[{','.join(map(str, sides))}]"
