"""Call a function as soon as a module has been imported, without importing it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def call_after_import(name: str, function: Callable[[], object]) -> None:
    """Call `function` now if the module `name` has been imported, else right after it will be."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Watcher(name, function))


class _Watcher(MetaPathFinder):
    """Finds nothing itself: lets the other finders find the module, and calls the function when it has run."""

    def __init__(self, name: str, function: Callable[[], object]):
        self._name, self._function = name, function

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._function()

            setattr(spec.loader, "exec_module", run_and_call)  # noqa: B010, mypy takes a method for constant
        return spec
