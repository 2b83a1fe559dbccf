"""Networks that nobody here chose, from the libraries that are installed: made reversible, and planned, as they come.

    python benchmarks/breadth.py                            every network, without a path
    python benchmarks/breadth.py --library timm             one library, or several
    python benchmarks/breadth.py --only timm/vit            names that contain this
    python benchmarks/breadth.py --plan                     `revzoo.plan` instead, at half of the peak above weights and batch
    python benchmarks/breadth.py --list                     the names alone
    python benchmarks/breadth.py --output FILE              where the JSON goes

Run by hand when what takes foreign networks has changed: it takes about a quarter of an hour of one CPU, and CI leaves it out.
`breadth_networks.py` has the list: tiny widths, random weights, no downloads. A library that is not installed is left out. Each
network is examined in a process of its own, with a limit of CPU seconds.

Classes of `reversible_(model, batch=batch)`:

    works               without a path, and every check below holds
    another function    the similarity of the outputs on the batch is below .99
    fails in training   it is made reversible, and a training step raises an error
    refused             a RevzooError; whether its reason is the true one is for a reader to say
    crashed             another error
    wrong               a check does not hold; the row says which
    damaged             after an error, the network is not what it was
    not examined        the network itself does not run, or the limit is passed

Checks: gradients in training mode have the same bits with every block in `invert` as with every block in `store`; parameters
that have gradients in the ordinary network have them; keys of the state dict, weights, configuration, attributes, hooks,
training flags and the random stream are what they were; `ordinary_` gives back the outputs to the bit. Classes of
`revzoo.plan`: planned, below the least, refused, crashed, as compiled (gradients to the bit of the code that the compiler
captures, but not of the unplanned network's, by as much as the row says), wrong (gradients that are neither, or a first or
second step that takes more than was promised).
"""

import argparse
import json
import os
import random
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from breadth_networks import LIBRARIES, Network, list_networks
from torch import Tensor, nn

import revzoo
from revzoo.errors import BudgetError, RevzooError
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls
from revzoo.runtime.nested import tensors_in

LIMIT = 60  # CPU seconds of a network
LEAST_COSINE = 0.99
BUDGETS = (
    0.5,
    0.75,
)  # of what the stored step takes above weights and batch; the second where gradients alone exceed the first
_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}  # attributes of every module, compared otherwise

Row = dict[str, Any]


class Snapshot:
    """What a network is: its tensors, attributes, hooks and configuration, and the random stream."""

    def __init__(self, model: nn.Module):
        self.tensors = {name: t.detach().clone() for name, t in _list_tensors(model)}
        self.keys = list(model.state_dict())
        self.attributes = {
            f"{path}.{name}".removeprefix("."): _describe(value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if name not in _OWN and not name.startswith("_revzoo")  # what a step learned of its block
        }
        self.stream = torch.get_rng_state()

    def restore_tensors(self, model: nn.Module) -> None:
        """Give the model the values of its tensors again."""
        with torch.no_grad():
            for name, tensor in _list_tensors(model):
                tensor.copy_(self.tensors[name])

    def list_changes(self, model: nn.Module) -> list[str]:
        """Return names of what is another in the model now."""
        now = Snapshot(model)
        changes = [] if now.keys == self.keys else ["keys of the state dict"]
        changes += [] if torch.equal(now.stream, self.stream) else ["the random stream"]
        for ours, theirs in ((self.tensors, now.tensors), (self.attributes, now.attributes)):
            for name in {**ours, **theirs}:
                a, b = ours.get(name), theirs.get(name)
                same = _equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
                changes += [] if same else [name]
        return changes


def _list_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def _describe(value: Any) -> Any:
    """Return something by which a changed attribute is known; containers and configurations by what they hold."""
    if isinstance(value, nn.Module) or callable(value):
        return id(value)
    if hasattr(value, "to_dict"):
        return repr(value.to_dict())
    return repr(dict(value)) if isinstance(value, Mapping) else repr(value)


def seed_all() -> None:
    """Seed every random stream that a forward may draw from."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@torch.no_grad()
def run_forward(model: nn.Module, batch: Any) -> list[Tensor]:
    """Return the outputs in eval mode; the model is in training mode afterwards."""
    seed_all()
    outputs = list(tensors_in(call(model.eval(), batch)))
    model.train()
    return outputs


def compute_loss(outputs: Any) -> Tensor:
    """Return a loss in which every element of the outputs counts in its own way."""
    floats = [t.float() for t in tensors_in(outputs) if t.requires_grad and not t.is_complex()]
    terms = [(t * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() + t.square().mean() for t in floats]
    return torch.stack(terms).sum()


def run_step(model: nn.Module, batch: Any, start: Snapshot) -> dict[str, Tensor]:
    """Return the gradients of a training step that begins with the tensors of a snapshot."""
    start.restore_tensors(model)
    model.zero_grad(set_to_none=True)
    seed_all()
    compute_loss(call(model, batch)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    start.restore_tensors(model)
    return gradients


def find_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str:
    """Return which gradients are not the same, in words; empty if all are."""
    names = [name for name in {**ours, **theirs} if name not in ours or name not in theirs]
    different = [name for name in ours if name in theirs and not _equal(ours[name], theirs[name])]
    if not names and not different:
        return ""
    worst = max((float((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp_min(1e-30)) for n in different), default=0.0)
    parts = [f"{len(different)} of {len(ours)} gradients differ by up to {worst:.1e}"] if different else []
    return "; ".join(parts + ([f"gradients of {len(names)} parameters in one only, such as {names[0]}"] if names else []))


def explain(error: BaseException) -> str:
    """Return an error with the place where it was raised, if it is none that is addressed to the user."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, RevzooError):
        return text
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "revzoo" in f.filename and "benchmarks" not in f.filename]
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def examine_reversible(network: Network) -> Row:
    """Return the class of a network, and what was seen."""
    seed_all()
    model, batch = network()
    before = run_forward(model, batch)
    start = Snapshot(model)  # some networks make buffers in their first forward
    ordinary = run_step(model, batch, start)
    run_forward(model, batch)  # whatever a forward leaves in the model is there now
    seed_all()
    start = Snapshot(model)
    row: Row = {"class": "works", "model": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        report = revzoo.reversible_(model, batch=batch)
    except Exception as error:
        row |= {"class": "refused" if isinstance(error, RevzooError) else "crashed", "message": explain(error)}
        changes = start.list_changes(model)
        if not changes and not _same_outputs(run_forward(model, batch), before):
            changes = ["outputs"]
        return row | ({"class": "damaged", "changes": changes[:8]} if changes else {})
    assert report.similarity is not None
    row |= {
        "chains": {chain.path: len(chain.names) for chain in report.chains},
        "cosine": report.similarity.cosine,
        "restarts": len(report.restarts),
    }
    changes = [name for name in start.list_changes(model) if not name.endswith("forward")]
    problems = [f"changed: {', '.join(changes[:8])}"] if changes else []
    modes = [chain.schedule for chain in report.chains]
    try:
        inverted = run_step(model, batch, start)
        for chain in report.chains:
            chain.schedule = "store"
        stored = run_step(model, batch, start)
        if difference := find_difference(inverted, stored):
            row["is_deterministic"] = not find_difference(run_step(model, batch, start), stored)
            problems += [f"invert and store: {difference}"] if row["is_deterministic"] else []
    except Exception as error:
        row |= {"class": "fails in training", "message": explain(error)}
        start.restore_tensors(model)
        stored = ordinary
    for chain, mode in zip(report.chains, modes, strict=True):
        chain.schedule = mode
    if missing := sorted(set(ordinary) - set(stored)):
        problems.append(f"{len(missing)} parameters have no gradient, such as {missing[0]}")
    revzoo.ordinary_(model)
    if not _same_outputs(run_forward(model, batch), before):
        problems.append("ordinary_ does not give back the outputs")
    seed_all()
    own = start.attributes.keys()  # a step may change their values, which are the network's
    if left := [name for name in start.list_changes(model) if name not in own or "hook" in name]:
        problems.append(f"left by ordinary_: {', '.join(left[:8])}")
    if problems:
        row["message"] = "; ".join(filter(None, [row.get("message"), *problems]))
        row["class"] = "wrong" if row["class"] == "works" else row["class"]
    elif row["class"] == "works" and not row["cosine"] >= LEAST_COSINE:
        row |= {"class": "another function", "message": f"cosine {row['cosine']:.4f}"}
    return row


def _same_outputs(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def examine_plan(network: Network) -> Row:
    """Return the class of a plan for half of the peak above weights and batch, and what was seen."""
    seed_all()
    model, batch = network()
    start = Snapshot(model.train())
    ordinary, stored = _count_step(model, batch, start)
    fixed = _count_fixed(model, batch)
    seed_all()
    start, begin = Snapshot(model), time.process_time()
    row: Row = {"class": "planned", "stored_bytes": stored}
    try:
        plan, row["budget"] = _plan(model, batch, fixed, stored)
        row["seconds"] = time.process_time() - begin
        if changes := start.list_changes(model):
            return row | {"class": "damaged", "changes": changes[:8]}
        plan.apply(model, batch)
        gradients, taken = _count_step(model, batch, start)
        second, again = _count_step(model, batch, start)
    except Exception as error:
        kinds = {BudgetError: "below the least", RevzooError: "refused", Exception: "crashed"}
        row |= {"class": next(name for kind, name in kinds.items() if isinstance(error, kind)), "message": explain(error)}
        changes = start.list_changes(model)
        return row | ({"class": "damaged", "changes": changes[:8]} if changes else {})
    promised = plan.peak_bytes - fixed
    row |= {"promised_bytes": promised, "taken_bytes": taken, "taken_again": again}
    taken = max(taken, again)
    problems = [f"takes {taken / promised:.3f} of the promised peak"] if taken > promised else []
    for difference in filter(None, (find_difference(step, ordinary) for step in (gradients, second))):
        if find_difference(gradients, second) or find_difference(gradients, _run_captured(model, batch, start)):
            problems.append(difference)
        else:
            row |= {"class": "as compiled", "message": difference}
    return row | ({"class": "wrong", "message": "; ".join(dict.fromkeys(problems))} if problems else {})


def _run_captured(model: nn.Module, batch: Any, start: Snapshot) -> dict[str, Tensor]:
    """Return the gradients of what the compiler captures, run as it is."""
    revzoo.release(model)
    torch._dynamo.reset()
    model.compile(backend="eager")
    return run_step(model, batch, start)


def _plan(model: nn.Module, batch: Any, fixed: int, stored: int) -> tuple[Any, float]:
    """Return the plan for the first budget that there is one for, and the budget."""
    *budgets, last = BUDGETS
    for budget in budgets:
        with suppress(BudgetError):
            return revzoo.plan(model, batch, fixed + int(budget * stored), loss=compute_loss), budget
    return revzoo.plan(model, batch, fixed + int(last * stored), loss=compute_loss), last


def _count_fixed(model: nn.Module, batch: Any) -> int:
    """Return the bytes of weights, buffers and batch. A tensor may be two arguments of the batch."""
    live = LiveBytesOfReplacedCalls()
    return live.size(live.watch([*(t for _, t in _list_tensors(model)), *tensors_in(batch)]))


def _count_step(model: nn.Module, batch: Any, start: Snapshot) -> tuple[dict[str, Tensor], int]:
    """Return gradients of a training step, and its peak of live bytes above weights, buffers and batch."""
    live = LiveBytesOfReplacedCalls()
    with live:
        lasting = live.watch([*(t for _, t in _list_tensors(model)), *tensors_in(batch)])
        gradients = run_step(model, batch, start)
    return gradients, live.peak(without=lasting)


def examine(network: Network, plans: bool) -> Row:
    """Return the row of a network, from a process of its own."""
    reader, writer = os.pipe()
    begin = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))
        try:
            row = (examine_plan if plans else examine_reversible)(network)
        except BaseException as error:
            row = {"class": "not examined", "message": explain(error)}
        os.write(writer, json.dumps(row).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    row = json.loads(text or json.dumps({"class": "not examined", "message": f"ended with {status} (limit: {LIMIT} CPU s)"}))
    seconds = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - begin
    return {**row, "cpu_seconds": round(seconds, 2)}


def report_classes(rows: Mapping[str, Row]) -> str:
    """Return a table of classes by library, and every network that is none of the best class."""
    best = ("works", "planned")
    counts = {(name.partition("/")[0], row["class"]): 0 for name, row in rows.items()}
    for name, row in rows.items():
        counts[name.partition("/")[0], row["class"]] += 1
    totals = Counter(row["class"] for row in rows.values())
    libraries = list(dict.fromkeys(library for library, _ in counts))
    lines = [" " * 20 + "".join(f"{library[:13]:>14}" for library in libraries) + f"{'all':>8}"]
    for kind, total in totals.most_common():
        lines.append(f"{kind:20}" + "".join(f"{counts.get((each, kind), 0):14}" for each in libraries) + f"{total:8}")
    for kind in totals:
        if kind not in best:
            lines.append(f"\n{kind}:")
            lines += [
                f"  {name}: {row.get('message', '')}{' CHANGED: ' + ', '.join(row['changes']) if 'changes' in row else ''}"
                for name, row in rows.items()
                if row["class"] == kind
            ]
    return "\n".join(lines)


def find_versions() -> dict[str, str]:
    """Return the versions of what the networks come from."""
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    for package in LIBRARIES.values():
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def main() -> None:
    """Examine the networks and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", action="append", choices=list(LIBRARIES), help="only networks of this library")
    parser.add_argument("--only", action="append", metavar="NAME", help="only networks whose name contains this")
    parser.add_argument("--plan", action="store_true", help="plan every network instead")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--output", type=Path, help="file for the rows as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    networks = list_networks(arguments.library or list(LIBRARIES))
    names = [name for name in networks if not arguments.only or any(part in name for part in arguments.only)]
    if arguments.list:
        print("\n".join([*names, f"{len(names)} networks"]))
        return
    rows: dict[str, Row] = {}
    for name in names:
        rows[name] = row = examine(networks[name], arguments.plan)
        print(json.dumps({"network": name, **row}), flush=True)
    print(report_classes(rows))
    if arguments.output:
        arguments.output.write_text(json.dumps({"versions": find_versions(), "networks": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
