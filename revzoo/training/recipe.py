"""Read a recipe: a YAML file of `specs/recipes` or of the user's own, with overrides."""

import json
import os
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from revzoo.data.options import is_own, require_root
from revzoo.errors import SpecError, SpecProblem, UnknownNameError, find_nearest, quote
from revzoo.plugin import import_if_installed
from revzoo.spec.names import BYTES, model_files, recipe_files, refuse_source
from revzoo.spec.outline import check_names
from revzoo.spec.parsing import parse, to_plain
from revzoo.spec.schema import Spec
from revzoo.spec.synonym import TIMM
from revzoo.spec.tree import OVERRIDE, YamlNode, apply_overrides, list_places, load_tree, merge
from revzoo.training.options import TO_BE_NAMED, ModelOptions, Recipe
from revzoo.training.recipe_check import find_contradictions, find_problems_for_timm

DEFAULT_RECIPE = "digits"
_FILE = "config.yaml"  # the recipe in the folder of a run


def load_recipe(source: str | Path, overrides: Iterable[str] = (), *, complete: bool = True, has_data: bool = False) -> Recipe:
    """Read, resolve and check a recipe.

    Args:
        source: a recipe's name, a .yaml file, or the folder of a run.
        overrides: changes to it as dot lists, such as `train.epochs=3`.
        complete: whether the model's name and the folder of the data must be given. If not, a missing name becomes `???`.
        has_data: whether `data.root` must be there, which is looked up before timm is imported.

    Raises:
        UnknownNameError: there is no recipe or file of that name.
        SpecError: the recipe or the overrides have problems; all of them are listed.
        InputError: a file names a function of data that is not installed.
        DataError: `data.root` is not there, or a file where the data are a folder.
    """
    path = Path(source)
    if path.is_dir() and str(source) not in recipe_files():
        path = path / _FILE
    if not (path.suffix == ".yaml" and path.is_file()):
        names = recipe_files()
        if str(source) not in names and str(source) in model_files():
            hint = f" {source} is a model, which a recipe trains: revzoo train {DEFAULT_RECIPE} model={source}."
            raise UnknownNameError("recipe", str(source), names, hint)
        if str(source) not in names:
            hint = "" if find_nearest(str(source), names, 0.6) else f" Your own is a .yaml file: revzoo train {source}.yaml."
            if os.path.isdir(source):
                hint = f" To train on the images in it: revzoo train images {quote(f'data.root={source}')}."
            refuse_source("recipe", source, names, "a recipe", _FILE, "revzoo list --recipes", hint)
        path = names[str(source)]
    tree, problems = _leave_out_gone(load_tree(path, recipe_files(), _merge_recipes)), []
    for override in overrides:  # one by one: model.overrides=[...] may follow model=NAME
        changed, more = apply_overrides(tree, [override])
        tree = _merge_recipes(tree, changed)
        problems += more
    tree = _move_coupling(tree)
    if not complete:
        tree = merge(YamlNode.from_plain({"model": {"name": TO_BE_NAMED}}, str(path)), tree)
    recipe, parse_problems = parse(Recipe, tree)
    problems += map(_point_to_model, parse_problems)
    # Sections that parsed are checked further even if another one did not, so that all problems are reported at once.
    reported = {problem.path for problem in parse_problems}
    problems += [
        problem
        for problem in find_contradictions(tree)
        if problem.path not in reported
        and (complete or (problem.path != "data.root" and problem.received != repr(TO_BE_NAMED)))
    ]
    if recipe is not None and not problems:
        _check_overrides(recipe.model)
        if has_data:
            require_root(replace(recipe.data, root=_make_absolute(recipe.data.root)))
    if problems := problems or list(find_problems_for_timm(tree)):
        raise SpecError(problems)
    assert recipe is not None
    places = dict(list_places(tree))
    if complete and is_own(recipe.data.name) and places["data.name"] != OVERRIDE:  # a file names code
        import_if_installed(recipe.data.name.partition(":")[0], f"{places['data.name']}, data.name,")
    model = recipe.model
    pretrained = model.pretrained and model.checkpoint is None  # a checkpoint was typed: `find_contradictions`
    recipe = replace(recipe, model=replace(model, name=_absolute_if_folder(model.name), pretrained=pretrained))
    data = recipe.data
    file = data.text.tokenizer
    text = replace(data.text, tokenizer=file if file == BYTES else _make_absolute(file))
    data = replace(data, root=_make_absolute(data.root), text=text)
    return replace(recipe, data=data, file=str(path), places=places)


def _leave_out_gone(tree: YamlNode) -> YamlNode:
    """Return a recipe without an option that runs and weights of earlier versions name, where it did nothing."""
    train = tree.value.get("train", tree)
    if not isinstance(train.value, dict) or (gone := train.value.get("cuda_graph")) is None or gone.value is not False:
        return tree
    kept = {key: node for key, node in train.value.items() if node is not gone}
    return replace(tree, value=tree.value | {"train": replace(train, value=kept)})


def _merge_recipes(base: YamlNode, over: YamlNode) -> YamlNode:
    """Merge two recipes; a model that is named in the second has its own settings, and none of the first."""
    return merge(base, _expand_model_name(over))


def _expand_model_name(tree: YamlNode) -> YamlNode:
    """Replace `model: NAME` by a mapping that has all other options of the model but `pretrained` at their defaults."""
    model = tree.value.get("model") if isinstance(tree.value, dict) else None
    if model is None or not isinstance(model.value, str):
        return tree
    defaults = {each.name: to_plain(each.default) for each in fields(ModelOptions) if each.name not in ("name", "pretrained")}
    options = {key: replace(model, value=value, path=f"{model.path}.{key}") for key, value in defaults.items()}
    options["name"] = replace(model, path=f"{model.path}.name")
    return replace(tree, value=tree.value | {"model": replace(model, value=options)})


def _move_coupling(tree: YamlNode) -> YamlNode:
    """Make a coupling with a name, such as `coupling=leapfrog`, an override of the model: a schedule of one has no name."""
    coupling = tree.value.get("coupling", tree)
    value = coupling.to_plain()
    if not isinstance(value, str) and (coupling is tree or not isinstance(value, dict) or "type" not in value):
        return tree
    model = tree.value.get("model", tree.missing("model")).to_plain()
    overrides = model.get("overrides") or () if isinstance(model, dict) else ()
    overrides = [*overrides, f"block.coupling={value if isinstance(value, str) else json.dumps(value)}"]
    moved = YamlNode.from_plain({"model": {"overrides": overrides}, "coupling": None}, coupling.file)
    return merge(tree, moved)


def _point_to_model(problem: SpecProblem) -> SpecProblem:
    """Return a problem; if it is a setting of the model at the top of the recipe, the problem now says where it belongs."""
    key = problem.path.partition(".")[0]
    if key in {f.name for f in fields(Recipe)} or not (key in TIMM or key in {f.name for f in fields(Spec)}):
        return problem
    return replace(problem, hint=f" For the model, set it by model.overrides=[{problem.path}=...].")


def _check_overrides(model: ModelOptions) -> None:
    """Raise SpecError for names in the overrides of a model with a name that no part has, before torch is imported."""
    try:
        if model.name in model_files():
            check_names(model.name, model.overrides)
    except SpecError as error:
        if [problem.path for problem in error.problems] != ["head.outputs"]:  # missing, it is what the data need
            raise


def _absolute_if_folder(name: str) -> str:
    """Return the absolute path of a folder, and any other name unchanged."""
    return _make_absolute(name) or name if name not in model_files() and Path(name).is_dir() else name


def _make_absolute(path: str | None) -> str | None:
    """Return an absolute path, so that a run finds its data when it is resumed from another folder."""
    # Not pathlib's expanduser, which raises for ~NAME if there is no such user.
    return None if path is None else os.path.abspath(os.path.expanduser(path))
