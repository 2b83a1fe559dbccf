"""What is measured on a GPU besides training steps: what it can do, bits, tests, graphs, the largest batch, plans."""

from __future__ import annotations  # those that name classes of revzoo would import what may be missing

import gc
import itertools
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from gpu_training import METHODS, Method, capture, make_classifier, time_calls
from torch import Tensor, nn

import revzoo
from revzoo.errors import BudgetError

_PACKAGES = (
    *("accelerate", "matplotlib", "omegaconf", "peft", "pytest", "pytest-timeout", "pytest-xdist", "rich"),
    *("scikit-learn", "timm", "torch", "torchvision", "transformers", "triton"),
)
_MOST_TRACE_BYTES = 16 * 2**20  # a borrowed machine may give back no larger file


def compute_gradients(training: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the gradients of a step, with the same random numbers in each call."""
    torch.manual_seed(0)
    training.zero_grad()
    training(*inputs).backward()
    return [p.grad.clone() for p in training.parameters() if p.grad is not None]


def compare(gradients: list[Tensor], expected: list[Tensor]) -> dict[str, Any]:
    """Return whether gradients are equal in every bit, and else the largest error of a tensor, relative to its norm."""
    if all(map(torch.equal, gradients, expected)):
        return {"equal": True}
    errors = [(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in zip(gradients, expected, strict=True)]
    return {"equal": False, "largest_error": float(torch.stack(errors).max())}


def describe_machine() -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    missing = [f"missing: {name}" for name, found in versions.items() if found is None]
    machine = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "packages": versions, "missing": missing}
    try:
        from runtime import describe_environment

        return machine | describe_environment()
    except (ImportError, OSError) as error:  # without rich, or without git
        return machine | {"environment": str(error)}


def query_driver() -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {"text": None}
    names = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    query = ["nvidia-smi", f"--query-gpu={names}", "--format=csv"]
    return {"text": subprocess.run(query, capture_output=True, text=True, timeout=20).stdout}


def time_ceilings(width: int) -> dict[str, Any]:
    """Time what bounds a training step: products of matrices, copies, and what the host needs to start an operation."""
    a, b = (torch.randn(width, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros(8, width, width, device="cuda", dtype=torch.uint8)
    target, x = source.clone(), torch.zeros(1, device="cuda")
    calls = {
        "product": lambda: a @ b,
        "copy": lambda: target.copy_(source),
        "launches": lambda: [x.add_(1) for _ in range(1000)],
    }
    for call in calls.values():
        call()
    times = {name: time_calls(call) for name, call in calls.items()}
    flops, size = 2 * width**3, 2 * source.nbytes
    return times | {
        "flops_per_second": flops / times["product"]["gpu_ms"] * 1e3,
        "bytes_per_second": size / times["copy"]["gpu_ms"] * 1e3,
        "host_seconds_per_launch": times["launches"]["host_ms"] / 1e6,
    }


def name_attentions() -> dict[str, Any]:
    """Return which kernels PyTorch chooses for attention with 12 heads of 64 channels."""
    names = {}
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.randn(8, 12, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
        names[str(dtype)] = type(F.scaled_dot_product_attention(q, q, q).grad_fn).__name__
    return names


def compare_modes(network: str, method: Method, batch: int, mixed: bool, repeats: int) -> dict[str, Any]:
    """Compare gradients of every mode with those of storing everything, and with themselves.

    Kernels are those that training uses: where storing everything does not repeat itself, no mode can.
    """
    expected = None
    result = {}
    for mode, lookahead in itertools.product(("store", "selective", "recompute", "invert"), (0, 1)):
        if (mode, lookahead) == ("store", 1):
            continue
        training, inputs = make_classifier(network, replace(method, schedule=mode, lookahead=lookahead), batch, mixed, "cuda")
        runs = [compute_gradients(training, inputs) for _ in range(repeats)]
        expected = expected or runs[0]
        repeated = all(compare(run, runs[0])["equal"] for run in runs[1:])
        result[mode + " ahead" * lookahead] = compare(runs[-1], expected) | {"repeated": repeated}
    return result


def run_tests(file: Path, workers: int) -> dict[str, Any]:
    """Run a file of tests from this process, with pytest-xdist in other ones; return what failed, and why."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        options = ["-q", "-p", "no:cacheprovider", "--junitxml", str(report), "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        if workers and find_spec("xdist"):
            options += ["-n", str(workers), f"--maxprocesses={workers}"]
        else:
            options += ["-p", "no:xdist", "-o", "addopts=--import-mode=importlib --strict-markers"]
        if find_spec("pytest_timeout"):
            options += ["--timeout", "60"]
        status = pytest.main([*options, str(file)])
        suite = next(ElementTree.parse(report).iter("testsuite"))
    failed = {}
    for test in suite.iter("testcase"):
        for problem in (*test.iter("failure"), *test.iter("error")):
            failed[test.get("name")] = problem.get("message")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return counts | {"status": int(status), "failed": failed}


def compare_graph(network: str, method: Method, batch: int) -> dict[str, Any]:
    """Compare the gradients that a graph computes with those of a step without one, and time both."""
    training, inputs = make_classifier(network, method, batch, True, "cuda")
    expected = compute_gradients(training, inputs)

    def step() -> None:
        training.zero_grad()
        training(*inputs).backward()

    step()
    torch.cuda.reset_peak_memory_stats()
    eager = time_calls(step)
    replay = capture(step)
    torch.manual_seed(0)
    replay()
    result = compare([p.grad for p in training.parameters() if p.grad is not None], expected)
    return time_calls(replay) | result | {"eager": eager}


def find_largest_batch(network: str, method: Method, cap: int, first: int, expandable: bool) -> dict[str, Any]:
    """Return the largest batch of which two training steps fit a memory, to a sixteenth of it."""
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap / total)

    left: list[int] = []  # bytes after a step that did not fit

    def fits(batch: int) -> bool:
        torch.cuda.empty_cache()  # blocks for another batch would be in the way
        try:
            training, inputs = make_classifier(network, method, batch, True, "cuda")
            for _ in range(2):
                training.zero_grad()
                training(*inputs).backward()
            torch.cuda.synchronize()
            return True
        except torch.OutOfMemoryError:
            pass  # the error holds the tensors of the step up to here
        gc.collect()
        left.append(torch.cuda.memory_allocated())
        return False

    tried: dict[int, bool] = {}
    low, high = 0, first
    while tried.setdefault(high, fits(high)) and high < 2**16:
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        tried[middle] = fits(middle)
        low, high = (middle, high) if tried[middle] else (low, middle)
    return {"largest_batch": low, "cap_bytes": cap, "tried": tried, "left_bytes": max(left, default=None)}


def _compute_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long, device=logits.device))


@lru_cache(maxsize=1)
def _profile(network: str, batch: int) -> tuple[revzoo.Model, Tensor, revzoo.Profile]:
    training, (x, _) = make_classifier(network, METHODS["store"], batch, True, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        return training.network, x, revzoo.profile(training.network, x, loss=_compute_loss)


def follow_plan(network: str, batch: int, share: float) -> dict[str, Any]:
    """Plan for a budget between the least and the most that a network takes; return what is predicted and measured."""
    model, x, profile = _profile(network, batch)
    widest = revzoo.solve(profile, torch.cuda.get_device_properties(0).total_memory)
    least, most = widest.min_peak_bytes, widest.no_recompute_peak_bytes
    plan = revzoo.solve(profile, round(least + share * (most - least)))

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(x)
        _compute_loss(logits).backward()

    with torch.autocast("cuda", torch.bfloat16):
        plan.apply(model, x)
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    predicted = {name: getattr(plan, name) for name in ("seconds", "spread", "peak_bytes", "budget_bytes")}
    return time_calls(step) | {"predicted": predicted, "least_bytes": least, "stored_bytes": most}


def follow_compiled_plan(network: str, batch: int, memory_budget: float) -> dict[str, Any]:
    """Compile a network of timm with PyTorch's `activation_memory_budget`, and with a plan for the peak that this takes.

    A plan for the least follows, where nothing can be planned for that peak.
    """
    import timm

    model = timm.create_model(network, num_classes=10).cuda().train()
    x = torch.randn(batch, *model.pretrained_cfg["input_size"], device="cuda")
    compiled = torch.compile(model, backend="aot_eager" if "CUDA_STUB" in os.environ else "inductor")

    def measure(memory_budget: float) -> dict[str, Any]:
        def step() -> None:
            model.zero_grad()
            _compute_loss(compiled(x)).backward()

        with torch.autocast("cuda", torch.bfloat16), functorch_config.patch(activation_memory_budget=memory_budget):
            step()
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            return time_calls(step)

    rival = measure(memory_budget)
    with torch.autocast("cuda", torch.bfloat16):
        try:
            plan = revzoo.plan(compiled, x, rival["peak_bytes"], loss=_compute_loss)
        except BudgetError as error:
            plan = revzoo.plan(compiled, x, int(str(error).partition("(")[2].split()[0]), loss=_compute_loss)
        plan.apply(model)
    return {
        "activation_memory_budget": rival,
        "plan": measure(1.0),
        "promised_bytes": plan.compiled_peak_bytes or plan.peak_bytes,
    }


def compare_compiled(network: str, batch: int) -> dict[str, Any]:
    stored = compute_gradients(*make_classifier(network, METHODS["store compiled"], batch, True, "cuda"))
    modes = ("selective", "recompute", "invert")
    methods = {mode: replace(METHODS["invert compiled"], schedule=mode) for mode in modes}
    return {
        mode: compare(compute_gradients(*make_classifier(network, method, batch, True, "cuda")), stored)
        for mode, method in methods.items()
    }


def trace(network: str, batch: int, file: Path) -> dict[str, Any]:
    """Write a trace of one training step with look-ahead, for chrome://tracing."""
    training, inputs = make_classifier(network, METHODS["ahead"], batch, True, "cuda")
    for _ in range(2):
        compute_gradients(training, inputs)
    with torch.profiler.profile() as profiler:
        compute_gradients(training, inputs)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    size = file.stat().st_size
    if size > _MOST_TRACE_BYTES:
        file.unlink()
    return {"file": file.name, "bytes": size, "kept": file.exists()}
