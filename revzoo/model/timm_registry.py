"""The image models in timm's registry: `timm.create_model("rev_vit_s", num_classes=10)`.

`import revzoo` sees to it that `register_models` is called as soon as timm is imported, whichever of the two comes first.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from numbers import Integral
from typing import TYPE_CHECKING, Any

import revzoo
from revzoo.checkpoint.facts import IMAGE_FACTS
from revzoo.checkpoint.index import read_index
from revzoo.errors import InputError, did_you_mean, join_names
from revzoo.spec.names import data_root, shipped_model_files
from revzoo.spec.synonym import TIMM
from revzoo.spec.tree import OVERRIDE, apply_overrides, load_tree

if TYPE_CHECKING:  # at run time timm is imported in functions only: this module is imported while timm is
    from timm.models import PretrainedCfg
    from torch import nn

__all__ = ["register_models"]  # timm's `register_model` adds the models' names
POOLS = {"avg": "mean", "max": "max", "token": "first", "": "none"}  # timm's global_pool -> the pool of a head
default_cfgs: dict[str, Any] = {}  # and takes from here what it says about weights
_OVERRIDES = {name: path for name, path in TIMM.items() if name != "num_classes"}
_OF_HEAD = {"num_classes": TIMM["num_classes"], "global_pool": "head.pool"}  # with weights they are set once those are loaded
_OF_CREATE = ("device", "dtype", "overrides", "schedule", "lookahead", "exact")
_OTHER = (*_OF_HEAD, "features_only", "out_indices")
_SOURCES = ("url", "hf_hub_id", "state_dict")  # of weights, which are not read here
_DATA = (*IMAGE_FACTS, "test_crop_pct", "label_names", "label_descriptions")


def register_models() -> None:
    """Register every image model with timm, under its own name; those with shipped weights as pretrained."""
    from timm.models import PretrainedCfg, generate_default_cfgs, register_model

    files, weights, kinds, trees = shipped_model_files(), read_index(), dict[str, str](), dict[str, Any]()
    for name, file in files.items():
        family = file.parent.name
        if family not in kinds or name in weights:
            trees[name] = load_tree(file, files).value
            kinds[family] = trees[name]["input"].value["kind"].value  # all members of a family take the same kind of input
    default_cfgs.update(
        generate_default_cfgs(
            {
                name: PretrainedCfg(
                    file=str(data_root() / "weights" / entry.file),
                    input_size=tuple(_read_input(trees[name])),  # type: ignore[arg-type]
                    num_classes=trees[name]["head"].value["outputs"].value,
                )
                for name, entry in weights.items()
            }
        )
    )
    for name, file in files.items():
        if kinds[file.parent.name] == "image":
            register_model(_make_entry(name))


def _read_input(tree: Mapping[str, Any]) -> list[int]:
    image = tree["input"].value
    return [image["channels"].value, *(side.value for side in image["size"].value)]


def _make_entry(name: str) -> "Callable[..., nn.Module]":
    """Return the function that timm calls to create a model."""

    def create(
        pretrained: bool = False,
        pretrained_cfg: "str | Mapping[str, Any] | PretrainedCfg | None" = None,
        pretrained_cfg_overlay: Mapping[str, Any] | None = None,
        cache_dir: object = None,
        **arguments: Any,
    ) -> "nn.Module":
        settings = _read_settings(name, pretrained_cfg) | dict(pretrained_cfg_overlay or {})
        return _create(name, pretrained, settings, arguments)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"The reversible network {name} of revzoo."
    return create


def _create(name: str, pretrained: bool, settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> "nn.Module":
    """Create a model from timm's arguments, and those of `revzoo.create`."""
    known = (*_OVERRIDES, *_OF_CREATE, *_OTHER)
    for key in arguments:
        if key not in known:
            raise InputError(f"{name} has no {key!r}.{did_you_mean(key, known)} It takes: {join_names(known, most=20)}.")
    num_classes, pool = arguments.get("num_classes"), arguments.get("global_pool")
    num_classes = int(num_classes) if isinstance(num_classes, Integral) else num_classes  # NumPy's integers, too
    if pool is not None and pool not in POOLS:
        raise InputError(f"global_pool of {name} is {join_names([repr(each) for each in POOLS])}. Received: {pool!r}.")
    own = arguments.get("overrides", ())
    _refuse_contradictions(name, own, arguments)
    overrides = [f"{path}={_write(key, arguments[key])}" for key, path in _OVERRIDES.items() if key in arguments]
    headless = pretrained and num_classes == 0  # the weights have a classifier, which is removed when they are loaded
    if pool is not None and not headless:
        overrides.append(f"head.pool={POOLS[pool]}")
    if num_classes is not None and not pretrained:
        overrides.append(f"head.outputs={num_classes}")
    shipped = default_cfgs[name].default.file if name in default_cfgs else None
    file = settings.get("file") if pretrained and settings.get("file") != shipped else None
    if pretrained and (sources := [key for key in _SOURCES if settings.get(key)]):
        raise InputError(
            f"Weights of {name} are read from a file. Received: {join_names(sources)}. Use pretrained_cfg_overlay="
            "{'file': PATH}, or revzoo.create('hf-hub:OWNER/NAME')."
        )
    with warnings.catch_warnings():
        if not own:  # the weights may be of another spec, in what was asked for here
            warnings.filterwarnings("ignore", message=".*(saved from|made for) another spec")
        model = revzoo.create(
            name,
            pretrained=pretrained and file is None,
            checkpoint=file,
            num_outputs=num_classes if pretrained and not headless else None,
            overrides=[*own, *overrides],
            **{key: value for key, value in arguments.items() if key in _OF_CREATE and key != "overrides"},
        )
    if headless:
        model.reset_classifier(0, pool)
    model.data_config = {**model.data_config, **{key: settings[key] for key in _DATA if key in settings}}
    if not arguments.get("features_only"):
        return model
    from timm.models._features import FeatureGetterNet

    model.reset_classifier(0)
    count = len(model.feature_info)
    return FeatureGetterNet(model, arguments.get("out_indices", count if len(model.stages) > 1 else min(3, count)), prune=False)


def _read_settings(name: str, pretrained_cfg: "str | Mapping[str, Any] | PretrainedCfg | None") -> dict[str, Any]:
    """Return the settings of a pretrained_cfg, without those that say nothing."""
    from timm.models import PretrainedCfg

    if isinstance(pretrained_cfg, str) and pretrained_cfg:
        raise InputError(f"{name} has no weights tagged {pretrained_cfg!r}. Use {name!r} alone.")
    given = asdict(pretrained_cfg) if isinstance(pretrained_cfg, PretrainedCfg) else dict(pretrained_cfg or {})
    default = asdict(PretrainedCfg())
    return {key: value for key, value in given.items() if value != default.get(key)}


def _refuse_contradictions(name: str, overrides: Iterable[str], arguments: Mapping[str, Any]) -> None:
    """Raise InputError where an override sets what an argument of timm sets, too."""
    files = shipped_model_files()
    tree, _ = apply_overrides(load_tree(files[name], files), overrides)
    for key, path in (_OVERRIDES | _OF_HEAD).items():
        node: Any = tree
        for part in path.split("."):
            node = node.value.get(part) if node is not None and isinstance(node.value, Mapping) else None
        if key in arguments and node is not None and node.file == OVERRIDE:
            raise InputError(
                f"{name} is given {path} twice. Received: {key}={arguments[key]!r} and {path}={node.to_plain()} in overrides. "
                "Leave one of them out."
            )


def _write(key: str, value: Any) -> str:
    """Return the value of an override; an image of one side is a square."""
    if key == "img_size":
        sides = (value, value) if isinstance(value, Integral) else value
        return f"[{','.join(map(str, sides))}]"  # of NumPy's integers, too
    return str(value)
