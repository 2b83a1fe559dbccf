"""The grammar of a recipe: every class here is a mapping in YAML and every field a key, which `optimizer.lr=1e-3` sets.

A setting that is passed on to timm has timm's name and meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from omegaconf import OmegaConf

from revzoo.bounds import (
    Bound,
    FiniteFloat,
    KeptBits,
    ModeName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Rate,
    Shard,
    UnitInterval,
)
from revzoo.data.options import DataOptions
from revzoo.errors import SpecError, SpecProblem
from revzoo.planning.amount import ALLOWED, is_amount
from revzoo.planning.solvers import Solver
from revzoo.spec.parsing import NOT_WRITTEN, to_plain

Budget = Annotated[int | float | str, Bound(ALLOWED, is_amount)]


Tracker = Literal["tensorboard", "mlflow", "wandb", "comet_ml", "aim"]  # names that Accelerate gives them

MODEL_NAME_ALLOWED = "the name of a model or its folder, such as model=runs/images"
TO_BE_NAMED = "???"  # the model's name in a printed recipe that leaves it open; training refuses it
ModelName = Annotated[str, Bound(MODEL_NAME_ALLOWED, bool)]


@dataclass(frozen=True)
class ModelOptions:
    """What is trained: arguments of `revzoo.create`.

    Args:
        name: a model name, a spec file or a folder with spec.yaml; or timm:NAME, hf:OWNER/NAME or a folder of Transformers,
            which `revzoo convert` can make reversible. `model=NAME` sets it, and resets the other options except `pretrained`,
            which says what a recipe starts from.
        size: side of the images [pixels], or [height, width]: windows, and positions that were trained, are adapted. None: the
            model's own.
        overrides: changes to the spec, such as `stages.0.depth=3`.
        pretrained: start from the weights that ship, or timm's or the hub's. Those in a folder are loaded anyway.
        checkpoint: start from this weights file.
        num_outputs: outputs of the head; None: the number of classes in the data.
        schedule: mode of all steps, "stage_inputs" (steps invert, nodes recompute), or a list with one mode per unit.
        tiles: into how many pieces every step is cut, of which backward holds one; or a list with one number per unit; or
            "auto", with a budget for memory: planned.
        exact: keep the streams on a grid, on which inversion is exact.
    """

    name: ModelName
    size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    overrides: tuple[str, ...] = ()
    pretrained: bool = False
    checkpoint: str | None = None
    num_outputs: PositiveInt | None = None
    schedule: ModeName | Literal["stage_inputs"] | tuple[ModeName, ...] = "invert"
    tiles: PositiveInt | tuple[PositiveInt, ...] | Literal["auto"] = 1
    exact: bool = False

    def list_overrides(self) -> list[str]:
        """Return the overrides of the spec, that of the size among them."""
        return [*([] if self.size is None else [f"img_size={to_plain(self.size)}"]), *self.overrides]


DecayedParameters = Literal["weights", "weights_and_positions", "all"]


@dataclass(frozen=True)
class OptimizerOptions:
    """Arguments of timm's `create_optimizer_v2`; None: the optimizer's default.

    Args:
        opt: timm's name of the optimizer, such as sgd, adamw or muon.
        lr: learning rate at the end of the warm-up.
        weight_decay: strength of the weight decay.
        weight_decay_of: what is decayed: weights (without biases, norms and tables of positions), these and the positions, or
            all parameters.
        momentum: of sgd and its like.
        betas: decay of the running averages of adam and its like.
        eps: what adam and its like add to the denominator.
        layer_decay: factor by which the learning rate falls from each layer to the one before it.
        foreach: update all parameters together, which takes copies of them; False: one after the other. None: PyTorch's choice,
            together on a GPU.
        fused: one kernel for the whole update, which takes no copies.
    """

    opt: str
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0
    weight_decay_of: DecayedParameters = "weights"
    momentum: Rate | None = None
    betas: tuple[Rate, Rate] | tuple[Rate, Rate, Rate] | None = None
    eps: PositiveFloat | None = None
    layer_decay: PositiveFloat | None = None
    foreach: bool | None = None
    fused: bool | None = None


@dataclass(frozen=True)
class ScheduleOptions:
    """The learning-rate schedule: arguments of timm's `create_scheduler_v2`. Stepped once per update.

    `linear` falls in a straight line from the end of the warm-up to `min_lr`. With `warmup_prefix` the other schedules begin at
    the end of the warm-up too, and milestones count from there; without it the warm-up hides their first epochs. All of them
    end where training ends.

    Args:
        sched: how the learning rate falls after the warm-up.
        warmup_epochs: epochs in which it rises in a straight line from `warmup_lr`.
        warmup_lr: learning rate of the first update of a warm-up.
        warmup_prefix: count the fall from the end of the warm-up, and not from the start of training.
        min_lr: learning rate at which it ends; not for step and multistep.
        decay_milestones: for multistep: the epochs after which it falls.
        decay_epochs: for step: number of epochs after which it falls, each time.
        decay_rate: factor by which it falls at each step; for poly, the power. None: timm's, 0.1.
    """

    sched: Literal["cosine", "linear", "multistep", "step", "poly", "constant"] = "cosine"
    warmup_epochs: NonNegativeInt = 0
    warmup_lr: NonNegativeFloat = 0.0
    warmup_prefix: bool = False
    min_lr: NonNegativeFloat = 0.0
    decay_milestones: tuple[PositiveInt, ...] = ()
    decay_epochs: PositiveInt | None = None
    decay_rate: PositiveFloat | None = None


@dataclass(frozen=True)
class MixupOptions:
    """Mixup and cutmix: arguments of timm's `Mixup`.

    Args:
        mixup_alpha: images are mixed in shares of the distribution Beta(alpha, alpha); 0: they are not.
        cutmix_alpha: rectangles are exchanged whose shares of the image are distributed likewise; 0: they are not.
        prob: probability that a batch, a pair or an element is mixed at all.
        switch_prob: probability of cutmix where both are possible.
        mode: what has a share of its own: the batch, each pair of images, or each image.
    """

    mixup_alpha: NonNegativeFloat = 0.0
    cutmix_alpha: NonNegativeFloat = 0.0
    prob: Probability = 1.0
    switch_prob: Probability = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"


@dataclass(frozen=True)
class EmaOptions:
    """A running average of the weights, which is what is evaluated and saved: arguments of timm's `ModelEmaV3`.

    Args:
        decay: share of the average that an update leaves.
        use_warmup: begin with a smaller decay, which rises with the number of updates.
    """

    decay: Rate
    use_warmup: bool = False


@dataclass(frozen=True)
class TrainOptions:
    """How long and how a model is trained.

    Args:
        epochs: number of epochs.
        max_updates: updates after which training ends, also in the middle of an epoch; None: it trains all epochs.
        accumulate: batches per optimizer update.
        clip_grad: largest norm of the gradient; None: no clipping.
        label_smoothing: probability mass that is spread over all classes.
        class_weights: by how much the loss of each class's examples counts: a list with a number for each class, or "balanced",
            in inverse proportion to how many training examples a class has; None: all the same. Scores are not weighted.
        patience: epochs without a better score after which training ends; None: it trains all epochs.
        mixed_precision: autocast dtype of the steps; "no" is float32.
        seed: of initialisation, order, augmentation and dropout.
        freeze: modules of the model that are not trained, such as stem or stages.0.
        compile: compile the network with `torch.compile`.
        save_every: updates between two saved states within an epoch; None: a state is saved after every epoch only.
        track: tools that get settings, metrics and pictures: tensorboard, mlflow, wandb, comet_ml, aim.
        log_every: seconds between two lines within an epoch where there is no terminal, and between two points for trackers.
        save_async: train on while a state is written, from a copy on the host; None: where training is on a GPU.
        keep_states: how many of the newest states are kept; the older ones are for when a newer one is damaged.
        optimizer_in_backward: update each parameter in backward, as soon as its gradient is complete, and free the gradient.
        timeout_seconds: how long a process waits for another before it gives up; None: PyTorch's choice, 10 minutes or 30.
        shard: how several processes hold the network: "none", each holds all of it; "full", each holds a share of weights,
            gradients and optimizer state; "hybrid", the same within each node, and every node holds all of it.
        offload: with shard, keep shares on the host between uses: weights, gradients, optimizer state and its update.
    """

    epochs: PositiveInt
    max_updates: PositiveInt | None = None
    accumulate: PositiveInt = 1
    clip_grad: PositiveFloat | None = None
    label_smoothing: Rate = 0.0
    class_weights: Literal["balanced"] | tuple[PositiveFloat, ...] | None = None
    patience: PositiveInt | None = None
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    seed: NonNegativeInt = 0
    freeze: tuple[str, ...] = ()
    compile: bool = False
    save_every: PositiveInt | None = None
    save_async: bool | None = None
    track: tuple[Tracker, ...] = ()
    log_every: PositiveFloat = 10.0
    keep_states: PositiveInt = 2
    optimizer_in_backward: bool = False
    timeout_seconds: PositiveFloat | None = None
    shard: Shard = "none"
    offload: bool = False

    def count_updates(self, per_epoch: int) -> int:
        """Return the number of updates of the whole training, with `per_epoch` in each epoch."""
        return min(self.epochs * per_epoch, self.max_updates or self.epochs * per_epoch)


@dataclass(frozen=True)
class MemoryOptions:
    """How much memory a training step may take; with a budget the schedule is planned instead of `model.schedule`.

    Args:
        budget: limit for the peak of all memory together, per process: bytes, a size such as "8GiB", a share of the device's
            memory such as "60%", or "auto" for nine tenths of what is free. None: `model.schedule` is used.
        solver: "timeline" or "knapsack", as for `revzoo.solve`.
        lookahead: how many steps are recovered ahead of backward, 0 or 1.
    """

    budget: Budget | None = None
    solver: Solver = "timeline"
    lookahead: Literal[0, 1] = 0


@dataclass(frozen=True)
class CouplingOptions:
    """How the coupling of a converted network changes during fine-tuning; every option is a pair (first value, last value).

    m, alpha and beta change linearly, in floating point; where inverting many steps in a row would lose too much to rounding,
    some of them recompute instead.

    Args:
        kept_bits: changes by whole bits, each value for equally many updates; the network stays exactly invertible.
        m: coefficient of a momentum coupling.
        alpha: coefficient of a dual_residual coupling.
        beta: coefficient of a dual_residual coupling.
        share: share of all updates during which the values change; afterwards they keep their last value.
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
        model: what is trained.
        data: on which data.
        optimizer: the optimizer.
        train: how long and how.
        schedule: the learning-rate schedule.
        mixup: mixup and cutmix; None: neither.
        ema: running average of the weights; None: none.
        memory: budget for memory.
        coupling: how the coupling changes; None: it stays.
        file: file the recipe was read from.
        places: of each setting that was written, the file, or "override".
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
    places: Mapping[str, str] = field(default_factory=dict, compare=False, metadata=NOT_WRITTEN)

    def error(self, path: str, received: str, allowed: str) -> SpecError:
        """Return the error of a setting that does not fit the data, the model or the machine, with the place of the setting.

        Args:
            path: of the setting.
            received: the value as it was written.
            allowed: which values are allowed.
        """
        return SpecError([SpecProblem(self.places.get(path, self.file), path, received, allowed)])

    def to_yaml(self) -> str:
        """Return the recipe as self-contained YAML: no base, no overrides, every default written out."""
        return OmegaConf.to_yaml(OmegaConf.create(to_plain(self)))
