"""The grammar of a recipe: every class here is a mapping in YAML, every field a key, settable as `optimizer.lr=1e-3`.

Where a setting goes straight to timm it has timm's name and meaning.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf

from revzoo.bounds import (
    Bound,
    FiniteFloat,
    KeptBits,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Rate,
    UnitInterval,
)
from revzoo.data.options import TEXTS, DataOptions
from revzoo.errors import InputError, SpecError, SpecProblem, did_you_mean, listing
from revzoo.planning.budget import budget_bytes
from revzoo.planning.plan import Solver
from revzoo.runtime.schedule import Mode
from revzoo.spec.names import model_files, recipe_file, recipe_files
from revzoo.spec.parsing import NOT_WRITTEN, parse, to_plain
from revzoo.spec.tree import MISSING, Node, apply_overrides, load_tree

DEFAULT_RECIPE = "digits"


def _is_budget(size: int | float | str) -> bool:
    try:
        budget_bytes(size, "cpu")
    except InputError:
        return False
    return True


Budget = Annotated[int | float | str, Bound("bytes, a size such as '8GiB', a share such as '60%', or 'auto'", _is_budget)]


@dataclass(frozen=True)
class ModelOptions:
    """What is trained: the arguments of `revzoo.create`.

    Args:
        name: a model name, a spec file or a folder with spec.yaml; `model=NAME` sets it, and the rest to its defaults.
        num_outputs: None is the number of classes in the data.
    """

    name: str
    overrides: tuple[str, ...] = ()
    pretrained: bool = False
    checkpoint: str | None = None
    num_outputs: PositiveInt | None = None
    schedule: Mode | tuple[Mode, ...] = "invert"
    exact: bool = False


@dataclass(frozen=True)
class OptimizerOptions:
    """Arguments of timm's `create_optimizer_v2`; None is the optimizer's own default. Biases and norms do not decay."""

    opt: str
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0
    momentum: Rate | None = None
    betas: tuple[Rate, Rate] | tuple[Rate, Rate, Rate] | None = None
    eps: PositiveFloat | None = None
    layer_decay: PositiveFloat | None = None


@dataclass(frozen=True)
class ScheduleOptions:
    """Arguments of timm's `create_scheduler_v2`, stepped once per update. It lasts as long as the training."""

    sched: Literal["cosine", "multistep", "step", "poly", "constant"] = "cosine"
    warmup_epochs: NonNegativeInt = 0
    warmup_lr: NonNegativeFloat = 0.0
    min_lr: NonNegativeFloat = 0.0
    decay_milestones: tuple[PositiveInt, ...] = ()
    decay_epochs: PositiveInt | None = None
    decay_rate: PositiveFloat | None = None


@dataclass(frozen=True)
class MixupOptions:
    """Arguments of timm's `Mixup`."""

    mixup_alpha: NonNegativeFloat = 0.0
    cutmix_alpha: NonNegativeFloat = 0.0
    prob: Probability = 1.0
    switch_prob: Probability = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"


@dataclass(frozen=True)
class EmaOptions:
    """Arguments of timm's `ModelEmaV3`. The averaged weights are the ones evaluated and saved."""

    decay: Rate
    use_warmup: bool = False


@dataclass(frozen=True)
class TrainOptions:
    """How long and how.

    Args:
        accumulate: batches per update.
        clip_grad: largest norm of the gradient.
        freeze: parts of the model that stay as they are, such as stem or stages.0.
    """

    epochs: PositiveInt
    accumulate: PositiveInt = 1
    clip_grad: PositiveFloat | None = None
    label_smoothing: Rate = 0.0
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    seed: NonNegativeInt = 0
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryOptions:
    """How much memory a training step may take; the schedule is then planned instead of chosen.

    Args:
        budget: of everything together, in each process; "60%" of the device's memory, "auto" is nine tenths of what is free.
            None: `model.schedule` it is.
        solver: as for `revzoo.solve`.
    """

    budget: Budget | None = None
    solver: Solver = "timeline"


@dataclass(frozen=True)
class CouplingOptions:
    """How the coupling of a converted network moves while it is fine-tuned, each from a first to a last value.

    Args:
        kept_bits: by whole bits, each for as many updates; the network stays exactly invertible.
        m: of momentum, alpha and beta: of dual_residual, in floating point, linearly. Where inversion would round too much
            away, steps between keep their input.
        share: of all updates, during which they move; from then on they have their last value.
    """

    kept_bits: tuple[KeptBits, KeptBits] | None = None
    m: tuple[Rate, Rate] | None = None
    alpha: tuple[FiniteFloat, FiniteFloat] | None = None
    beta: tuple[FiniteFloat, FiniteFloat] | None = None
    share: UnitInterval = 0.5


@dataclass(frozen=True)
class Recipe:
    """A checked, resolved recipe.

    Args:
        file: where the recipe was read from.
    """

    model: ModelOptions
    data: DataOptions
    optimizer: OptimizerOptions
    train: TrainOptions
    schedule: ScheduleOptions = ScheduleOptions()
    mixup: MixupOptions | None = None
    ema: EmaOptions | None = None
    memory: MemoryOptions = MemoryOptions()
    coupling: CouplingOptions | None = None
    file: str = field(default="", compare=False, metadata=NOT_WRITTEN)

    def to_yaml(self) -> str:
        """Return the recipe as self-contained YAML: no base, no overrides, every default written."""
        return OmegaConf.to_yaml(OmegaConf.create(to_plain(self)))


def load_recipe(source: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read, resolve and check a recipe.

    Args:
        source: a recipe's name, a .yaml file, or the folder of a run.
        overrides: dot lists laid over it, such as `train.epochs=3`.

    Raises:
        UnknownNameError: no recipe or file is called so.
        SpecError: the recipe or the overrides have problems; all of them are listed.
    """
    path = Path(source)
    if path.is_dir() and str(source) not in recipe_files():
        path = path / "config.yaml"
    if not (path.suffix == ".yaml" and path.is_file()):
        path = recipe_file(str(source))
    tree, problems = apply_overrides(load_tree(path, recipe_files()), overrides)
    tree = _spelled_out(tree)
    recipe, found = parse(Recipe, tree)
    problems += found
    # What parsed well in one section is checked further even if another section did not parse.
    problems += [problem for problem in _contradictions(tree) if problem.path not in {p.path for p in found}]
    if recipe is None or problems:
        raise SpecError(problems)
    recipe = replace(recipe, model=replace(recipe.model, name=_found_from_here(recipe.model.name)))
    data = recipe.data
    text = replace(data.text, tokenizer=_absolute(data.text.tokenizer))
    return replace(recipe, data=replace(data, root=_absolute(data.root), text=text), file=str(path))


def _spelled_out(tree: Node) -> Node:
    """Write `model: NAME` as the mapping that it stands for."""
    model = tree.value.get("model") if isinstance(tree.value, dict) else None
    if model is None or not isinstance(model.value, str):
        return tree
    return replace(
        tree, value=tree.value | {"model": replace(model, value={"name": replace(model, path=f"{model.path}.name")})}
    )


def _found_from_here(name: str) -> str:
    """Return a folder's absolute path, and any other name as it is."""
    return _absolute(name) or name if name not in model_files() and Path(name).is_dir() else name


def _absolute(path: str | None) -> str | None:
    """Return a path by which a run finds its data again from another folder."""
    return None if path is None else os.path.abspath(Path(path).expanduser())


def notes(recipe: Recipe) -> list[str]:
    """Say which settings have no effect because another one rules them out, or not the effect they seem to have."""
    from timm.optim import get_optimizer_info

    info = get_optimizer_info(recipe.optimizer.opt)
    accepted = {"momentum": info.has_momentum, "betas": info.has_betas, "eps": info.has_eps}
    decay = {"decay_milestones", "decay_epochs", "decay_rate", "min_lr"} - _READ[recipe.schedule.sched]
    ruled_out = {
        ("data", recipe.data.name): _UNREAD.get(recipe.data.name, {"shift", "text"}),
        ("data.text", recipe.data.name): {"label"} if recipe.data.name == "masked_lm" else set(),
        ("optimizer", recipe.optimizer.opt): {name for name, accepts in accepted.items() if not accepts},
        ("schedule", recipe.schedule.sched): decay,
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
        lines.append(f"schedule.warmup_epochs={recipe.schedule.warmup_epochs} lasts all {recipe.train.epochs} epochs")
    return lines


_UNREAD = {
    "digits": {"root", "augment", "text"},
    "characters": {"shift", "augment", "text"},
    "text_classification": {"shift", "augment"},
    "masked_lm": {"shift", "augment"},
}
_READ = {
    "cosine": {"min_lr"},
    "multistep": {"decay_milestones", "decay_rate"},
    "step": {"decay_epochs", "decay_rate"},
    "poly": {"min_lr", "decay_rate"},
    "constant": set(),
}


def _contradictions(tree: Node) -> Iterator[SpecProblem]:
    """Yield what is wrong although every value by itself is of the right type."""
    from timm.optim import get_optimizer_info, list_optimizers

    opt, optimizers = _at(tree, "optimizer.opt"), [str(name) for name in list_optimizers()]
    if isinstance(opt.value, str) and opt.value not in optimizers:
        hint = did_you_mean(opt.value, optimizers)
        yield opt.problem(f"the name of a timm optimizer ({listing(optimizers)})", hint=hint)
    elif isinstance(opt.value, str) and get_optimizer_info(opt.value).second_order:
        yield opt.problem("a first-order optimizer: this one needs the graph of the gradient")
    name = _value(tree, "data.name")
    if name in ("folder", "cifar10", "cifar100", "imagenet") and _value(tree, "data.root") is None:
        yield _at(tree, "data.root").problem(f"the folder of the data, for name: {name}")
    if name in ("text_classification", "masked_lm") and _value(tree, "data.root") and not _value(tree, "data.text.tokenizer"):
        allowed = "a tokenizer file, for texts of your own: revzoo tokenizer FILES... --out tokenizer.json makes one"
        yield _at(tree, "data.text.tokenizer").problem(allowed)
    if name in TEXTS and isinstance(_value(tree, "mixup"), dict):
        yield _at(tree, "mixup").problem(f"null, for name: {name}: ids cannot be mixed")
    policy = _value(tree, "data.augment.auto_augment")
    if isinstance(policy, str) and not _is_policy(policy):
        yield _at(tree, "data.augment.auto_augment").problem("a timm policy, such as 'rand-m9-mstd0.5' or 'original'")
    if _value(tree, "model.pretrained") is True and _value(tree, "model.checkpoint") is not None:
        yield _at(tree, "model.checkpoint").problem("null where model.pretrained is true: weights come from one place")
    overrides = _value(tree, "model.overrides")
    fresh = not (_value(tree, "model.pretrained") or _value(tree, "model.checkpoint"))  # weights may need their own head
    if fresh and isinstance(overrides, list) and _sets_outputs(overrides):
        yield _at(tree, "model.overrides").problem("no head.outputs: use model.num_outputs")
    for key in ("scale", "ratio"):
        match _value(tree, f"data.augment.{key}"):
            case [int() | float() as low, int() | float() as high] if low > high:
                yield _at(tree, f"data.augment.{key}").problem("the smaller number first")
    sched = _value(tree, "schedule.sched")
    for needed, key in (("multistep", "decay_milestones"), ("step", "decay_epochs")):
        if sched == needed and not _value(tree, f"schedule.{key}"):
            yield _at(tree, f"schedule.{key}").problem(f"a value, for sched: {needed}")
    batch_size = _value(tree, "data.batch_size")
    if isinstance(_value(tree, "mixup"), dict) and isinstance(batch_size, int) and batch_size % 2:
        yield _at(tree, "data.batch_size").problem("an even number: mixup pairs the images of a batch")
    moving = [key for key in ("m", "alpha", "beta") if _value(tree, f"coupling.{key}") is not None]
    bits = _value(tree, "coupling.kept_bits")
    if isinstance(_value(tree, "coupling"), dict) and bits is None and not moving:
        yield _at(tree, "coupling").problem("kept_bits, or m, alpha or beta, or null for a coupling that stays")
    if isinstance(bits, list) and _value(tree, "memory.budget") is not None and bits != sorted(bits, reverse=True):
        yield _at(tree, "coupling.kept_bits").problem("the larger number first with memory.budget: it is planned for the first")
    if moving and _value(tree, "coupling.kept_bits") is not None:
        yield _at(tree, f"coupling.{moving[0]}").problem("null beside coupling.kept_bits, which says what it is")
    if moving and _value(tree, "memory.budget") is not None:
        yield _at(tree, f"coupling.{moving[0]}").problem("null with memory.budget: the plan would have to move as well")
    if isinstance(_value(tree, "mixup"), dict) and not any(_value(tree, f"mixup.{a}_alpha") for a in ("mixup", "cutmix")):
        yield _at(tree, "mixup").problem("mixup_alpha or cutmix_alpha above 0, or null for neither")


def _sets_outputs(overrides: list[Any]) -> bool:
    laid, _ = apply_overrides(Node({}, ""), [item for item in overrides if isinstance(item, str)])
    return _value(laid, "head.outputs") is not None


def _is_policy(name: str) -> bool:
    from timm.data import create_transform

    try:
        create_transform(32, is_training=True, auto_augment=name)
    except (AssertionError, LookupError, ValueError):
        return False
    return True


def _at(tree: Node, path: str) -> Node:
    """Return the node at a dotted path, or the node of what should have been written there."""
    for key in path.split("."):
        tree = (tree.value if isinstance(tree.value, dict) else {}).get(key) or tree.missing(key)
    return tree


def _value(tree: Node, path: str) -> Any:
    value = _at(tree, path).to_plain()
    return None if value is MISSING else value
