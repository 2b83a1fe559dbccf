"""Checks of a recipe beyond the types of its values: settings that contradict each other, or have no effect together."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any

from revzoo.checkpoint.index import read_index
from revzoo.data.options import BUNDLED, TEXTS, UNROTATED, is_own
from revzoo.errors import SpecProblem, did_you_mean, join_names
from revzoo.spec.names import model_files
from revzoo.spec.tree import MISSING, OVERRIDE, YamlNode, apply_overrides
from revzoo.training.options import MODEL_NAME_ALLOWED, TO_BE_NAMED, Recipe

# Options of `data` that a data set does not read; those that are not listed read all but `shift`, `text` and `image`.
_UNREAD_BY_DATA = {
    "digits": {"root", "augment", "text", "image", "unreadable"},
    **{name: {"shift", "text"} for name in ("wds", "hfds")},
    **{name: {"shift", "augment", "image", "unreadable"} for name in TEXTS},
}
# Options of `schedule`, besides warm-up, that a learning-rate schedule reads.
_READ_BY_SCHEDULE = {
    "cosine": {"min_lr"},
    "linear": {"min_lr"},
    "multistep": {"decay_milestones", "decay_rate"},
    "step": {"decay_epochs", "decay_rate"},
    "poly": {"min_lr", "decay_rate"},
    "constant": set[str](),
}
# Options of `optimizer` that not all optimizers have.
_NOT_OF_ALL = {"momentum", "betas", "eps", "foreach", "fused"}
# Optimizers of timm that were tried on small parameters of several shapes. One by one or all together, the weights and state
# were the same bit for bit; divided over processes or whole, the same up to rounding. The rest differ, or need other packages.
_UPDATE_APART = (
    *("adadelta", "adagrad", "adam", "adamax", "adamw", "adan", "adopt", "laprop", "larc", "lars", "lion", "madgrad"),
    *("momentum", "muon", "nadam", "nadamw", "nesterov", "radam", "rmsprop", "rmsproptf", "sgd"),
)
UPDATE_ONE_BY_ONE = (*_UPDATE_APART, "adafactor", "novograd")
UPDATE_DIVIDED = (*_UPDATE_APART, "lamb")
_Rule = tuple[bool, str, str]  # whether it is broken, the path of the setting that breaks it, and what is allowed there


def find_ineffective_settings(recipe: Recipe) -> list[str]:
    """Return a line for each setting that has no effect because of another one, or not the effect it seems to have."""
    from revzoo.training.optimizer import find_accepted_options

    decay = {"decay_milestones", "decay_epochs", "decay_rate", "min_lr"} - _READ_BY_SCHEDULE[recipe.schedule.sched]
    ruled_out = {
        ("data", recipe.data.name): _find_unread(recipe.data.name),
        ("data.text", recipe.data.name): {"label"} if recipe.data.name in ("causal_lm", "masked_lm") else set(),
        ("data.image", recipe.data.name): {"column"} if recipe.data.name == "wds" else set(),
        ("optimizer", recipe.optimizer.opt): _NOT_OF_ALL - find_accepted_options(recipe.optimizer.opt),
        ("schedule", recipe.schedule.sched): decay,
        ("model", "memory.budget"): set() if recipe.memory.budget is None else {"schedule"},
    }
    return [
        f"{section}.{f.name} has no effect with {choice}"
        for (section, choice), names in ruled_out.items()
        for options in [attrgetter(section)(recipe)]
        for f in fields(options)
        if f.name in names and getattr(options, f.name) != f.default
    ]


def _find_unread(name: str) -> set[str]:
    """Return the options of `data` that a data set does not read; a function of the user's own may read all."""
    return set() if is_own(name) else _UNREAD_BY_DATA.get(name, {"shift", "text", "image"})


def find_contradictions(tree: YamlNode) -> Iterator[SpecProblem]:
    """Yield the problems of values that are each of the right type but do not go together, which is known without torch."""
    if _value(tree, "model.pretrained") is True:
        yield from _find_missing_weights(tree)
    name = _value(tree, "data.name")
    if isinstance(name, str) and name not in BUNDLED and not is_own(name) and _value(tree, "data.root") is None:
        yield _node(tree, "data.root").problem(f"the folder of the data, for name: {name}", hint=" Add data.root=DIR.")
    for rows in (_list_basic_rules, _list_coupling_rules, _list_update_rules):
        for is_broken, path, allowed in rows(partial(_value, tree)):
            if is_broken:
                yield _node(tree, path).problem(allowed)


def _list_basic_rules(get: Callable[[str], Any]) -> list[_Rule]:
    name, sched, epochs, warm_up, batch = (
        get(path) for path in ("data.name", "schedule.sched", "train.epochs", "schedule.warmup_epochs", "data.batch_size")
    )
    mixes = isinstance(get("mixup"), dict)
    is_fresh = not (get("model.pretrained") or get("model.checkpoint"))  # a checkpoint may need its own head
    falls_after = sched == "linear" or get("schedule.warmup_prefix") is True
    lasts = isinstance(warm_up, int) and isinstance(epochs, int) and warm_up >= epochs > 0
    rotated = "bicubic, bilinear, nearest or random with auto_augment, whose rotations have no others"
    cannot_rotate = get("data.augment.auto_augment") is not None and get("data.augment.interpolation") in UNROTATED
    has_no_milestones, is_odd = not get("schedule.decay_milestones"), isinstance(batch, int) and batch % 2 == 1
    is_unmixed = not (get("mixup.mixup_alpha") or get("mixup.cutmix_alpha"))
    plans_tiles = get("model.tiles") == "auto"
    return [
        (get("model.name") == TO_BE_NAMED, "model.name", MODEL_NAME_ALLOWED),
        (is_fresh and _sets_outputs(get("model.overrides")), "model.overrides", "no head.outputs: use model.num_outputs"),
        (cannot_rotate, "data.augment.interpolation", rotated),
        (sched == "multistep" and has_no_milestones, "schedule.decay_milestones", "a value, for sched: multistep"),
        (sched == "step" and not get("schedule.decay_epochs"), "schedule.decay_epochs", "a value, for sched: step"),
        (falls_after and lasts, "schedule.warmup_epochs", f"fewer than the {epochs} of train.epochs: the decay follows it"),
        (mixes and name in TEXTS, "mixup", f"null, for name: {name}: ids cannot be mixed"),
        (mixes and is_odd, "data.batch_size", "an even number: mixup pairs the images of a batch"),
        (mixes and is_unmixed, "mixup", "mixup_alpha or cutmix_alpha above 0, or null for neither"),
        (plans_tiles and get("memory.budget") is None, "model.tiles", "a number without memory.budget"),
        (plans_tiles and isinstance(batch, str), "data.batch_size", "a number with model.tiles: auto"),
    ]


def _list_coupling_rules(get: Callable[[str], Any]) -> list[_Rule]:
    if not isinstance(get("coupling"), dict):
        return []
    moving = [f"coupling.{key}" for key in ("m", "alpha", "beta") if get(f"coupling.{key}") is not None]
    first = (moving or ["coupling"])[0]
    bits, has_budget = get("coupling.kept_bits"), get("memory.budget") is not None
    rises = isinstance(bits, list) and bits != sorted(bits, reverse=True)
    return [
        (bits is None and not moving, "coupling", "kept_bits, or m, alpha or beta, or null for a coupling that stays"),
        (has_budget and rises, "coupling.kept_bits", "the larger number first with memory.budget, whose plan is for the first"),
        (bool(moving) and bits is not None, first, "null with coupling.kept_bits, which determines it"),
        (bool(moving) and has_budget, first, "null with memory.budget: the plan would have to change with it"),
    ]


def _list_update_rules(get: Callable[[str], Any]) -> list[_Rule]:
    """Return what optimizers inside backward and divided networks do not go with."""
    in_backward, divides = get("train.optimizer_in_backward") is True, get("train.shard") not in (None, "none")
    accumulates, is_fp16 = get("train.accumulate") not in (None, 1), get("train.mixed_precision") == "fp16"
    opt, inside = str(get("optimizer.opt")), "with train.optimizer_in_backward"
    clips, looks_ahead = get("train.clip_grad") is not None, get("memory.lookahead") not in (None, 0)
    alone = "false with train.shard: the processes add up their gradients before an update"
    whole = "with train.shard: none, or train.shard: full"
    planned = "null with train.shard: model.schedule says what is kept"
    return [
        (in_backward and accumulates, "train.accumulate", f"1 {inside}, which keeps no gradient for another batch"),
        (in_backward and clips, "train.clip_grad", f"null {inside}: the norm is that of all gradients"),
        (in_backward and is_fp16, "train.mixed_precision", f"bf16 or 'no' {inside}: fp16 looks at all gradients"),
        (in_backward and looks_ahead, "memory.lookahead", f"0 {inside}: what is recovered ahead reads weights in an update"),
        (in_backward and opt not in UPDATE_ONE_BY_ONE, "optimizer.opt", f"{join_names(UPDATE_ONE_BY_ONE)} {inside}"),
        (divides and opt not in UPDATE_DIVIDED, "optimizer.opt", f"{join_names(UPDATE_DIVIDED)} with train.shard"),
        (in_backward and divides, "train.optimizer_in_backward", alone),
        (get("train.offload") is True and not divides, "train.offload", f"false {whole}"),
        (divides and is_fp16, "train.mixed_precision", "bf16 or 'no' with train.shard"),
        (divides and get("memory.budget") is not None, "memory.budget", planned),
    ]


def find_problems_for_timm(tree: YamlNode) -> Iterator[SpecProblem]:
    """Yield the problems that only timm knows, which takes seconds to import: all others are said before."""
    from timm.optim import get_optimizer_info, list_optimizers

    policy = _value(tree, "data.augment.auto_augment")
    if isinstance(policy, str) and not _is_policy(policy):
        yield _node(tree, "data.augment.auto_augment").problem("a timm policy, such as 'rand-m9-mstd0.5' or 'original'")
    opt, known = _node(tree, "optimizer.opt"), [str(name) for name in list_optimizers()]
    if isinstance(opt.value, str) and opt.value not in known:
        yield opt.problem(f"the name of a timm optimizer ({join_names(known)})", hint=did_you_mean(opt.value, known))
    elif isinstance(opt.value, str) and get_optimizer_info(opt.value).second_order:
        yield opt.problem("a first-order optimizer: this one needs the computation graph of the gradient")
    if _value(tree, "optimizer.weight_decay_of") == "all" and _value(tree, "optimizer.layer_decay") is not None:
        yield _node(tree, "optimizer.layer_decay").problem("null with weight_decay_of: all")


def _find_missing_weights(tree: YamlNode) -> Iterator[SpecProblem]:
    """Yield the problem of a pretrained model that names two places of weights, or has none."""
    checkpoint, pretrained, name = (_node(tree, f"model.{key}") for key in ("checkpoint", "pretrained", "name"))
    if _value(tree, "model.checkpoint") is not None:  # typed, it takes the place of the weights that a recipe starts from
        if checkpoint.file != OVERRIDE or pretrained.file == OVERRIDE:
            yield checkpoint.problem("null where model.pretrained is true: weights come from one place")
    elif isinstance(name.value, str) and name.value in model_files() and name.value not in (shipped := read_index()):
        yield name.problem(
            "a model to start from: the folder of a run or of revzoo convert, or one whose weights ship "
            f"({join_names(sorted(shipped))})",
            hint=f" From scratch: revzoo train images model={name.value} (or texts). Weights in a file: model.checkpoint=FILE.",
        )


def _sets_outputs(overrides: Any) -> bool:
    if not isinstance(overrides, list):
        return False
    spec, _ = apply_overrides(YamlNode({}, ""), [item for item in overrides if isinstance(item, str)])
    return _value(spec, "head.outputs") is not None


def _is_policy(name: str) -> bool:
    from timm.data import create_transform

    try:
        create_transform(32, is_training=True, auto_augment=name)
    except (AssertionError, LookupError, ValueError):
        return False
    return True


def _node(tree: YamlNode, path: str) -> YamlNode:
    """Return the node at a dotted path, or a node for the missing value if there is none."""
    for key in path.split("."):
        tree = (tree.value if isinstance(tree.value, dict) else {}).get(key) or tree.missing(key)
    return tree


def _value(tree: YamlNode, path: str) -> Any:
    value = _node(tree, path).to_plain()
    return None if value is MISSING else value
