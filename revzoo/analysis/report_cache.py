"""Reports of models that ship, cached on disk: counting one takes a second, but importing what builds it takes several.

A report is counted anew as soon as it might be another: after any change of a source file or a spec, and with other versions or
settings of Python, PyTorch or the libraries from which models and their twins are built.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from revzoo.analysis.report import ModelReport
from revzoo.file import write_text
from revzoo.plugin import list_packages
from revzoo.spec.names import data_root, model_files, shipped_model_files

_LIBRARIES = ("torch", "torchvision", "timm", "transformers")  # of which models and their twins consist
_VARIABLES = ("TIMM_", "TORCH", "PYTORCH")  # settings of theirs in the environment, such as TIMM_FUSED_ATTN


def read_or_count(name: str, batch_size: int | None, count: Callable[[], ModelReport]) -> ModelReport:
    """Return the cached report of a model, if it ships and nothing has changed since, or else a new one.

    Args:
        name: as it was typed. What is not the name of a model that ships is counted, and not cached; so is everything where
            packages of users add parts, which may do anything when they are imported.
        batch_size: number of examples; None: the default.
        count: counts the report.
    """
    spec = model_files().get(name)
    if spec is None or spec != shipped_model_files().get(name) or list_packages():
        return count()
    file, state = f"{name}.{batch_size or 'default'}.json", _describe_installation()
    report = _read(file, state)
    if report is None:
        report = count()
        _write(file, state, report)
    return report


def find_folder() -> Path:
    """Return the folder of the reports: REVZOO_CACHE, or one in XDG_CACHE_HOME, which is ~/.cache where it is not set.

    Raises:
        RuntimeError: the user has no home.
    """
    if folder := os.environ.get("REVZOO_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "revzoo")


def _read(file: str, state: str) -> ModelReport | None:
    # There is no such file yet, it is damaged, or the user has no home.
    with suppress(OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        cached = json.loads((find_folder() / file).read_text(encoding="utf-8"))
        if cached["state"] == state:
            return ModelReport.from_dict(cached["report"])
    return None


def _write(file: str, state: str, report: ModelReport) -> None:
    with suppress(OSError, RuntimeError):  # there is no place that can be written
        folder = find_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / file, json.dumps({"state": state, "report": report.to_dict()}))


def _describe_installation() -> str:
    """Return a digest of all versions and settings, and of the places, times and sizes of all files on which reports depend."""
    package, data = Path(__file__).parents[1], data_root()
    files = [*package.rglob("*.py"), *(data / "specs").rglob("*.yaml"), *(data / "weights").glob("*.yaml")]
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES))
    facts = [sys.version, *map(_find_version, _LIBRARIES), *variables]
    for file in sorted(files):
        if file.is_file():  # and no lock of an editor, which is a link to nowhere
            status = file.stat()
            facts.append(f"{file} {status.st_mtime_ns} {status.st_size}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _find_version(library: str) -> str:
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return f"no {library}"
