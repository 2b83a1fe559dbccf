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
    "num_epochs": ("epochs",),
    "max_epochs": ("epochs",),
    "batch": ("batch_size",),
    "gradient_accumulation_steps": ("accumulate",),
    "gradient_clip_val": ("clip_grad",),
    "warmup": ("warmup_epochs",),
    "smoothing": ("label_smoothing",),
    "amp": ("mixed_precision",),
    "workers": ("num_workers",),
    "dataset": ("data.name",),
    "data": ("data.root",),
    "model": ("model.name",),
    "data_dir": ("root",),
    "scheduler": ("sched",),
    "global_pool": ("pool",),
    "img_size": ("size",),
    "image_size": ("size",),
    "in_chans": ("channels",),
    "drop_path": ("block.drop_path.max",),
    "embed_dim": ("width",),
    "hidden_size": ("width",),
    "num_layers": ("depth",),
    "num_heads": ("heads",),
    "mlp_ratio": ("ratio",),
    "patch_size": ("patch",),
    "vocab_size": ("vocabulary",),
}
_MOST = 2  # settings that one hint names
_ALIKE = 0.7  # one of two keys may be a misspelling if they are at least as similar as this; 1: equal


def translate_timm(override: str) -> str:
    """Return an override whose path is an argument of timm, such as `img_size=224`, with the path in a spec."""
    key, equals, value = override.partition("=")
    if not equals or key not in TIMM:
        return override
    if key == "img_size" and value.strip().isdecimal():  # one side is a square's
        value = f"[{value},{value}]"
    return f"{TIMM[key]}={value}"


def find_settings(path: str, known: Iterable[str], *, misspelled: bool = True) -> list[str]:
    """Return up to two settings that end with the last key of an unknown path, or with revzoo's word for that key.

    Those of the same section come first, then those with the shortest paths.

    Args:
        path: the unknown one.
        known: the paths of all settings.
        misspelled: if there are none, return those of the key that is spelled most like it.
    """
    known = list(known)
    section, _, key = path.rpartition(".")
    settings = _list_called(key, known)
    if not settings and misspelled:
        words = [*(word for word in _OURS if _list_called(word, known)), *(other.rpartition(".")[2] for other in known)]
        settings = _list_called(find_nearest(key, words, cutoff=_ALIKE), known)
    ranks = {other: (other.rpartition(".")[0] != section, other.count(".")) for other in settings}
    return [other for other in sorted(ranks) if ranks[other] == min(ranks.values())][:_MOST]


def _list_called(key: str | None, known: Iterable[str]) -> list[str]:
    ends = tuple(f".{end}" for end in (key, *_OURS.get(key or "", ())))
    return [other for other in known if f".{other}".endswith(ends)]
