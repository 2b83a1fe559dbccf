"""Words of other tools for settings: timm's arguments, which overrides of a spec may use, and names to point from."""

from collections.abc import Iterable

from revzoo.errors import find_nearest

# Arguments of `timm.create_model`, and where a spec has what they set.
TIMM = {
    "num_classes": "head.outputs",
    "in_chans": "input.channels",
    "img_size": "input.size",
    "drop_path_rate": "block.drop_path.max",
    "drop_rate": "head.dropout",
}
# What timm, Transformers, Lightning and others call a setting, and the last keys that it may have here.
_OURS = {
    "num_classes": ("num_outputs", "outputs"),
    "classes": ("num_outputs", "outputs"),
    "learning_rate": ("lr",),
    "wd": ("weight_decay",),
    "name": ("opt", "sched"),
    "type": ("opt", "sched"),
    "optim": ("opt",),
    "optimizer_name": ("opt",),
    "num_epochs": ("epochs",),
    "max_epochs": ("epochs",),
    "num_train_epochs": ("epochs",),
    "bs": ("batch_size",),
    "batch": ("batch_size",),
    "train_batch_size": ("batch_size",),
    "per_device_train_batch_size": ("batch_size",),
    "gradient_accumulation_steps": ("accumulate",),
    "accumulate_grad_batches": ("accumulate",),
    "max_grad_norm": ("clip_grad",),
    "gradient_clip_val": ("clip_grad",),
    "warmup": ("warmup_epochs",),
    "smoothing": ("label_smoothing",),
    "amp": ("mixed_precision",),
    "precision": ("mixed_precision",),
    "bf16": ("mixed_precision",),
    "fp16": ("mixed_precision",),
    "workers": ("num_workers",),
    "dataset": ("data.name",),
    "data": ("data.root",),
    "model": ("model.name",),
    "data_dir": ("root",),
    "data_path": ("root",),
    "save_steps": ("save_every",),
    "compile_model": ("compile",),
    "scheduler": ("sched",),
    "global_pool": ("pool",),
    "img_size": ("size",),
    "image_size": ("size",),
    "in_chans": ("channels",),
    "in_channels": ("channels",),
    "drop_path": ("block.drop_path.max",),
    "embed_dim": ("width",),
    "hidden_size": ("width",),
    "dim": ("width",),
    "num_layers": ("depth",),
    "num_hidden_layers": ("depth",),
    "num_heads": ("heads",),
    "num_attention_heads": ("heads",),
    "mlp_ratio": ("ratio",),
    "patch_size": ("patch",),
    "vocab_size": ("vocabulary",),
    "max_length": ("length",),
    "pad_token_id": ("padding",),
}
_MOST = 2  # settings that one hint names
_ALIKE = 0.7  # how similar keys are of which one may be a misspelling of the other; 1: equal


def translate_timm(override: str) -> str:
    """Return an override whose path is an argument of timm, such as `img_size=224`, with the path in a spec."""
    key, equals, value = override.partition("=")
    if not equals or key not in TIMM:
        return override
    if key == "img_size" and value.strip().isdecimal():  # one side is a square's
        value = f"[{value},{value}]"
    return f"{TIMM[key]}={value}"


def find_settings(path: str, known: Iterable[str]) -> list[str]:
    """Return the settings whose last key is that of an unknown path, or what that one is called here: none, one or two.

    Those of the same section come first, then those with the shortest paths.
    """
    key = path.rpartition(".")[2]
    ends = (key, *_OURS.get(key, ()))
    return _take_closest(path, [other for other in known if any(f".{other}".endswith(f".{end}") for end in ends)])


def find_similar_settings(path: str, known: Iterable[str]) -> list[str]:
    """Return the settings whose last key, or what another tool calls it, is spelled most like that of an unknown path."""
    known = list(known)
    section, dot, key = path.rpartition(".")
    foreign = [word for word in _OURS if find_settings(word, known)]
    nearest = find_nearest(key, [*foreign, *(other.rpartition(".")[2] for other in known)], cutoff=_ALIKE)
    return [] if nearest is None else find_settings(f"{section}{dot}{nearest}", known)


def _take_closest(path: str, settings: Iterable[str]) -> list[str]:
    section = path.rpartition(".")[0]
    ranks = {other: (other.rpartition(".")[0] != section, other.count(".")) for other in settings}
    return [other for other in sorted(ranks) if ranks[other] == min(ranks.values())][:_MOST]


def suggest_settings(paths: Iterable[str]) -> str:
    """Return " Did you mean 'a' or 'b'?" (with the leading blank), or an empty string for no paths."""
    words = " or ".join(map(repr, paths))
    return f" Did you mean {words}?" if words else ""
