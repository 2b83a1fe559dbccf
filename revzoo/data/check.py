"""What is wrong with data of one's own, found before training and all at once: `revzoo check`.

Every image is decoded, as training does it: the header of a truncated file is sound. Two images are the same if their pixels
are, and two texts if they differ in blanks only.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path

from revzoo.data.corpus import Texts
from revzoo.data.image_folders import list_images, open_folders
from revzoo.data.image_labels import natural_key
from revzoo.data.options import SPLITS, TABLES
from revzoo.data.stored_images import convert_image, make_printable, open_image
from revzoo.data.text_tables import list_tables, read_columns, require_column
from revzoo.errors import DataError, join_names
from revzoo.format import count_noun

PARTS = ("training", "validation")  # of the data
_READERS = 8  # threads: decoders let others run, and each holds a whole image
_UNEVEN = 10  # times as many examples as in the smallest class: training may then hardly notice the smallest
_MOST = 8  # examples that a sentence names


@dataclass(frozen=True)
class Example:
    """An image or a text.

    Args:
        split: "training" or "validation".
        label: its class; empty where there are no labels.
        name: its file, or the file and row of a text.
        content: what equal examples have in common; None if it cannot be used.
        size: width and height [pixels], or the length of a text [characters].
        mode: Pillow's name for the format of the pixels.
        problem: why it cannot be used.
    """

    split: str
    label: str
    name: str
    content: bytes | None = None
    size: tuple[int, ...] = ()
    mode: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Finding:
    """Something to know about the data.

    Args:
        kind: one word.
        is_serious: whether it stops or spoils training.
        text: what it is, and what to do.
        examples: all that it is about; those that are equal together.
    """

    kind: str
    is_serious: bool
    text: str
    examples: list[list[str]]


@dataclass(frozen=True)
class DataCheck:
    """What was found.

    Args:
        noun: what the examples are: "images" or "texts".
        classes: the number of examples of each class in each split.
        sizes: the least, the median and the greatest; none where nothing can be read.
        modes: the number of images in each.
        findings: the worst first.
        notes: remarks of the reader, such as on files that are skipped.
    """

    noun: str
    classes: dict[str, dict[str, int]]
    sizes: list[tuple[int, ...]]
    modes: dict[str, int]
    findings: list[Finding]
    notes: list[str]


def check_data(root: Path, column: str, label: str, report: Callable[[str], object]) -> DataCheck:
    """Return what would stop or spoil training on a folder of images in classes, or on tables of texts.

    Args:
        root: as `data.root` of the recipes images and texts.
        column, label: names of the columns of texts and labels; a table without the latter has no labels.
        report: is told how far it is.

    Raises:
        DataError: a table is missing or cannot be read.
        OSError: a folder cannot be read.
    """
    is_text = root.is_file() or any((root / f"{name}{suffix}").is_file() for name in SPLITS["train"] for suffix in TABLES)
    findings, notes = list[Finding](), list[str]()
    if is_text:
        examples, notes = _read_tables(list_tables(root), column, label)
    else:
        try:
            opened = open_folders(root, "RGB", require_imagenet=False)
            parts, notes = zip(PARTS, (opened.train, opened.test), strict=True), opened.notes
            files = [
                (split, opened.class_names[k], file) for split, x in parts for k, file in zip(x.labels, x.files, strict=True)
            ]
        except DataError as error:
            findings.append(Finding("structure", True, str(error), []))
            files = [(PARTS[0], make_printable(file.parent.name), file) for file in list_images(root)]
        examples = [*_read_images(files, report)]
    noun, counts = "texts" if is_text else "images", Counter((e.label, e.split) for e in examples)
    findings = sorted(
        [*findings, *_find_problems(examples, noun.removesuffix("s"))], key=lambda finding: not finding.is_serious
    )
    classes = {
        label: {split: counts[label, split] for split in PARTS}
        for label in sorted({e.label for e in examples}, key=natural_key)
    }
    sizes = sorted((e.size for e in examples if e.size), key=prod)
    modes = dict(Counter(e.mode for e in examples if e.mode).most_common())
    return DataCheck(noun, classes, [sizes[k] for k in (0, len(sizes) // 2, -1) if sizes], modes, findings, notes)


def _read_images(files: list[tuple[str, str, Path]], report: Callable[[str], object]) -> Iterator[Example]:
    pool = ThreadPoolExecutor(_READERS)
    try:
        for done, example in enumerate(pool.map(lambda each: _read_image(*each), files), 1):
            report(f"reading images: {done:,} of {len(files):,}")
            yield example
    finally:
        pool.shutdown(cancel_futures=True)


def _read_image(split: str, label: str, file: Path) -> Example:
    name = make_printable(str(file))
    try:
        with open_image(file) as image:
            size, mode = image.size, image.mode
            content = blake2b(convert_image(image, "RGB").tobytes()).digest() + repr(size).encode()
    except Exception as error:  # decoders raise all kinds of exceptions for damaged bytes
        return Example(split, label, name, problem=str(error))
    return Example(split, label, name, content, size, mode)


def _read_tables(files: list[Path], column: str, label: str) -> tuple[list[Example], list[str]]:
    """Return the texts of the tables, and notes; those of a single table are split as training does it."""
    examples, notes = list[Example](), list[str]()
    for split, file in zip(PARTS, files, strict=False):
        table = read_columns(file)
        require_column(str(file), table, column, "--column")
        if label not in table:
            notes.append(f"{file} has no column {label!r} (--label), so labels are not looked at")
        labels = table.get(label, ["-"] * len(table[column]))
        kinds = [isinstance(t, str) and isinstance(k, str | int) for t, k in zip(table[column], labels, strict=True)]
        good = [i for i, fits in enumerate(kinds) if fits and table[column][i].strip() and str(labels[i]).strip()]
        for i in sorted({*range(len(kinds))} - {*good}):
            examples.append(Example(split, "", f"{file}:{i + 1}", problem="no text, or no label"))
        known = [str(labels[i]) if label in table else "" for i in good]
        whole = Texts(str(file), [i + 1 for i in good], [table[column][i] for i in good], known)
        for name, part in zip((split, PARTS[1]), whole.split() if len(files) == 1 else [whole], strict=False):
            for row, text, of_class in zip(part.rows, part.texts, part.labels or (), strict=True):
                content = " ".join(text.split()).encode()
                examples.append(Example(name, of_class, f"{file}:{row}", content, (len(text),)))
    return examples, notes


def _find_problems(examples: list[Example], noun: str) -> Iterator[Finding]:
    groups = defaultdict[bytes | None, list[Example]](list)
    for example in examples:
        groups[example.content].append(example)
    broken = groups.pop(None, [])
    reason = f"of no use (the first: {broken[0].problem})" if broken else ""
    equal = [group for group in groups.values() if len(group) > 1]
    mixed, leaks = ([g for g in equal if len({getattr(e, key) for e in g}) > 1] for key in ("label", "split"))
    rest = [g for g in equal if len({(e.label, e.split) for e in g}) == 1]
    for kind, what, remedy, chosen in (
        ("unreadable", reason, "Correct or remove them", [[e] for e in broken]),
        ("labels", "with two labels", "Keep the right one of each", mixed),
        ("leak", "both for training and for validation, so that scores are too good", "Keep one of each", leaks),
        ("repeated", "there more than once", "Keep one of each", rest),
    ):
        # Of equal examples a sentence names two, which differ in label or split if any do.
        pairs = [(g[0], next((e for e in g if (e.label, e.split) != (g[0].label, g[0].split)), g[-1])) for g in chosen]
        named = join_names([" = ".join(dict.fromkeys(e.name for e in pair)) for pair in pairs], most=_MOST)
        if chosen:
            text, names = f"{count_noun(len(chosen), noun)} {what}: {named}. {remedy}.", [[e.name for e in g] for g in chosen]
            yield Finding(kind, kind != "repeated", text, names)
    counts = Counter(e.label for e in examples if e.split == PARTS[0] and e.label).most_common()
    if single := [name for name, count in counts if count == 1]:
        words = f"Classes with one example for training: {join_names(single, most=_MOST)}. Add some, or remove the class."
        yield Finding("single", False, words, [single])
    if counts and counts[0][1] > _UNEVEN * counts[-1][1]:
        (most, many), (fewest, few) = counts[0], counts[-1]
        words = (
            f"The classes are uneven: {many:,} {noun}s of {most}, {few:,} of {fewest}. Consider train.class_weights=balanced."
        )
        yield Finding("uneven", False, words, [[most], [fewest]])
