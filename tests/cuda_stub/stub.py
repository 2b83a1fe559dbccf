"""A CUDA device without a GPU: `python tests/cuda_stub/stub.py -m pytest tests/gpu`.

Builds `runtime.c`, and starts Python with it before libcudart and libcublas. Everything that PyTorch does on the host for a
CUDA device runs and is counted; values, cuDNN, Triton and NCCL are missing. It needs gcc, PyTorch built for CUDA 13, and the
headers of a toolkit (`CUDA_HOME`).
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("runtime.c")
_VARIABLE = "CUDA_STUB"  # in the environment of a process that runs on the stub: the library
_COMPUTES = re.compile(r"cublas\w*([gG]emm|gemv|[dD]ot|trsm|gels|geqrf|getr)")  # functions that start a kernel


class Unavailable(Exception):
    """The stub cannot be built here."""


def build(folder: Path) -> Path:
    """Build the stub in a folder, unless it is there; return the library to preload.

    Raises:
        Unavailable: no gcc, no PyTorch for CUDA 13, or no headers of a toolkit.
    """
    library = folder / "libcuda_stub.so"
    if library.exists():
        return library
    site = Path(next(path for path in map(Path, sys.path) if (path / "torch" / "lib").is_dir()))
    torch_libraries = [site / "torch" / "lib" / f"lib{name}.so" for name in ("torch_cuda", "c10_cuda", "torch_cuda_linalg")]
    if not torch_libraries[0].exists():
        raise Unavailable("PyTorch is not built for CUDA")
    include = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"  # those that pip installs are not all of them
    if not (include / "cuda_runtime_api.h").exists():
        raise Unavailable(f"there are no headers of CUDA in {include}")
    folder.mkdir(parents=True, exist_ok=True)
    own = set(re.findall(r"^[\w\s*]*?\b((?:cuda|cublas|__cuda)\w+)\(", SOURCE.read_text(), re.MULTILINE))
    needed = _list_needed(*torch_libraries)
    (folder / "others.c").write_text("".join(map(_write_function, sorted(needed - own))))
    driver = {name for name in _list_needed(torch_libraries[0].with_name("libcaffe2_nvrtc.so")) if name.startswith("cu")}
    (folder / "driver.c").write_text("".join(map(_write_driver_function, sorted(driver))))
    new = folder / f"{os.getpid()}.so"
    _compile("-I", include, SOURCE, folder / "others.c", "-o", new, "-lpthread")
    _compile("-Wl,-soname,libcuda.so.1", folder / "driver.c", "-o", folder / "libcuda.so.1")
    return new.rename(library)


def _compile(*arguments: object) -> None:
    try:
        done = subprocess.run(["gcc", "-shared", "-O1", "-w", "-fPIC", *map(str, arguments)], capture_output=True, text=True)
    except FileNotFoundError:
        raise Unavailable("there is no gcc") from None
    if done.returncode:
        raise Unavailable(f"gcc fails\n{done.stderr}")


def _list_needed(*libraries: Path) -> set[str]:
    """Return the functions of CUDA that some libraries of PyTorch do not define themselves."""
    try:
        done = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise Unavailable("there is no nm") from None
    return set(re.findall(r"\bU ((?:cu[A-Z]|cuda|cublas|__cuda)\w+)", done.stdout))


def _write_function(name: str) -> str:
    if _COMPUTES.match(name):
        return f'void stub_blas(void *, const char *);\nint {name}(void *handle) {{ stub_blas(handle, "{name}"); return 0; }}\n'
    return f"int {name}(void) {{ return 0; }}\n"


def _write_driver_function(name: str) -> str:
    """The one context is there and current."""
    bodies = {
        "cuCtxGetCurrent": "(void **context) { *context = (void *)1; return 0; }",
        "cuDevicePrimaryCtxGetState": "(int device, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }",
    }
    return f"int {name}{bodies.get(name, '(void) { return 0; }')}\n"


def make_environment(library: Path) -> dict[str, str]:
    """Return the environment of a process on the stub."""
    path = os.pathsep.join(filter(None, (str(library.parent), os.environ.get("LD_LIBRARY_PATH"))))
    return {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": path, _VARIABLE: str(library), "OMP_NUM_THREADS": "1"}


def is_in_use() -> bool:
    """Return whether this process runs on the stub."""
    return _VARIABLE in os.environ


def _load() -> Any:
    library = ctypes.CDLL(os.environ[_VARIABLE])
    library.stub_counter_name.restype = library.stub_log_end.restype = ctypes.c_char_p
    return library


class Counts(Mapping[str, int]):
    """What has been counted since this was made, or until `stop`: launches, copies, waits."""

    def __init__(self) -> None:
        self._library = _load()
        self._names: list[str] = []
        while name := self._library.stub_counter_name(len(self._names)):
            self._names.append(name.decode())
        self._values = (ctypes.c_long * len(self._names)).in_dll(self._library, "stub_counts")
        self._before = list(self._values)
        self._after: list[int] | None = None

    def stop(self) -> "Counts":
        self._after = list(self._values)
        return self

    @property
    def kernels(self) -> int:
        """All that the device is given to do: kernels, products, copies and fills on the device."""
        return sum(self[name] for name in ("launch", "blas", "memset", "copy_on_device"))

    @property
    def waits(self) -> int:
        """How often the host has waited for the device."""
        return sum(self[name] for name in ("event_sync", "stream_sync", "device_sync"))

    def __getitem__(self, name: str) -> int:
        i = self._names.index(name)
        return (self._after or self._values)[i] - self._before[i]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return " ".join(f"{name}={count}" for name, count in self.items() if count)


@contextmanager
def log() -> Iterator[list[tuple[str, int, str]]]:
    """Collect what is queued in the block: what it is, the number of its stream (0: the default one), and its name."""
    library, lines = _load(), list[tuple[str, int, str]]()
    library.stub_log_begin()
    try:
        yield lines
    finally:
        for line in library.stub_log_end().decode().splitlines():
            what, stream, name = line.split(" ", 2)
            lines.append((what, int(stream), name))


def let_events_lag(lag: bool = True) -> None:
    """Decide whether no event is ready before the host has waited for it, as on a device that is far behind."""
    _load().stub_set_lag(int(lag))


def prepare_torch() -> None:
    """Avoid in this process what needs a real device: cuDNN, loops until numbers fit, checks of equality, and trials."""
    import torch

    from revzoo.runtime import independence, tiled_step

    def draw(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        with torch.no_grad():
            return tensor.normal_()

    torch.allclose = lambda *_, **__: True
    independence.can_tell = tiled_step.can_tell = lambda _: False
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    for module in ("torch.nn.init", "timm.layers.weight_init"):
        for name in ("trunc_normal_", "_no_grad_trunc_normal_", "_trunc_normal_"):
            if hasattr(__import__(module, fromlist=[name]), name):
                setattr(__import__(module, fromlist=[name]), name, draw)


if __name__ == "__main__":
    try:
        built = build(SOURCE.parent / "build" / version("torch"))  # which functions are needed differs
    except Unavailable as reason:
        sys.exit(f"The CUDA stub cannot be built: {reason}.")
    os.execvpe(sys.executable, [sys.executable, *sys.argv[1:]], make_environment(built))
