"""What the noise of random signs costs a training: images and text from scratch, and a GPT-2 of antibodies fine-tuned.

    python benchmarks/random_signs.py                        all tasks, 25 minutes of one core
    python benchmarks/random_signs.py --only digits text     some of them; runs that are in the JSON are not repeated
    python benchmarks/random_signs.py --quick --out DIR      one seed and a few updates, which learn nothing

    digits      rev_vit_digits by its recipe: test top-1
    text        rev_gpt_mini on Python's language reference by the recipe `lm`, shorter: loss of held-out bytes
    antibodies  IgLM-S, a GPT-2 of 3 blocks, goes on with camel sequences that the larger IgLM writes: loss of held-out ones

From scratch, the ordinary network is the momentum coupling with m = 0, and the head reads the newer state. All steps are
stored, which takes less time: gradients of inverting them are the same to the bit. IgLM is in a package of its own, whose
weights are for academic use: `python -m pip install --no-deps iglm`. MiniLM is in finetune_llm.py.
"""

import argparse
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from finetune_llm import compare
from finetune_llm_minilm import SIGNS
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runtime import describe_environment
from torch import Tensor, nn
from transformers import GPT2LMHeadModel
from transformers.utils import logging

import revzoo
from revzoo.training.loop import train
from revzoo.training.recipe import load_recipe

SEEDS = (10, 11, 12)
METHODS: dict[str, dict[str, Any] | None] = {"ordinary": None, "8 bits": {"kept_bits": 8}, **SIGNS}
RECIPES = {
    "digits": ("digits", ["fuse.type=last"], ["train.epochs=30"]),
    "text": ("lm", ["fuse.type=last", "input.length=128"], ["train.epochs=1"]),
}
_WRITTEN, _HELD_OUT, _LONGEST = 1280, 256, 150  # sequences, those of them for testing, tokens
_UPDATES, _BATCH, _RATE = 100, 16, 3e-4
_PROMPT, _END, _PAD = ("[HEAVY]", "[CAMEL]"), "[CLS]", 0


def train_from_scratch(task: str, options: dict[str, Any] | None, seed: int, quick: bool) -> dict[str, float]:
    """Return the score after the last epoch of a recipe: top-1 [%], and the loss."""
    recipe, model, settings = RECIPES[task]
    coupling = {"type": "momentum", "gain": 1.0, **(options or {"m": 0.0})}
    words = [f"model.overrides={json.dumps([f'block.coupling={json.dumps(coupling)}', *model])}", *settings]
    words += ["model.schedule=store", f"train.seed={seed}", *(["train.max_updates=2"] if quick else [])]
    with TemporaryDirectory() as folder:
        run = train(load_recipe(recipe, words), Path(folder, "run")).folder
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {key: last[key] for key in ("top1", "loss", "updates")}


def find_iglm() -> Path:
    """Return the folder of IgLM's weights."""
    spec = find_spec("iglm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("IgLM is in a package of its own: python -m pip install --no-deps iglm")
    return Path(spec.submodule_search_locations[0]) / "trained_models"


@cache
def write_sequences(quick: bool) -> Tensor:
    """Return sequences that IgLM writes, padded with 0: prompt, residues with one span left out, the span."""
    vocabulary = (find_iglm() / "vocab.txt").read_text().split()
    network = GPT2LMHeadModel.from_pretrained(find_iglm() / "IgLM").eval()
    count, longest = (16, 8) if quick else (_WRITTEN, _LONGEST)
    prompt = torch.tensor([[vocabulary.index(token) for token in _PROMPT]]).expand(min(128, count), -1)
    torch.manual_seed(0)
    rows = list[Tensor]()
    while len(rows) < count:
        rows += network.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            top_k=0,
            max_length=longest,
            eos_token_id=vocabulary.index(_END),
            pad_token_id=_PAD,
        )
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_PAD)


def finetune_iglm(options: dict[str, Any] | None, seed: int, quick: bool) -> dict[str, float]:
    """Fine-tune all weights of IgLM-S, with its dropout; return the losses of held-out sequences."""
    ids = write_sequences(quick)
    held_out = len(ids) * _HELD_OUT // _WRITTEN
    tests, trained = ids[:held_out], ids[held_out:]
    network: Any = GPT2LMHeadModel.from_pretrained(find_iglm() / "IgLM-S")
    before = _measure_loss(network, tests)
    if options is not None:
        revzoo.reversible_(network, batch=_make_batch(trained[:8]), **options)
    updates = 2 if quick else _UPDATES
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / updates)
    torch.manual_seed(seed)
    order = torch.cat([torch.randperm(len(trained)) for _ in range(-(-updates * _BATCH // len(trained)))])
    network.train()
    for chosen in order.split(_BATCH)[:updates]:
        network(**_make_batch(trained[chosen])).loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {"loss": _measure_loss(network, tests), "before": before, "updates": updates}


def _make_batch(ids: Tensor) -> dict[str, Tensor]:
    ids = ids[:, : int((ids != _PAD).sum(1).max())]
    return {"input_ids": ids, "attention_mask": (ids != _PAD).long(), "labels": ids.masked_fill(ids == _PAD, -100)}


@torch.no_grad()
def _measure_loss(network: nn.Module, ids: Tensor) -> float:
    """Return the mean loss of a token [nats]."""
    batches = [_make_batch(each) for each in ids.split(64)]
    tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    losses = [float(network.eval()(**batch).loss) for batch in batches]
    return sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)


TASKS: dict[str, tuple[Callable[..., dict[str, float]], str]] = {  # what runs, and the score
    "digits": (partial(train_from_scratch, "digits"), "top1"),
    "text": (partial(train_from_scratch, "text"), "loss"),
    "antibodies": (finetune_iglm, "loss"),
}


def describe_task(task: str, quick: bool) -> dict[str, Any]:
    """Return all that the scores depend on, besides the code: runs are compared only if it is the same."""
    if task in RECIPES:
        recipe, model, settings = RECIPES[task]
        return {"recipe": recipe, "overrides": [*model, *settings]}
    digest = hashlib.sha256(write_sequences(quick).numpy().tobytes()).hexdigest()[:16]
    sizes = {"sequences": [_WRITTEN - _HELD_OUT, _HELD_OUT], "updates": _UPDATES, "batch": _BATCH, "rate": _RATE}
    return {"prompt": list(_PROMPT), "digest": digest, **sizes}


def measure(task: str, before: dict[str, Any], quick: bool, commit: Any) -> Iterator[dict[str, Any]]:
    """Yield setting, runs and summary of a task after every run, and go on where an earlier one ended."""
    run, score = TASKS[task]
    setting = describe_task(task, quick)
    runs = list(before.get("runs", [])) if before.get("setting") == setting else []
    done = {(each["seed"], each["method"]) for each in runs}
    for seed, method in itertools.product(SEEDS[:1] if quick else SEEDS, METHODS):  # whole seeds first
        if (seed, method) not in done:
            begin = time.thread_time()
            result = run(METHODS[method], seed, quick)
            about = {"seconds": time.thread_time() - begin, "commit": commit}
            runs.append({"method": method, "seed": seed, **result, **about})
            yield {"setting": setting, "score": score, "runs": runs, "summary": summarise(runs, score)}


def summarise(runs: list[dict[str, Any]], score: str) -> list[dict[str, Any]]:
    """Return the mean score of every method, and how far it is from the ordinary one's, seed by seed."""
    scores = {method: {run["seed"]: run[score] for run in runs if run["method"] == method} for method in METHODS}
    return [{"method": method, **compare(each, scores["ordinary"])} for method, each in scores.items() if each]


def make_table(tasks: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for head in ("task", "score", "method", "seeds", "mean", "+-", "difference", "+-"):
        table.add_column(head, justify="left" if head in ("task", "score", "method") else "right")
    for name, task in tasks.items():
        for row in task["summary"]:
            numbers = (f"{row[key]:.3f}" for key in ("mean", "deviation", "difference", "difference_error"))
            table.add_row(name, task["score"], row["method"], str(len(row["accuracies"])), *numbers)
    return table


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(__file__).parent / "results" / "cpu"
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--out", type=Path, default=home, help=f"folder for random_signs.json (default: {home})")
    parser.add_argument("--quick", action="store_true", help="one seed, two updates: nothing is learned")
    args = parser.parse_args()
    if args.quick and args.out == home:
        parser.error("the results of --quick are no results: give them another folder, --out DIR")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # IgLM's configuration is an old one
    file = args.out / "random_signs.json"
    about = describe_environment(args.out)
    for task in args.only:
        for measured in measure(task, _read(file).get(task, {}), args.quick, about["commit"]):
            results = _read(file) | {task: about | measured}
            file.write_text(json.dumps({name: results[name] for name in TASKS if name in results}, indent=1) + "\n")
    Console().print(make_table(_read(file)))


if __name__ == "__main__":
    main()
