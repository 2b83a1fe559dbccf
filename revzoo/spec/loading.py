"""Load a spec: read its file, apply inheritance and overrides, and check it."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from revzoo.errors import InputError, SpecError, SpecProblem, quote
from revzoo.hub import fetch_if_on_hub
from revzoo.spec.names import SPEC_FILE, hint_at_model, model_files, recipe_files, refuse_source
from revzoo.spec.parsing import parse
from revzoo.spec.schema import Spec
from revzoo.spec.statement import end_statements, merge_specs
from revzoo.spec.synonym import translate_timm
from revzoo.spec.tree import OVERRIDE, YamlNode, apply_overrides, list_places, load_tree, merge

_MOST_BLOCKS = 10_000  # of all stages; more only fill the memory while they are built


def load_spec(source: str | Path, overrides: Iterable[str] = ()) -> Spec:
    """Load a spec from its file and check it, the arguments of all parts included.

    Args:
        source: a model's name, a .yaml file, a folder with a spec.yaml (such as a training run's), or a model of the Hugging
            Face hub (hf-hub:OWNER/NAME).
        overrides: values to replace in the spec, such as `stages.0.depth=6`. timm's names are allowed, such as `img_size=224`.

    Raises:
        UnknownNameError: no model, file or folder has this name; MissingFileError, which is one, if it looks like a path.
        InputError: the source is neither text nor a path, or a file of another kind; or an override is no text.
        SpecError: the spec, a spec it inherits from, or the overrides have problems; all of them are listed.
        CheckpointError: the hub does not have the model, or cannot be reached.
    """
    source = fetch_if_on_hub(source)
    path, models = find_spec_file(source), model_files()
    words = [overrides] if isinstance(overrides, str) else list(overrides)
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise InputError(f"overrides is a list of strings, such as ['head.outputs=10']. Received: {wrong[0]!r} in it.")
    translated = map(translate_timm, words)
    tree = load_tree(path, models, merge_specs, lambda base: _hint_at_recipe(base, path))
    changed, problems = apply_overrides(tree, translated)
    return _check(end_statements(tree, changed), problems, str(path))


def find_spec_file(source: str | Path) -> Path:
    """Return the file of a model's spec, which is not read; this needs no torch.

    Args:
        source: a model's name, a .yaml file, or a folder with a spec.yaml.
    Raises:
        UnknownNameError, InputError: as `load_spec`.
    """
    models = model_files()
    path = models.get(str(source)) or Path(source)
    if os.path.isdir(path):  # unlike pathlib's, it does not raise for a name that no file can have
        path = path / SPEC_FILE
    if not os.path.isfile(path):
        hint = "" if os.path.isdir(source) else hint_at_model(str(source))
        refuse_source("model or spec file", source, models, "a model's spec", SPEC_FILE, "revzoo list", hint)
    if path.suffix not in (".yaml", ".yml", ""):
        raise InputError(
            f"{source} is not a model's spec, which is a .yaml file. Weights go with the name of their model: model=NAME "
            f"{quote(f'model.checkpoint={source}')} in training, checkpoint= in Python, --weights {quote(source)} of revzoo "
            "convert."
        )
    return path


def _hint_at_recipe(base: str, file: Path) -> str:
    if base not in recipe_files():
        return ""
    return f" {base} is a recipe, and so is a file that inherits from it: revzoo train {quote(file)}."


def parse_spec(mapping: Mapping[str, Any], file: str) -> Spec:
    """Check a spec that a program wrote as plain dicts, lists and scalars.

    Args:
        mapping: the spec, with the keys and values it has in YAML.
        file: name for the spec in messages.

    Raises:
        SpecError: the spec has problems; all of them are listed.
    """
    return _check(YamlNode.from_plain(mapping, file), [], file)


def _check(tree: YamlNode, problems: Sequence[SpecProblem], file: str) -> Spec:
    filled = _fill_stages(tree)
    spec, more = parse(Spec, filled)
    more += _find_shadowed_overrides(filled)
    if spec is None or problems or more:
        raise SpecError([*problems, *more])
    if (depth := sum(stage.depth for stage in spec.stages)) > _MOST_BLOCKS:
        allowed = f"stages of at most {_MOST_BLOCKS} blocks together"
        raise SpecError([SpecProblem(file, "stages", f"{depth} blocks", allowed)])
    return replace(spec, file=file, places=dict(list_places(filled)))


def _fill_stages(tree: YamlNode) -> YamlNode:
    """Give every stage its complete `f` and `g`: the block's, with the stage's own merged over them.

    A tree without a usable `block` or `stages` is returned as it is; `parse` reports what is wrong with it.
    """
    block, stages = tree.value.get("block"), tree.value.get("stages")
    if block is None or not isinstance(block.value, dict) or stages is None or not isinstance(stages.value, list):
        return tree
    # A missing `f` is reported once, for the block, and not for every stage.
    shared = {"f": block.missing("f")} | {k: block.value[k] for k in "fg" if k in block.value}
    filled = [_fill_stage(shared, stage) if isinstance(stage.value, dict) else stage for stage in stages.value]
    return replace(tree, value=tree.value | {"stages": replace(stages, value=filled)})


def _fill_stage(shared: dict[str, YamlNode], stage: YamlNode) -> YamlNode:
    branches = {k: merge(_expand_name(node), _expand_name(stage.value.get(k, node))) for k, node in shared.items()}
    return replace(stage, value=stage.value | branches)


def _find_shadowed_overrides(tree: YamlNode) -> list[SpecProblem]:
    """Return a problem for every override of the block's branches that no stage takes, because each has a value of its own.

    Args:
        tree: with the stages filled from the block: a value that a stage takes is the block's own node.
    """
    block, stages = tree.value.get("block"), tree.value.get("stages")
    if block is None or not isinstance(block.value, dict) or stages is None or not isinstance(stages.value, list):
        return []
    branches = [stage.value[k] for stage in stages.value if isinstance(stage.value, dict) for k in "fg" if k in stage.value]
    taken = {id(leaf) for branch in branches for leaf in _list_leaves(branch)}
    shared = [leaf for k in "fg" if k in block.value for leaf in _list_leaves(_expand_name(block.value[k]))]
    return [
        leaf.problem(f"stages.N.{leaf.path.partition('.')[2]}: every stage has a value of its own, which counts")
        for leaf in shared
        if leaf.file == OVERRIDE and id(leaf) not in taken
    ]


def _list_leaves(node: YamlNode) -> list[YamlNode]:
    """Return the nodes below this one that are no mappings."""
    return [leaf for item in node.value.values() for leaf in _list_leaves(item)] if isinstance(node.value, dict) else [node]


def _expand_name(part: YamlNode) -> YamlNode:
    """Write a bare NAME as {type: NAME}, so that another mapping can be merged over it."""
    return replace(part, value={"type": part}) if isinstance(part.value, str) else part
