"""From a name or a file to a checked spec."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from revzoo.errors import SpecError, SpecProblem, UnknownNameError
from revzoo.spec.names import model_files
from revzoo.spec.parsing import parse
from revzoo.spec.schema import Spec
from revzoo.spec.tree import Node, apply_overrides, load_tree, merge


def load_spec(source: str | Path, overrides: Iterable[str] = ()) -> Spec:
    """Read, resolve and check a spec.

    The arguments of parts are checked against the registered signatures, as far as the parts have been imported.

    Args:
        source: a model's name, a .yaml file, or a folder that holds spec.yaml (such as a run's).
        overrides: dot lists laid over the spec, such as `stages.0.depth=6`.

    Raises:
        UnknownNameError: no model, file or folder is called so.
        SpecError: the spec, its bases or the overrides have problems; all of them are listed.
    """
    models = model_files()
    path = models.get(str(source)) or Path(source)
    if path.is_dir():
        path = path / "spec.yaml"
    if not path.is_file():
        raise UnknownNameError("model or spec file", str(path), models)
    return _checked(*apply_overrides(load_tree(path, models), overrides), str(path))


def spec_of(mapping: Mapping[str, Any], file: str) -> Spec:
    """Check a spec that a program has made of plain values.

    Args:
        mapping: as YAML has it.
        file: what messages call it.

    Raises:
        SpecError: it has problems; all of them are listed.
    """
    return _checked(Node.of(mapping, file), [], file)


def _checked(tree: Node, problems: Sequence[SpecProblem], file: str) -> Spec:
    spec, found = parse(Spec, _fill_stages(tree))
    if spec is None or problems:
        raise SpecError([*problems, *found])
    return replace(spec, file=file)


def _fill_stages(tree: Node) -> Node:
    """Lay the `f` and `g` of every stage over the block's, where block and stages are what they should be."""
    block, stages = tree.value.get("block"), tree.value.get("stages")
    if block is None or not isinstance(block.value, dict) or stages is None or not isinstance(stages.value, list):
        return tree
    # A missing f is the block's fault, once, not each stage's.
    shared = {"f": block.missing("f")} | {k: block.value[k] for k in "fg" if k in block.value}
    filled = [_over(shared, stage) if isinstance(stage.value, dict) else stage for stage in stages.value]
    return replace(tree, value=tree.value | {"stages": replace(stages, value=filled)})


def _over(shared: dict[str, Node], stage: Node) -> Node:
    own = {k: merge(_spelled_out(node), _spelled_out(stage.value.get(k, node))) for k, node in shared.items()}
    return replace(stage, value=stage.value | own)


def _spelled_out(part: Node) -> Node:
    """Write a bare NAME as {type: NAME}, which a map can be laid over."""
    return replace(part, value={"type": part}) if isinstance(part.value, str) else part
