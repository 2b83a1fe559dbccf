"""Plain texts: text files on this machine, and the documentation that comes with Python. Nothing is downloaded."""

import codecs
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from revzoo.errors import DataError
from revzoo.spec.names import find_beside

_HELD_OUT = 10  # one text in ten is for testing where the data have no split of their own
# Topics of Python's documentation that differ in subject, for a classification task that needs no files.
_SUBJECTS = {
    "statements": ("assignment", "async", "compound", "import", "raise"),
    "debugger": ("debugger",),
    "types": ("string-methods", "typesmapping", "typesseq"),
    "customization": ("attribute-access", "comparisons", "customization", "specialnames"),
}


@dataclass(frozen=True)
class Texts:
    """Texts and, for classification, their labels.

    Args:
        source: file or name of the source, for messages.
        rows: row number of each text in the source, from 1.
        texts: the texts.
        labels: the label of each text; None where there are none.
    """

    source: str
    rows: list[int]
    texts: list[str]
    labels: list[str] | None = None

    def split(self) -> tuple["Texts", "Texts"]:
        """Return the texts for training and those for testing: every tenth text of each label."""
        seen = Counter[str]()
        train, test = list[int](), list[int]()
        for i, label in enumerate(self.labels or [""] * len(self.texts)):
            seen[label] += 1
            (train if seen[label] % _HELD_OUT else test).append(i)
        return self._select(train), self._select(test)

    def _select(self, indices: list[int]) -> "Texts":
        labels = None if self.labels is None else [self.labels[i] for i in indices]
        return Texts(self.source, [self.rows[i] for i in indices], [self.texts[i] for i in indices], labels)


def read_standard_text() -> str:
    """Return the language reference that Python's `help` shows: about 400 kB, slightly different in each Python version."""
    return "\n\n".join(paragraph for _, paragraph in _read_paragraphs())


def read_standard_texts(labelled: bool) -> tuple[Texts, Texts]:
    """Return the paragraphs of Python's language reference, for training and for testing.

    Args:
        labelled: return only the paragraphs about four subjects, each labelled with its subject.
    """
    subjects = {topic: subject for subject, topics in _SUBJECTS.items() for topic in topics}
    chosen = [(topic, text) for topic, text in _read_paragraphs() if topic in subjects or not labelled]
    texts = [" ".join(text.split()) for _, text in chosen]
    labels = [subjects[topic] for topic, _ in chosen] if labelled else None
    return Texts("Python's documentation", list(range(1, len(texts) + 1)), texts, labels).split()


def _read_paragraphs() -> list[tuple[str, str]]:
    """Return (topic, paragraph) pairs, each paragraph once: a repeated one would be in both training and test."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "This Python comes without its documentation (pydoc_data). Set data.root to texts of your own."
        ) from error
    paragraphs: dict[str, tuple[str, str]] = {}
    for topic in sorted(topics):
        for paragraph in topics[topic].strip().split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), (topic, paragraph))
    paragraphs.pop("", None)
    return list(paragraphs.values())


def read_files(root: Path) -> list[bytes]:
    """Return the content of a text file, or of each .txt file under a folder, in the order of their names.

    Raises:
        DataError: there is no file, or one is empty or not UTF-8.
    """
    files = sorted(root.rglob("*.txt")) if root.is_dir() else [root]
    if not files:
        raise DataError(f"{root} has no .txt files. Set data.root to a text file, a folder of .txt files, or a table.")
    return [read_utf8(file) for file in files]


def read_utf8(file: Path) -> bytes:
    """Return the bytes of a UTF-8 file. It may end within a character, as benchmarks cut from a longer text do.

    Raises:
        DataError: the file does not exist, is empty or is not UTF-8.
    """
    if not file.is_file():
        raise DataError(f"There is no file {file}.{find_beside(str(file))} Set data.root to where the texts are.")
    return require_utf8(file.read_bytes(), str(file))


def require_utf8(content: bytes, source: str) -> bytes:
    """Return the bytes of a text; arguments and errors as in `read_utf8`, which may be of what is no file."""
    if not content.strip():
        raise DataError(f"{source} is empty. It should hold texts: name another file.")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{source} is no text in UTF-8: line {line}, byte {error.start} of the whole. Name a text file, or convert it: "
            "iconv -f latin1 -t utf-8."
        ) from error
    return content
