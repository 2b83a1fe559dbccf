"""Examples of texts: windows of ids for next-token prediction, labelled texts, and texts with masked tokens.

Batches are (ids, labels). Ids are padded to the longest text of the batch with the id that the model masks out.

B texts, N ids.
"""

from math import inf
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from revzoo.data.base import IGNORED, Examples
from revzoo.data.corpus import Texts, read_files, read_standard_text, read_standard_texts
from revzoo.data.options import SPLITS, TABLES, DataOptions
from revzoo.data.random import make_generator
from revzoo.data.text_tables import is_saved_dataset, read_texts
from revzoo.data.tokenizer import Tokenizer, TokenizerFile, open_tokenizer
from revzoo.errors import DataError, join_names
from revzoo.spec.names import BYTES
from revzoo.spec.schema import TextInput

# Share of the tokens to predict; of these, the shares that become the mask token and any other token. The rest stays (BERT).
_TO_PREDICT, _AS_MASK, _AS_OTHER = 0.15, 0.8, 0.1


class Windows(Examples):
    """Windows of a text; the label of each id is the id that follows it.

    In training they begin at random places, drawn again in every epoch; there are as many as fit into the text side by side.
    In testing they lie side by side, the last one at the end of the text, and every id but the first is a label once.

    Shapes: ids (B, N), labels (B, N).
    Args:
        text: the ids (n,), uint8 or int32.
        length: N.
        seed: determines where windows begin; None for testing.
    """

    length: int

    def __init__(self, text: Tensor, length: int, seed: int | None):
        self.text, self.length, self.seed = text, length, seed
        self.label_noun = "bytes" if text.dtype is torch.uint8 else "tokens"
        self._last = len(text) - length - 1
        self.begins = torch.arange(0, self._last + length, length).clamp(max=self._last)
        self.start_epoch(0)

    def __len__(self) -> int:
        return len(self.begins)

    def start_epoch(self, epoch: int) -> None:
        """Draw where the windows of this epoch begin."""
        if self.seed is not None:
            size = (len(self.begins),)
            self.begins = torch.randint(0, self._last + 1, size, generator=make_generator(self.seed, epoch, 1))

    def list_contents(self) -> list[bytes]:
        """Return the text."""
        return [self.text.numpy().tobytes()]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        positions = self.begins[indices][:, None] + torch.arange(self.length + 1)
        window = self.text[positions].long()
        labels = window[:, 1:].clone()
        if self.seed is None:  # the last window overlaps the one before it
            seen = torch.tensor(indices)[:, None] * self.length
            labels[positions[:, 1:] <= seen] = IGNORED
        return window[:, :-1].contiguous(), labels


class LabelledTexts(Examples):
    """Texts and their classes.

    Shapes: ids (B, N), labels (B,).
    Args:
        texts: texts with labels.
        tokenizer: turns them into ids.
        length: largest N.
        class_names: the label of each class, in order.
    """

    label_noun = "texts"

    def __init__(self, texts: Texts, tokenizer: Tokenizer, length: int, class_names: list[str]):
        self.ids, self.padding = _encode(texts, tokenizer, length), tokenizer.padding
        self.class_names, self._source, self._rows = class_names, texts.source, texts.rows
        classes = {label: i for i, label in enumerate(class_names)}
        for row, label in zip(texts.rows, texts.labels or (), strict=True):
            if label not in classes:
                raise DataError(
                    f"{texts.source}, row {row}: the training texts have no label {label!r}. They have: "
                    f"{join_names(class_names)}."
                )
        self.labels = torch.tensor([classes[label] for label in texts.labels or ()])

    def __len__(self) -> int:
        return len(self.ids)

    def list_contents(self) -> list[bytes]:
        """Return the labels and the ids of every text."""
        return [self.labels.numpy().tobytes(), *(ids.numpy().tobytes() for ids in self.ids)]

    def name_example(self, index: int) -> str:
        """Return file and row of a text, as prediction does."""
        return f"{self._source}:{self._rows[index]}"

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return _pad([self.ids[i] for i in indices], self.padding), self.labels[indices]


class MaskedTexts(Examples):
    """Texts in which 15 % of the tokens, at least one, are to be predicted: 80 % of these are masked, 10 % replaced by others.

    Which tokens these are depends on seed, epoch and text; in testing they are always the same.

    Shapes: ids (B, N), labels (B, N).
    Args:
        texts: texts; their labels are not used.
        tokenizer: turns them into ids; it needs a mask token.
        length: largest N.
        seed: determines which tokens are masked; None for testing.
    """

    def __init__(self, texts: Texts, tokenizer: Tokenizer, length: int, seed: int | None):
        if tokenizer.mask is None:
            raise DataError(f"The tokenizer {tokenizer.source} has no mask token: neither <mask> nor [MASK].")
        self.ids, self.padding, self.mask = _encode(texts, tokenizer, length), tokenizer.padding, tokenizer.mask
        self.label_noun = tokenizer.label_noun
        self.special = torch.tensor(sorted(tokenizer.special))
        self.ordinary = torch.tensor([i for i in range(tokenizer.size) if i not in tokenizer.special])
        for row, ids in zip(texts.rows, self.ids, strict=True):
            if torch.isin(ids, self.special).all():
                raise DataError(f"{texts.source}, row {row}: none of its tokens is in the vocabulary of {tokenizer.source}.")
        self.seed = seed

    def __len__(self) -> int:
        return len(self.ids)

    def list_contents(self) -> list[bytes]:
        """Return the ids of every text."""
        return [ids.numpy().tobytes() for ids in self.ids]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        ids, labels = zip(*map(self._mask, indices), strict=True)
        return _pad(ids, self.padding), _pad(labels, IGNORED)

    def _mask(self, index: int) -> tuple[Tensor, Tensor]:
        ids = self.ids[index].long()
        rng = make_generator(self.seed or 0, self.epoch, index, 2 if self.seed is None else 1)
        draw, replacement = torch.rand(2, len(ids), generator=rng)
        other = self.ordinary[torch.randint(len(self.ordinary), ids.shape, generator=rng)]
        draw[torch.isin(ids, self.special)] = 2.0  # never chosen
        chosen = draw <= max(_TO_PREDICT, draw.min().item())
        labels = ids.masked_fill(~chosen, IGNORED)
        ids = ids.masked_fill(chosen & (replacement < _AS_MASK), self.mask)
        return torch.where(chosen & (replacement >= 1 - _AS_OTHER), other, ids), labels


def load_text(options: DataOptions, input: TextInput, seed: int) -> tuple[Examples, Examples]:
    """Return the training texts and the test texts.

    Raises:
        DataError: the texts are missing, empty or unreadable, or do not fit the model.
    """
    if options.name == "causal_lm":
        return _load_windows(options, input, seed)
    labelled = options.name == "text_classification"
    if options.root is not None and options.text.tokenizer is None:
        raise DataError(
            "Texts of your own need a tokenizer. Set data.text.tokenizer to bytes, or to a file: revzoo tokenizer FILES... "
            "--out tokenizer.json makes one."
        )
    tokenizer = open_tokenizer(options.text.tokenizer, input)
    if options.root is None:
        train, test = read_standard_texts(labelled)
    else:
        train, test = read_texts(Path(options.root), options.text.column, options.text.label if labelled else None)
    if not test.texts:
        raise DataError(
            f"{train.source} has {len(train.texts)} rows, too few to hold out one of ten for each label. Add rows, or a test "
            "file: a folder with train.csv and test.csv."
        )
    data_config = {"tokenizer": options.text.tokenizer or BYTES}
    is_held_out = options.root is not None and train.source == test.source
    each = "" if train.labels is None else " of each label"
    held_out = f"{train.source} has no texts for validation: every tenth{each} is held out, {len(test.texts):,} in all"
    notes = [held_out] if is_held_out else []
    if not labelled:
        masked = MaskedTexts(test, tokenizer, input.length, None)
        masked.data_config, masked.notes, masked.is_held_out = data_config, notes, is_held_out
        return MaskedTexts(train, tokenizer, input.length, seed), masked
    class_names = sorted(set(train.labels or ()), key=lambda label: (int(label) if label.isdecimal() else inf, label))
    if len(class_names) < 2:
        raise DataError(
            f"{train.source} has one label: {join_names(class_names)}. Classification needs two or more: add texts of another."
        )
    train_texts, test_texts = (LabelledTexts(texts, tokenizer, input.length, class_names) for texts in (train, test))
    test_texts.data_config, test_texts.notes, test_texts.is_held_out = data_config, notes, is_held_out
    return train_texts, test_texts


def _load_windows(options: DataOptions, input: TextInput, seed: int) -> tuple[Windows, Windows]:
    """Return windows for training and for testing; texts without a split of their own are tested on the last tenth."""
    root, file = None if options.root is None else Path(options.root), options.text.tokenizer
    tokenizer = None if file in (None, BYTES) else TokenizerFile(Path(file))
    noun, size = ("bytes", 256) if tokenizer is None else ("tokens", tokenizer.size)
    if input.vocabulary < size:
        raise DataError(
            f"The texts are {noun}, {size} of them. Received: a model with a vocabulary of {input.vocabulary}. Use "
            f"model.overrides=[input.vocabulary={size}]."
        )
    parts = [_pack(documents, tokenizer) for documents in _read_documents(root, options.text.column)]
    if input.padding is not None and any((part == input.padding).any() for part in parts):
        raise DataError(
            f"Windows of a text have no padding, and it has id {input.padding}. Received: a model that takes it for padding. "
            "Use model.overrides=[input.padding=null]."
        )
    is_held_out = len(parts) == 1
    if is_held_out:
        parts = list(parts[0].tensor_split([len(parts[0]) - len(parts[0]) // 10]))
    if (least := min(map(len, parts))) <= input.length:
        whole = (
            f"The text of {sum(map(len, parts))} {noun} is too short: its last tenth is for testing"
            if is_held_out
            else (f"Texts for training or testing are too short: {least} {noun}")
        )
        raise DataError(
            f"{whole}, and the model takes windows of {input.length} {noun}. Use "
            f"model.overrides=[input.length={max(1, least - 1)}] or a longer text."
        )
    train, test = Windows(parts[0], input.length, seed), Windows(parts[1], input.length, None)
    test.is_held_out = root is not None and is_held_out
    if tokenizer is not None:
        test.data_config = {"tokenizer": file}
    return train, test


def _read_documents(root: Path | None, column: str) -> list[list[bytes]]:
    """Return the texts, or those for training and those for testing where they are in a table or a data set."""
    if root is None:
        return [[read_standard_text().encode()]]
    names = {name + suffix for name in SPLITS["train"] for suffix in TABLES}
    if root.suffix.lower() in TABLES or is_saved_dataset(root) or any((root / name).is_file() for name in names):
        return [[text.encode() for text in part.texts] for part in read_texts(root, column, None)]
    return [read_files(root)]


def _pack(documents: list[bytes], tokenizer: TokenizerFile | None) -> Tensor:
    """Return the ids of all documents; between two of them is the token that ends one, of bytes 0, which texts do not have."""
    if tokenizer is None:
        return torch.frombuffer(bytearray(b"\0".join(documents)), dtype=torch.uint8)
    return torch.tensor(tokenizer.pack([document.decode(errors="ignore") for document in documents]), dtype=torch.int32)


def _encode(texts: Texts, tokenizer: Tokenizer, length: int) -> list[Tensor]:
    return [torch.tensor(ids, dtype=torch.int32) for ids in tokenizer.encode(texts.texts, length)]


def _pad(rows: list[Tensor] | tuple[Tensor, ...], value: int) -> Tensor:
    return pad_sequence([row.long() for row in rows], batch_first=True, padding_value=value)
