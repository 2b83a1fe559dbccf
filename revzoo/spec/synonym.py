"""Words of other tools for settings: timm's arguments, which overrides of a spec may use, and names to point from."""

from collections.abc import Iterable

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
    "learning_rate": ("lr",),
    "name": ("opt", "sched"),
    "num_epochs": ("epochs",),
    "max_epochs": ("epochs",),
    "gradient_accumulation_steps": ("accumulate",),
    "gradient_clip_val": ("clip_grad",),
    "amp": ("mixed_precision",),
    "dataset": ("data.name",),
    "model": ("model.name",),
    "scheduler": ("sched",),
    "image_size": ("size",),
    "img_size": ("size",),
    "imgsz": ("size",),
    "embed_dim": ("width",),
    "hidden_size": ("width",),
    "num_layers": ("depth",),
    "num_heads": ("heads",),
    "patch_size": ("patch",),
    "vocab_size": ("vocabulary",),
}
_MOST = 2  # settings that one hint names


def translate_timm(override: str) -> str:
    """Return an override whose path is an argument of timm, such as `img_size=224`, with the path in a spec."""
    key, equals, value = override.partition("=")
    if not equals or key not in TIMM:
        return override
    if key == "img_size" and value.strip().isdecimal():  # one side is a square's
        value = f"[{value},{value}]"
    return f"{TIMM[key]}={value}"


def find_settings(path: str, known: Iterable[str]) -> list[str]:
    """Return up to two settings that end with the last key of an unknown path, or with revzoo's word for that key.

    Those of the same section come first, then those with the shortest paths.

    Args:
        path: the unknown one.
        known: the paths of all settings.
    """
    section, _, key = path.rpartition(".")
    ends = tuple(f".{end}" for end in (key, *_OURS.get(key, ())))
    settings = [other for other in known if f".{other}".endswith(ends)]
    ranks = {other: (other.rpartition(".")[0] != section, other.count(".")) for other in settings}
    return [other for other in sorted(ranks) if ranks[other] == min(ranks.values())][:_MOST]
