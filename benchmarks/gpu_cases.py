"""The cases of gpu.py: sections in the order of their value, and in a section the most useful cases first."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_measure as measure
from gpu_training import LLAMA_METHODS, METHODS, Method, Optimizer, count_training, make_classifier, make_llama, time_training

_TESTS = Path(__file__).parents[1] / "tests" / "gpu"
_SPEED = ("store", "invert", "checkpoint", "recompute", "ahead", "graph")
_GRAPHS = ("store", "invert", "recompute", "ahead", "selective", "exact", "8 bits")
_CAPPED = ("store", "invert", "checkpoint", "recompute", "ahead")
_ARITHMETIC = ("exact", "8 bits", "selective", "no tripwire")
_PAREPROP = ("store", "invert", "ahead")


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Args:
        key: its name in the results.
        run: measures it on the GPU.
        count: counts the bytes of its training step on any machine, where it is one.
    """

    key: str
    run: Callable[[], dict[str, Any]]
    count: Callable[[], int] | None = None


@dataclass(frozen=True)
class Section:
    """Cases that are measured in a process of their own.

    Args:
        seconds: the most that they may take on an H100.
        list_cases: lists them for these sizes and the folder of the results.
    """

    seconds: float
    list_cases: Callable[["Sizes", Path], Iterator[Case]]


@dataclass(frozen=True)
class Sizes:
    """How large everything is: for a GPU, or for a run without one that shows that nothing is mistyped.

    Args:
        networks: to time in bfloat16.
        batches: two passes over the networks, each with its batch sizes.
        single: to time in float32 with AdamW, as PaReprop did.
        single_batches: of these.
        small: to compare bits.
        repeats: how often gradients are computed to be compared.
        main: network and batch of most other sections.
        large_batch: another one for compiled steps.
        ordinary: network of timm and batch, for compiled plans.
        capped: networks whose largest batch is looked for.
        cap: memory for that [bytes].
        first_batch: the smallest one that is tried.
        llama: sizes of the Llama.
        tokens: shape of its batch.
        matrix: width of the matrices whose product shows what the device can do.
        tests: files of tests, as a pattern.
        test_workers: processes that run them; 0 is this one alone.
    """

    networks: tuple[str, ...]
    batches: tuple[tuple[int, ...], ...]
    single: tuple[str, ...]
    single_batches: tuple[int, ...]
    small: tuple[str, ...]
    repeats: int
    main: tuple[str, int]
    large_batch: int
    ordinary: tuple[str, int]
    capped: tuple[str, ...]
    cap: int
    first_batch: int
    llama: dict[str, int]
    tokens: tuple[int, int]
    matrix: int
    tests: str
    test_workers: int


GPU = Sizes(
    networks=("rev_vit_s", "rev_swin_t", "rev_mvit_b", "rev_roberta_base", "rev_vit_b", "rev_vit_l", "rev_swin_b"),
    batches=((32, 128), (8, 256)),
    single=("rev_vit_s", "rev_swin_t"),
    single_batches=(8, 32, 128),
    small=("rev_vit_s", "rev_swin_t", "rev_roberta_base", "rev_mvit_t", "revnet_38", "irevnet_cifar10"),
    repeats=3,
    main=("rev_vit_s", 32),
    large_batch=128,
    ordinary=("vit_small_patch16_224", 128),
    capped=("rev_swin_t", "rev_vit_b"),
    cap=8 * 2**30,
    first_batch=64,
    llama={  # 1.1e9 parameters, as TinyLlama
        **{"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22},
        **{"num_attention_heads": 32, "num_key_value_heads": 4},
    },
    tokens=(4, 2048),
    matrix=8192,
    tests="test_*.py",
    test_workers=5,
)
STUB = Sizes(
    networks=("rev_vit_digits", "rev_swin_digits", "rev_bert_mini"),
    batches=((2,), (4,)),
    single=("rev_vit_digits",),
    single_batches=(2,),
    small=("rev_vit_digits", "revnet_digits"),
    repeats=1,
    main=("rev_vit_digits", 4),
    large_batch=8,
    ordinary=("test_vit", 1),
    capped=("rev_vit_digits",),
    cap=2**29,
    first_batch=64,
    llama={
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
    tokens=(2, 8),
    matrix=64,
    tests="test_module_plan.py",
    test_workers=0,  # which `stub.prepare_torch` has prepared
)


def list_facts(sizes: Sizes, folder: Path) -> Iterator[Case]:
    yield Case("facts/machine", measure.describe_machine)
    yield Case("facts/nvidia-smi", measure.query_driver)
    yield Case("facts/ceilings", partial(measure.time_ceilings, sizes.matrix))
    yield Case("facts/attention", measure.name_attentions)


def list_bits(sizes: Sizes, folder: Path) -> Iterator[Case]:
    arithmetics = {"plain": Method("store"), "exact": Method("store", exact=True), "8 bits": Method("store", kept_bits=8)}
    for network, mixed, (name, method) in itertools.product(sizes.small, (False, True), arithmetics.items()):
        key = f"bits/{network}/{_name_dtype(mixed)}/{name}"
        yield Case(key, partial(measure.compare_modes, network, method, sizes.main[1], mixed, sizes.repeats))


def list_tests(sizes: Sizes, folder: Path) -> Iterator[Case]:
    for file in sorted(_TESTS.glob(sizes.tests)):
        yield Case(f"tests/{file.name}", partial(measure.run_tests, file, sizes.test_workers))


def list_speed(sizes: Sizes, folder: Path) -> Iterator[Case]:
    for i, batches in enumerate(sizes.batches):
        for network, batch, method in itertools.product(sizes.networks, batches, _SPEED):
            yield _list_timed("speed", network, batch, method)
        if i == 0:
            for network, batch, method in itertools.product(sizes.single, sizes.single_batches, _PAREPROP):
                yield _list_timed("speed", network, batch, method, mixed=False, optimizer="AdamW")


def _list_timed(section: str, network: str, batch: int, method: str, mixed: bool = True, optimizer: Optimizer = "SGD") -> Case:
    how = METHODS[method]
    make = partial(make_classifier, network, how, batch, mixed)
    key = f"{section}/{network}/{_name_dtype(mixed)}/{batch}/{method}"
    count = None if how.compiled else partial(count_training, make, optimizer)  # what compiled code keeps cannot be counted
    return Case(key, partial(time_training, make, optimizer, how.captured), count)


def _name_dtype(mixed: bool) -> str:
    return "bf16" if mixed else "fp32"


def list_graphs(sizes: Sizes, folder: Path) -> Iterator[Case]:
    network, batch = sizes.main
    for method in _GRAPHS:
        yield Case(f"graphs/{network}/bf16/{batch}/{method}", partial(measure.compare_graph, network, METHODS[method], batch))


def list_llama(sizes: Sizes, folder: Path) -> Iterator[Case]:
    for method in LLAMA_METHODS:
        make = partial(make_llama, sizes.llama, method, sizes.tokens)
        yield Case(
            f"llama/{'x'.join(map(str, sizes.tokens))}/{method}", partial(time_training, make), partial(count_training, make)
        )


def list_capped(sizes: Sizes, folder: Path) -> Iterator[Case]:
    for expandable, network, method in itertools.product((False, True), sizes.capped, _CAPPED):
        key = f"cap/{network}/bf16/{'expandable' if expandable else 'default'}/{method}"
        yield Case(key, partial(measure.find_largest_batch, network, METHODS[method], sizes.cap, sizes.first_batch, expandable))


def list_plans(sizes: Sizes, folder: Path) -> Iterator[Case]:
    network, batch = sizes.main
    for percent in (60, 30, 90):
        yield Case(
            f"plans/{network}/bf16/{2 * batch}/{percent}%", partial(measure.follow_plan, network, 2 * batch, percent / 100)
        )


def list_arithmetic(sizes: Sizes, folder: Path) -> Iterator[Case]:
    for method in _ARITHMETIC:
        yield _list_timed("arithmetic", *sizes.main, method)


def list_compiled(sizes: Sizes, folder: Path) -> Iterator[Case]:
    network, batch = sizes.main
    for method in ("store compiled", "invert compiled"):
        yield _list_timed("compiled", network, batch, method)
    yield Case(f"compiled/{network}/bf16/{batch}/bits", partial(measure.compare_compiled, network, batch))
    for method in ("store compiled", "invert compiled"):
        yield _list_timed("compiled", network, sizes.large_batch, method)


def list_compiled_plans(sizes: Sizes, folder: Path) -> Iterator[Case]:
    network, batch = sizes.ordinary
    for budget in (0.5, 0.2, 0.8):
        key = f"compiled plans/{network}/bf16/{batch}/{budget}"
        yield Case(key, partial(measure.follow_compiled_plan, network, batch, budget))


def list_traces(sizes: Sizes, folder: Path) -> Iterator[Case]:
    network, batch = sizes.main
    yield Case(f"trace/{network}/bf16/{batch}/ahead", partial(measure.trace, network, batch, folder / "trace.json.gz"))


SECTIONS = {
    "facts": Section(30, list_facts),
    "bits": Section(60, list_bits),
    "tests": Section(120, list_tests),
    "speed": Section(180, list_speed),
    "graphs": Section(20, list_graphs),
    "llama": Section(50, list_llama),
    "cap": Section(60, list_capped),
    "plans": Section(45, list_plans),
    "arithmetic": Section(20, list_arithmetic),
    "compiled": Section(60, list_compiled),
    "compiled plans": Section(120, list_compiled_plans),
    "trace": Section(20, list_traces),
}
