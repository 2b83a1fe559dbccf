"""Checks of a recipe beyond the types of its values: settings that contradict each other, or have no effect together."""

from collections.abc import Iterator
from dataclasses import fields
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
    "digits": {"root", "augment", "text", "image"},
    "wds": {"shift", "text"},
    "hfds": {"shift"},
    "characters": {"shift", "augment", "text", "image"},
    "text_classification": {"shift", "augment", "image"},
    "masked_lm": {"shift", "augment", "image"},
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


def find_ineffective_settings(recipe: Recipe) -> list[str]:
    """Return a line for each setting that has no effect because of another one, or not the effect it seems to have."""
    from revzoo.training.optimizer import find_accepted_options

    warm = {"warmup_prefix"} if recipe.schedule.sched in ("linear", "constant") or not recipe.schedule.warmup_epochs else set()
    decay = {"decay_milestones", "decay_epochs", "decay_rate", "min_lr"} - _READ_BY_SCHEDULE[recipe.schedule.sched]
    ruled_out = {
        ("data", recipe.data.name): _find_unread(recipe.data.name),
        ("data.text", recipe.data.name): {"label"} if recipe.data.name == "masked_lm" else set(),
        ("data.image", recipe.data.name): {"column"} if recipe.data.name == "wds" else set(),
        ("optimizer", recipe.optimizer.opt): {"momentum", "betas", "eps"} - find_accepted_options(recipe.optimizer.opt),
        ("schedule", recipe.schedule.sched): decay,
        ("schedule", f"sched={recipe.schedule.sched}, warmup_epochs={recipe.schedule.warmup_epochs}"): warm,
        ("optimizer", "weight_decay=0"): set() if recipe.optimizer.weight_decay else {"weight_decay_of"},
        ("model", "memory.budget"): set() if recipe.memory.budget is None else {"schedule"},
        ("memory", "budget: null"): {"solver"} if recipe.memory.budget is None else set(),
    }
    lines = [
        f"{section}.{f.name} has no effect with {choice}"
        for (section, choice), names in ruled_out.items()
        for options in [attrgetter(section)(recipe)]
        for f in fields(options)
        if f.name in names and getattr(options, f.name) != f.default
    ]
    if recipe.schedule.warmup_epochs >= recipe.train.epochs:
        lines.append(f"schedule.warmup_epochs={recipe.schedule.warmup_epochs} lasts all of train.epochs={recipe.train.epochs}")
    return lines


def _find_unread(name: str) -> set[str]:
    """Return the options of `data` that a data set does not read; a function of the user's own may read all."""
    return set() if is_own(name) else _UNREAD_BY_DATA.get(name, {"shift", "text", "image"})


def find_contradictions(tree: YamlNode) -> Iterator[SpecProblem]:
    """Yield the problems of values that are each of the right type but do not go together, or that only timm knows."""
    yield from _find_optimizer_problems(tree)
    if _value(tree, "train.optimizer_in_backward") is True:
        yield from _find_needs_of_all_gradients(tree)
    if _value(tree, "train.cuda_graph") is True:
        yield from _find_needs_of_cuda_graphs(tree)
    yield from _find_needs_of_shards(tree)
    yield from _find_data_problems(tree)
    yield from _find_model_problems(tree)
    yield from _find_schedule_problems(tree)
    yield from _find_mixup_problems(tree)
    if isinstance(_value(tree, "coupling"), dict):
        yield from _find_coupling_problems(tree)


def _find_optimizer_problems(tree: YamlNode) -> Iterator[SpecProblem]:
    from timm.optim import get_optimizer_info, list_optimizers

    opt, optimizers = _node(tree, "optimizer.opt"), [str(name) for name in list_optimizers()]
    if isinstance(opt.value, str) and opt.value not in optimizers:
        hint = did_you_mean(opt.value, optimizers)
        yield opt.problem(f"the name of a timm optimizer ({join_names(optimizers)})", hint=hint)
    elif isinstance(opt.value, str) and get_optimizer_info(opt.value).second_order:
        yield opt.problem("a first-order optimizer: this one needs the computation graph of the gradient")
    elif isinstance(opt.value, str):
        yield from _find_unsupported_updates(tree, opt.value)
    if _value(tree, "optimizer.weight_decay_of") == "all" and _value(tree, "optimizer.layer_decay") is not None:
        yield _node(tree, "optimizer.layer_decay").problem("null with weight_decay_of: all")


def _find_data_problems(tree: YamlNode) -> Iterator[SpecProblem]:
    name, root = _value(tree, "data.name"), _value(tree, "data.root")
    if isinstance(name, str) and name not in BUNDLED and not is_own(name) and root is None:
        yield _node(tree, "data.root").problem(f"the folder of the data, for name: {name}", hint=" Add data.root=DIR.")
    policy = _value(tree, "data.augment.auto_augment")
    if isinstance(policy, str) and not _is_policy(policy):
        yield _node(tree, "data.augment.auto_augment").problem("a timm policy, such as 'rand-m9-mstd0.5' or 'original'")
    interpolation = _node(tree, "data.augment.interpolation")
    if policy is not None and interpolation.value in UNROTATED:
        yield interpolation.problem("bicubic, bilinear, nearest or random with auto_augment, whose rotations have no others")
    for key in ("scale", "ratio"):
        match _value(tree, f"data.augment.{key}"):
            case [int() | float() as low, int() | float() as high] if low > high:
                yield _node(tree, f"data.augment.{key}").problem("the smaller number first")


def _find_model_problems(tree: YamlNode) -> Iterator[SpecProblem]:
    if _value(tree, "model.pretrained") is True:
        yield from _find_missing_weights(tree)
    if _value(tree, "model.name") == TO_BE_NAMED:
        yield _node(tree, "model.name").problem(MODEL_NAME_ALLOWED)
    overrides = _value(tree, "model.overrides")
    fresh = not (_value(tree, "model.pretrained") or _value(tree, "model.checkpoint"))  # a checkpoint may need its own head
    if fresh and isinstance(overrides, list) and _sets_outputs(overrides):
        yield _node(tree, "model.overrides").problem("no head.outputs: use model.num_outputs")


def _find_schedule_problems(tree: YamlNode) -> Iterator[SpecProblem]:
    sched = _value(tree, "schedule.sched")
    for needed, key in (("multistep", "decay_milestones"), ("step", "decay_epochs")):
        if sched == needed and not _value(tree, f"schedule.{key}"):
            yield _node(tree, f"schedule.{key}").problem(f"a value, for sched: {needed}")
    warm_up, epochs = _value(tree, "schedule.warmup_epochs"), _value(tree, "train.epochs")
    starts_after_it = sched == "linear" or _value(tree, "schedule.warmup_prefix") is True
    if starts_after_it and isinstance(warm_up, int) and isinstance(epochs, int) and warm_up >= epochs > 0:
        yield _node(tree, "schedule.warmup_epochs").problem(f"fewer than the {epochs} of train.epochs: the decay follows it")


def _find_mixup_problems(tree: YamlNode) -> Iterator[SpecProblem]:
    name, mixup, batch_size = (_value(tree, path) for path in ("data.name", "mixup", "data.batch_size"))
    if not isinstance(mixup, dict):
        return
    if name in TEXTS:
        yield _node(tree, "mixup").problem(f"null, for name: {name}: ids cannot be mixed")
    if isinstance(batch_size, int) and batch_size % 2:
        yield _node(tree, "data.batch_size").problem("an even number: mixup pairs the images of a batch")
    if not any(_value(tree, f"mixup.{a}_alpha") for a in ("mixup", "cutmix")):
        yield _node(tree, "mixup").problem("mixup_alpha or cutmix_alpha above 0, or null for neither")


def _find_coupling_problems(tree: YamlNode) -> Iterator[SpecProblem]:
    moving = [key for key in ("m", "alpha", "beta") if _value(tree, f"coupling.{key}") is not None]
    bits, has_budget = _value(tree, "coupling.kept_bits"), _value(tree, "memory.budget") is not None
    if bits is None and not moving:
        yield _node(tree, "coupling").problem("kept_bits, or m, alpha or beta, or null for a coupling that stays")
    if isinstance(bits, list) and has_budget and bits != sorted(bits, reverse=True):
        allowed = "the larger number first with memory.budget: the plan is made for the first"
        yield _node(tree, "coupling.kept_bits").problem(allowed)
    if moving and bits is not None:
        yield _node(tree, f"coupling.{moving[0]}").problem("null beside coupling.kept_bits, which determines it")
    if moving and has_budget:
        yield _node(tree, f"coupling.{moving[0]}").problem("null with memory.budget: the plan would have to change with it")


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


def _find_unsupported_updates(tree: YamlNode, opt: str) -> Iterator[SpecProblem]:
    """Yield the problems of ways to update all parameters that this optimizer does not have."""
    from revzoo.training.optimizer import find_accepted_options

    accepted = find_accepted_options(opt)
    for name in ("foreach", "fused"):
        if _value(tree, f"optimizer.{name}") is not None and name not in accepted:
            yield _node(tree, f"optimizer.{name}").problem(f"null: timm's {opt} does not have it")
    if _value(tree, "optimizer.foreach") is True and _value(tree, "optimizer.fused") is True:
        yield _node(tree, "optimizer.foreach").problem("null or false with fused: true, which updates them in another way")


def _find_needs_of_all_gradients(tree: YamlNode) -> Iterator[SpecProblem]:
    """Yield the problems of settings for which an update must not begin before backward has ended."""
    without = "with train.optimizer_in_backward"
    if _value(tree, "train.accumulate") not in (None, 1):
        yield _node(tree, "train.accumulate").problem(f"1 {without}, which keeps no gradient for another batch")
    if _value(tree, "train.clip_grad") is not None:
        yield _node(tree, "train.clip_grad").problem(f"null {without}: the norm is that of all gradients")
    if _value(tree, "train.mixed_precision") == "fp16":
        allowed = f"bf16 or 'no' {without}: fp16 looks at all gradients before an update"
        yield _node(tree, "train.mixed_precision").problem(allowed)
    if _value(tree, "memory.lookahead") not in (None, 0):
        allowed = f"0 {without}: a step that is recovered ahead reads weights that are being updated"
        yield _node(tree, "memory.lookahead").problem(allowed)


def _find_needs_of_cuda_graphs(tree: YamlNode) -> Iterator[SpecProblem]:
    """Yield the problems of settings with which steps are not all alike, or not on the device alone."""
    without = "with train.cuda_graph"
    if _value(tree, "train.accumulate") not in (None, 1):
        yield _node(tree, "train.accumulate").problem(f"1 {without}")
    for path in ("train.compile", "train.optimizer_in_backward"):
        if _value(tree, path) is True:
            yield _node(tree, path).problem(f"false {without}")
    if _value(tree, "train.mixed_precision") == "fp16":
        yield _node(tree, "train.mixed_precision").problem(
            f"bf16 or 'no' {without}: the scale of fp16 is not that of the graph"
        )
    if _value(tree, "train.shard") not in (None, "none"):
        yield _node(tree, "train.shard").problem(f"none {without}")
    for path, why in (("memory.budget", "a graph keeps its memory for itself"), ("coupling", "a graph has the first coupling")):
        if _value(tree, path) is not None:
            yield _node(tree, path).problem(f"null {without}: {why}")


def _find_needs_of_shards(tree: YamlNode) -> Iterator[SpecProblem]:
    """Yield the problems of settings that need a divided network, or do not go with one."""
    if _value(tree, "train.shard") in (None, "none"):
        if _value(tree, "train.tensor_parallel") not in (None, 1):
            yield _node(tree, "train.tensor_parallel").problem("1 with train.shard: none, or train.shard: full")
        if _value(tree, "train.offload") is True:
            yield _node(tree, "train.offload").problem("false with train.shard: none, or train.shard: full")
        return
    if _value(tree, "train.tensor_parallel") not in (None, 1) and _value(tree, "train.compile") is True:
        yield _node(tree, "train.compile").problem("false with train.tensor_parallel")
    if _value(tree, "train.optimizer_in_backward") is True:
        allowed = "false with train.shard: the processes add up their gradients before an update"
        yield _node(tree, "train.optimizer_in_backward").problem(allowed)
    if _value(tree, "train.mixed_precision") == "fp16":
        yield _node(tree, "train.mixed_precision").problem("bf16 or 'no' with train.shard")


def _sets_outputs(overrides: list[Any]) -> bool:
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
