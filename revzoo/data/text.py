"""Texts as examples: windows of bytes for next-byte prediction, labelled texts, and texts with masked tokens.

Batches are (ids, labels). Ids are padded to the longest text of a batch, by the id from which the model makes its mask.

B texts, N ids.
"""

from math import inf
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from revzoo.data.base import IGNORED, Examples
from revzoo.data.corpus import Texts, read_files, read_texts, standard_text, standard_texts
from revzoo.data.options import DataOptions
from revzoo.data.random import generator
from revzoo.data.tokenizer import Tokenizer, open_tokenizer
from revzoo.errors import DataError, listing
from revzoo.spec.schema import TextInput

_MASKED, _AS_MASK, _AS_OTHER = 0.15, 0.8, 0.1  # of the tokens; of these, the mask token, any other; the rest stays (BERT)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text, each labelled with itself one byte later.

    In training they begin anywhere, elsewhere in every epoch; as many as the text has room for side by side. In testing they
    lie side by side, the last at the text's end, and every byte but the first is a label once.

    Shapes: ids (B, N), labels (B, N).
    Args:
        seed: of where windows begin; None for testing.
    """

    def __init__(self, text: Tensor, length: int, seed: int | None):
        self.text, self.length, self.seed = text, length, seed
        self.classes, self.unit = None, "bytes"
        self._last = len(text) - length - 1
        self.begins = torch.arange(0, self._last + length, length).clamp(max=self._last)
        self.start_epoch(0)

    def __len__(self) -> int:
        return len(self.begins)

    def start_epoch(self, epoch: int) -> None:
        """Draw where the windows of this epoch begin."""
        if self.seed is not None:
            size = (len(self.begins),)
            self.begins = torch.randint(0, self._last + 1, size, generator=generator(self.seed, epoch, 1))

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        places = self.begins[indices][:, None] + torch.arange(self.length + 1)
        window = self.text[places].long()
        labels = window[:, 1:].clone()
        if self.seed is None:  # the last window begins inside the one before it
            seen = torch.tensor(indices)[:, None] * self.length
            labels[places[:, 1:] <= seen] = IGNORED
        return window[:, :-1].contiguous(), labels


class LabelledTexts(Dataset[tuple[Tensor, Tensor]]):
    """Texts and their classes.

    Shapes: ids (B, N), labels (B,).
    Args:
        known: the labels, in the order of their classes.
    """

    def __init__(self, texts: Texts, tokenizer: Tokenizer, length: int, known: list[str]):
        self.ids, self.padding = _encoded(texts, tokenizer, length), tokenizer.padding
        self.names, self.classes, self.unit = known, len(known), "texts"
        classes = {label: i for i, label in enumerate(known)}
        for row, label in zip(texts.rows, texts.labels or (), strict=True):
            if label not in classes:
                raise DataError(
                    f"{texts.source}, row {row}: the training texts have no label {label!r}. They have: {listing(known)}."
                )
        self.labels = torch.tensor([classes[label] for label in texts.labels or ()])

    def __len__(self) -> int:
        return len(self.ids)

    def start_epoch(self, epoch: int) -> None:
        """Texts are the same in every epoch."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return _padded([self.ids[i] for i in indices], self.padding), self.labels[indices]


class MaskedTexts(Dataset[tuple[Tensor, Tensor]]):
    """Texts of which 15 % of the tokens, at least one, are labels: 80 % of these are masked, 10 % replaced by others.

    Which ones follows from seed, epoch and text; in testing they are always the same.

    Shapes: ids (B, N), labels (B, N).
    Args:
        seed: None for testing.
    """

    def __init__(self, texts: Texts, tokenizer: Tokenizer, length: int, seed: int | None):
        if tokenizer.mask is None:
            raise DataError(f"The tokenizer {tokenizer.source} has no mask token: neither <mask> nor [MASK].")
        self.ids, self.padding, self.mask = _encoded(texts, tokenizer, length), tokenizer.padding, tokenizer.mask
        self.classes, self.unit = None, tokenizer.unit
        self.special = torch.tensor(sorted(tokenizer.special))
        self.others = torch.tensor([i for i in range(tokenizer.size) if i not in tokenizer.special])
        for row, ids in zip(texts.rows, self.ids, strict=True):
            if torch.isin(ids, self.special).all():
                raise DataError(f"{texts.source}, row {row}: none of its tokens is in the vocabulary of {tokenizer.source}.")
        self.seed, self.epoch = seed, 0

    def __len__(self) -> int:
        return len(self.ids)

    def start_epoch(self, epoch: int) -> None:
        """Choose which tokens are masked."""
        self.epoch = epoch

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        ids, labels = zip(*map(self._masked, indices), strict=True)
        return _padded(ids, self.padding), _padded(labels, IGNORED)

    def _masked(self, index: int) -> tuple[Tensor, Tensor]:
        ids = self.ids[index].long()
        dice = generator(self.seed or 0, self.epoch, index, 2 if self.seed is None else 1)
        draw, fate = torch.rand(2, len(ids), generator=dice)
        other = self.others[torch.randint(len(self.others), ids.shape, generator=dice)]
        draw[torch.isin(ids, self.special)] = 2.0
        chosen = draw <= max(_MASKED, draw.min().item())
        labels = ids.masked_fill(~chosen, IGNORED)
        ids = ids.masked_fill(chosen & (fate < _AS_MASK), self.mask)
        return torch.where(chosen & (fate >= 1 - _AS_OTHER), other, ids), labels


def load_text(options: DataOptions, input: TextInput, seed: int) -> tuple[Examples, Examples]:
    """Return the training and the test texts.

    Raises:
        DataError: they are missing, empty, cannot be read or do not fit the model.
    """
    if options.name == "characters":
        return _load_windows(options, input, seed)
    labelled = options.name == "text_classification"
    tokenizer = open_tokenizer(options.text.tokenizer, input)
    if options.root is None:
        train, test = standard_texts(labelled)
    else:
        train, test = read_texts(Path(options.root), options.text.column, options.text.label if labelled else None)
    if not test.texts:
        raise DataError(
            f"{train.source} has {len(train.texts)} rows, too few to hold one of ten out. Add rows, or a test file."
        )
    if not labelled:
        return MaskedTexts(train, tokenizer, input.length, seed), MaskedTexts(test, tokenizer, input.length, None)
    known = sorted(set(train.labels or ()), key=lambda label: (int(label) if label.isdecimal() else inf, label))
    if len(known) < 2:
        raise DataError(f"{train.source} has one label: {listing(known)}. Classification needs two or more.")
    return LabelledTexts(train, tokenizer, input.length, known), LabelledTexts(test, tokenizer, input.length, known)


def _load_windows(options: DataOptions, input: TextInput, seed: int) -> tuple[Windows, Windows]:
    """Return windows of the first nine tenths of the bytes, and of the last."""
    content = standard_text().encode() if options.root is None else read_files(Path(options.root))
    if input.vocabulary < 256:
        raise DataError(
            f"Characters are bytes, 256 of them. Received: a model with a vocabulary of {input.vocabulary}. Use "
            "model.overrides=[input.vocabulary=256]."
        )
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if input.padding is not None and input.padding < 256 and bool((text == input.padding).any()):
        raise DataError(
            f"Characters are bytes without padding, and the text has byte {input.padding}. Received: a model that takes "
            f"it for padding. Use model.overrides=[input.padding=null]."
        )
    held_out = len(text) // 10
    if held_out <= input.length:
        raise DataError(
            f"The text of {len(text)} bytes is too short: its last tenth is for testing, and the model takes windows of "
            f"{input.length} bytes. Use model.overrides=[input.length={max(1, held_out - 1)}] or a longer text."
        )
    return Windows(text[:-held_out], input.length, seed), Windows(text[-held_out:], input.length, None)


def _encoded(texts: Texts, tokenizer: Tokenizer, length: int) -> list[Tensor]:
    return [torch.tensor(ids, dtype=torch.int32) for ids in tokenizer.encode(texts.texts, length)]


def _padded(rows: list[Tensor] | tuple[Tensor, ...], value: int) -> Tensor:
    return pad_sequence([row.long() for row in rows], batch_first=True, padding_value=value)
