"""Find specs, recipes and weights by name: those that ship, and those of users."""

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from revzoo.errors import InputError, MissingFileError, SpecError, SpecProblem, UnknownNameError, find_nearest
from revzoo.hub import TIMM_PREFIX, TRANSFORMERS_PREFIX
from revzoo.plugin import list_spec_folders

SPEC_FILE = "spec.yaml"  # in the folder of a run, of a converted network, and of a model that was saved
CONVERTED_WEIGHTS = "model.safetensors"  # next to spec.yaml in a folder that `convert` or `save_pretrained` wrote
INDEX_SUFFIX = ".index.json"  # added to the name of a file of weights, gives that of the index of several files
TENSORFLOW_FILE = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")  # ends the files of a checkpoint of TensorFlow
WEIGHTS_INDEX = CONVERTED_WEIGHTS + INDEX_SUFFIX
CONVERSION = "conversion.json"  # in the folder of a run: where the tensors of the original network went
UNUSED_WEIGHTS = "unused.safetensors"  # of a converted network: tensors of the original that it has no place for
BEST_WEIGHTS = "best.safetensors"  # next to spec.yaml in the folder of a run
NAME_A_RUN = " Name one that revzoo train has written."  # what to do about a path that is no run
TOKENIZER = "tokenizer.json"  # next to the weights of a model for texts
BYTES = "bytes"  # the tokenizer that needs no file
_SUFFIXES = (".yaml", ".yml", ".safetensors", ".pth", ".pt", ".bin")  # of files that were meant
_MOST = 3  # folders that one hint names
ALIKE = 0.75  # one of two model names may be a misspelling if they are at least as similar as this; 1: equal


def data_root() -> Path:
    """Return the folder with specs/ and weights/: in the installed package, or the root of a checkout."""
    package = Path(__file__).parents[1]
    packed = package / "_data"
    return packed if packed.is_dir() else package.parent


def model_files() -> dict[str, Path]:
    """Return the spec file of every model that has a name, sorted by name: those that ship, and those in folders of users.

    Raises:
        SpecError: two files have the same name.
        InputError: REVZOO_SPECS names what is no folder.
    """
    return _name_files(_list_shipped(), _list_own("*.yaml", "models/**/*.yaml"))


def shipped_model_files() -> dict[str, Path]:
    """Return the spec file of every shipped model, sorted by name.

    Raises:
        SpecError: two families have a file of the same name.
    """
    return _name_files(_list_shipped())


def _list_shipped() -> Iterable[Path]:
    return (data_root() / "specs" / "models").glob("*/*.yaml")


def _list_own(*patterns: str) -> Iterable[Path]:
    return [path for folder in list_spec_folders() for pattern in patterns for path in folder.glob(pattern)]


def recipe_files() -> dict[str, Path]:
    """Return the file of every training recipe that has a name, sorted by name: as for models."""
    return _name_files((data_root() / "specs" / "recipes").glob("*.yaml"), _list_own("recipes/*.yaml"))


def list_models(pattern: str = "*") -> list[str]:
    """Return the model names that match a shell-style pattern, sorted."""
    return [name for name in model_files() if fnmatchcase(name, pattern)]


def list_recipes(pattern: str = "*") -> list[str]:
    """Return the recipe names that match a shell-style pattern, sorted."""
    return [name for name in recipe_files() if fnmatchcase(name, pattern)]


def refuse_source(
    kind: str, source: str | Path, known: Iterable[str], wanted: str, file: str, command: str, hint: str = ""
) -> NoReturn:
    """Raise for a source that is neither a known name nor a file: about the file, if it was meant to be one.

    Args:
        kind: of the names and files, such as "model or spec file".
        source: as it was written.
        known: the names that there are.
        wanted: what the file would be, such as "a model's spec".
        file: its name in a folder.
        command: that lists the names.
        hint: for a name that is unknown, or a folder: a sentence with what to type instead, with a leading blank; or empty.

    Raises:
        InputError: it is a file of another kind.
        MissingFileError: it was meant to be a file or a folder.
        UnknownNameError: it was meant to be a name.
    """
    text, listed = str(source), f" {command} prints the names that need no file."
    folder, name = os.path.split(text)
    if os.path.isdir(text):
        raise MissingFileError(text, wanted, find_inside(text, file) or hint or listed, missing=file)
    if os.path.exists(text):
        raise InputError(f"{text} is not {wanted}, which is a .yaml file.{listed}")
    if not folder and not name.endswith((".yaml", ".yml")):
        raise UnknownNameError(kind, text, known, hint)
    raise MissingFileError(text, wanted, find_beside(text) or hint_at_hub(text) or listed)


def require_checkpoint(path: str) -> None:
    """Raise MissingFileError unless there is a file, of weights or their index, or a folder."""
    if not os.path.exists(path) and not os.path.exists(path + INDEX_SUFFIX):
        hint = find_beside(path) or NAME_A_RUN
        raise MissingFileError(path, "a checkpoint or the folder of a run", hint)


def find_inside(folder: str, file: str) -> str:
    """Return " Did you mean 'x'?" for the folders in a folder that hold a file of this name; an empty string for none."""
    places = [str(found.parent) for found in sorted(Path(folder).glob(f"*/{file}"))]
    return f" Did you mean {' or '.join(map(repr, places[:_MOST]))}?" if places else ""


def find_beside(path: str) -> str:
    """Return " Did you mean 'x'?" for the file with the most similar name in the folder of a missing one, or nothing."""
    folder, name = os.path.split(path.rstrip(os.sep))
    try:
        beside = sorted({TENSORFLOW_FILE.sub("", other) for other in os.listdir(folder or ".")})
    except (OSError, ValueError):  # there is no such folder, it cannot be read, or no folder can have this name
        return ""
    nearest = find_nearest(name, [other for other in beside if not other.startswith(".")], 0.6)
    return f" Did you mean {os.path.join(folder, nearest)!r}?" if nearest else ""


def hint_at_model(name: str) -> str:
    """Return what to type instead of a name that no model has, with a leading blank."""
    if name in recipe_files():
        return f" {name} is a recipe, which trains a model: revzoo train {name}."
    nearest = find_nearest(name, model_files(), ALIKE)
    if nearest:
        return f" Did you mean {nearest!r}?"
    if name.startswith((TIMM_PREFIX, TRANSFORMERS_PREFIX)):
        return f" It becomes reversible first: revzoo convert {name} --out DIR; train, plan and fits take the name itself."
    hint = (
        f" Of timm or the hub? revzoo train takes timm:{name} or hf:{name}; for other commands it becomes reversible first: "
        f"revzoo convert timm:{name} --out DIR."
    )
    return hint_at_hub(name) or (hint if re.fullmatch(r"\w+", name) else "")


def hint_at_hub(name: str) -> str:
    """Return what to type for a name like those of the hub, OWNER/NAME or with a dash, with a leading blank; else nothing."""
    owner, slash, _ = name.partition("/")
    is_alike = re.fullmatch(r"[\w.-]+/[\w.-]+" if slash else r"\w[\w.]*(-[\w.]+)+", name)
    is_path = owner == "runs" or os.path.exists(owner) or name.endswith(_SUFFIXES)
    return f" Did you mean 'hf:{name}'?" if is_alike and not is_path else ""


def _name_files(shipped: Iterable[Path], own: Iterable[Path] = ()) -> dict[str, Path]:
    """Return files by their names, sorted by name; of two with the same name, the user's own is refused."""
    files: dict[str, Path] = {}
    for path in [*sorted(shipped), *sorted(own)]:
        first = files.setdefault(path.stem, path)
        if first != path:
            allowed = f"a name of its own: {first} has this one. Rename the file"
            raise SpecError([SpecProblem(str(path), "(file name)", path.stem, allowed)])
    return dict(sorted(files.items()))
