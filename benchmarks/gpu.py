"""Measure on a borrowed GPU, within one command, whatever this package claims of GPUs and has only counted elsewhere.

    python benchmarks/gpu.py --out DIR                      on a GPU of 80 GB, at most 9 minutes (--seconds 520)
    python benchmarks/gpu.py --out DIR --resume FILE        the cases that are not in the gpu.json of an earlier run
    python benchmarks/gpu.py --out DIR --fake               at toy size without a GPU, on tests/cuda_stub; about a minute
    python benchmarks/gpu.py --count                        benchmarks/results/counted.json, without a GPU; 4 minutes

    facts       versions, missing packages, clocks; a product of matrices, a copy and a launch: what the device can do
    bits        gradients of every mode, with and without look-ahead, equal to those of storing everything, three times
    tests       tests/gpu
    speed       a training step: host and device time, the allocator's peak and reserved bytes beside the counted ones
    graphs      steps captured in a CUDA graph: the same bits, and the time of a replay
    llama       1.1e9 parameters: stored, checkpointed, reversible in place with 8 bits and a random one, in tiles
    cap         the largest batch in 8 GiB, with the allocator as it is and with expandable segments
    plans       three memory budgets: predicted against measured seconds and peaks
    arithmetic  what exact arithmetic, kept bits, mode "selective" and the tripwire cost
    compiled    compiled steps
    compiled plans  PyTorch's activation_memory_budget on a network of timm, and plans for its peaks
    trace       a trace of one step, trace.json.gz

Nothing has to be installed but PyTorch 2.10 and what revzoo imports; packages that are missing are noted, and the cases that
need one say so. On a borrowed machine without the network, from a checkout, with the wheels that it lacks beside it:

    here:   pip download --no-deps --only-binary=:all: -d .whl omegaconf==2.4.0
    there:  python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site .whl/*.whl &&
            PYTHONPATH=/tmp/site:$PWD python3 benchmarks/gpu.py --out $OUT --seconds 520 2>&1 | tee $OUT/log

gpu.json is written after every case, so that a run may be stopped at any time. Every section has a process and a time limit of
its own. A case that raises leaves its traceback, and the next one begins in a new process, since a failed kernel spoils the
old one. Pictures: `python benchmarks/gpu_figure.py DIR/gpu.json`.
"""

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

# Before the first product: with it, the products of one shape repeat themselves bit for bit on any stream.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Asking for devices otherwise initialises CUDA, which must not happen in the process that the others are forked from.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads should not be forked

_ROOT = Path(__file__).parents[1]
_STUB = _ROOT / "tests" / "cuda_stub" / "stub.py"
COUNTED = Path(__file__).with_name("results") / "counted.json"
_DONE, _AGAIN = 0, 3  # how a process of a section ends: with its last case, or with one that raised
_processes = multiprocessing.get_context("fork")  # a fork has imported PyTorch already, which takes seconds

_HEAD = ("network", "", "batch", "method", "host ms", "GPU ms", "of store", "peak", "counted", "reserved")
_WIDTHS = ("<16", "<5", ">6", "<16", *[">9"] * 6)
Steps = dict[tuple[str, str, int], dict[str, Mapping[str, Any]]]


class Results:
    """The measured cases by their keys, in a file that is whole at any time."""

    def __init__(self, file: Path, fake: bool):
        self._file = file
        self.content: dict[str, Any] = {"fake": fake, "runs": [], "cases": {}}

    def read(self, file: Path | None = None) -> None:
        """Take over what a file holds; None is the own one.

        Raises:
            ValueError: it is of the other kind of device.
        """
        content = json.loads((file or self._file).read_text())
        if content["fake"] != self.content["fake"]:
            raise ValueError(f"{file} is {'' if content['fake'] else 'not '}of a run with --fake.")
        self.content = content

    def put(self, key: str, result: dict[str, Any]) -> None:
        self.content["cases"][key] = result | ({"fake": True} if self.content["fake"] else {})
        self.write()

    def note(self, section: str, what: str) -> None:
        """Say of the latest run how a section has ended."""
        self.content["runs"][-1]["sections"][section] = what
        self.write()
        print(f"-- {section}: {what}", flush=True)

    def write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.content, indent=1) + "\n")
        new.replace(self._file)


def measure_sections(names: list[str], results: Results, folder: Path, end: float) -> None:
    """Measure what has no result yet, each section in a process of its own and within its limit.

    Args:
        end: when no more is measured, on the monotonic clock.
    """
    from gpu_cases import GPU, SECTIONS, STUB

    with contextlib.suppress(ImportError):  # what is missing is said by the cases that need it
        importlib.import_module("revzoo.planning.planner")  # takes seconds, and every fork has it then
    for name in names:
        section = SECTIONS[name]
        begin = time.monotonic()
        limit = min(begin + section.seconds, end)
        ended = "done"
        while cases := [
            case
            for case in section.list_cases(STUB if results.content["fake"] else GPU, folder)
            if case.key not in results.content["cases"]
        ]:
            if limit - time.monotonic() < 1:
                ended = "no time was left" if limit == end else f"stopped at its limit of {section.seconds} s"
                break
            current = _processes.Value("i", 0)
            process = _processes.Process(target=_run_cases, args=(cases, results, current), daemon=True)
            process.start()
            process.join(limit - time.monotonic())
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and those that it has started
            process.kill()
            process.join()
            results.read()
            if process.exitcode not in (_DONE, _AGAIN) and time.monotonic() < limit:
                results.put(cases[current.value].key, {"error": f"the process ended with {process.exitcode}"})
        results.note(name, f"{ended}; {time.monotonic() - begin:.0f} s, {len(cases)} cases are left")


def _run_cases(cases: list[Any], results: Results, current: "Synchronized[int]") -> None:
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if results.content["fake"]:
        sys.path.insert(0, str(_STUB.parent))
        import stub

        stub.prepare_torch()
    counted = json.loads(COUNTED.read_text())["counted"] if COUNTED.exists() else {}
    for i, case in enumerate(cases):
        current.value = i
        result, is_spoilt = _run_case(case)
        if case.key in counted:
            result["counted_bytes"] = counted[case.key]
        results.put(case.key, result)
        error = str(result.get("error", "")).strip().rpartition("\n")[2]
        print(f"{case.key}: {result['seconds']:.1f} s {error}", flush=True)
        if is_spoilt:
            sys.exit(_AGAIN)


def _end_with_parent() -> None:
    """End this process and those that it has started with the one that has started it, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _run_case(case: Any) -> tuple[dict[str, Any], bool]:
    """Return what a case has measured, and whether it may have spoilt this process."""
    import torch

    begin, is_spoilt = time.monotonic(), False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            result = case.run()
        except (ImportError, torch.OutOfMemoryError) as error:
            result = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        except Exception:
            result, is_spoilt = {"error": traceback.format_exc()}, True
    if not is_spoilt:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # each stream has one, and each graph: the next peak is not to hold them
        torch.cuda.empty_cache()
    said = sorted({str(warning.message) for warning in caught})
    return {"seconds": time.monotonic() - begin, **result, **({"warnings": said} if said else {})}, is_spoilt


def _has_gpu() -> bool:
    """Ask in a process of its own: asking may initialise CUDA."""
    import torch

    process = _processes.Process(target=lambda: sys.exit(not torch.cuda.is_available()))
    process.start()
    process.join()
    return process.exitcode == 0


def count_cases() -> None:
    """Count the bytes of every training step that is timed on a GPU, and write them beside the results."""
    from gpu_cases import GPU, SECTIONS

    counted = {}
    for section in SECTIONS.values():
        for case in section.list_cases(GPU, Path()):
            if case.count is not None:
                counted[case.key] = case.count()
                print(f"{case.key}: {counted[case.key]:,}", flush=True)
    about = {"command": "python benchmarks/gpu.py --count", "what": "bytes at the peak of a training step, with its update"}
    COUNTED.write_text(json.dumps(about | {"counted": counted}, indent=1) + "\n")


def group_steps(cases: Mapping[str, Mapping[str, Any]], *sections: str) -> Steps:
    """Return the timed steps of some sections by network, dtype and batch, and then by method."""
    steps: Steps = {}
    for key, case in cases.items():
        section, *names = key.split("/")
        if section in sections and len(names) == 4 and "gpu_ms" in case:
            network, dtype, batch, method = names
            steps.setdefault((network, dtype, int(batch)), {})[method] = case
    return dict(sorted(steps.items()))


def print_table(cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Print times, their ratios to storing everything, and bytes in MiB; then how many cases have failed."""
    print(*_format_rows(cases), sep="\n")
    failed = [key for key, case in cases.items() if "error" in case]
    print(f"{len(cases)} cases, {len(failed)} with an error" + ("".join(f"\n  {key}" for key in failed)))


def _format_rows(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield _format_row(*_HEAD)
    for (network, dtype, batch), methods in group_steps(cases, "speed", "arithmetic", "compiled").items():
        base = methods.get("store", {}).get("gpu_ms")
        for method, case in methods.items():
            ratio = f"{case['gpu_ms'] / base:.2f}" if base else "-"
            sizes = (case.get(name) for name in ("peak_bytes", "counted_bytes", "reserved_bytes"))
            mebibytes = ("-" if size is None else f"{size / 2**20:,.0f}" for size in sizes)
            times = (f"{case['host_ms']:.2f}", f"{case['gpu_ms']:.2f}")
            yield _format_row(network, dtype, str(batch), method, *times, ratio, *mebibytes)


def _format_row(*cells: str) -> str:
    return " ".join(f"{cell:{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder for gpu.json and the trace (default: gpu)")
    parser.add_argument("--seconds", type=float, default=520, help="time for all (default: 520)")
    parser.add_argument("--resume", nargs="?", type=Path, const=Path(), metavar="FILE", help="default: the one in --out")
    parser.add_argument("--sections", nargs="+", metavar="NAME", help="some of those above")
    parser.add_argument("--fake", action="store_true", help="toy sizes, on a stub in the place of a GPU")
    parser.add_argument("--count", action="store_true", help="count bytes, and measure nothing")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds  # the first import of PyTorch on a machine may take half a minute of it
    if args.fake and "CUDA_STUB" not in os.environ:
        os.execv(sys.executable, [sys.executable, str(_STUB), *sys.argv])
    if args.count:
        return count_cases()
    if not _has_gpu():
        parser.exit(
            2, "There is no GPU here that PyTorch can use. With --fake the same runs without one, and measures nothing.\n"
        )
    from gpu_cases import SECTIONS

    names = args.sections or list(SECTIONS)
    if unknown := set(names) - SECTIONS.keys():
        parser.error(f"no such section: {', '.join(sorted(unknown))}. Choose of {', '.join(SECTIONS)}")
    if args.out.is_file():
        parser.error(f"--out is a folder. Received: the file {args.out}")
    if args.resume is None and (args.out / "gpu.json").exists():
        parser.error(f"{args.out} has results already. Add --resume, or take another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "gpu.json", args.fake)
    if args.resume is not None:
        try:
            results.read(None if args.resume == Path() else args.resume)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"cannot resume: {error}")
    results.content["runs"].append({"arguments": shlex.join(sys.argv[1:]), "sections": {}})
    results.write()
    measure_sections(names, results, args.out, end)
    print_table(results.content["cases"])


if __name__ == "__main__":
    main()
