"""From texts to ids: a tokenizer from a file, made by `revzoo tokenizer` or elsewhere, or plain bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from revzoo.data.corpus import read_table, read_utf8, text_extra
from revzoo.errors import DataError, InputError, listing
from revzoo.spec.schema import TextInput

Kind = Literal["bytes", "wordpiece"]
_SPECIAL = {  # by kind, at ids 0 to 4, as RoBERTa and BERT have them
    "bytes": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
}
_LEAST = 256 + 5


class Tokenizer(Protocol):
    """What turns texts into ids.

    `special` ids are never masked, nor put in place of masked ones; `mask` is None where there is no such token; `around` is
    how many special ids stand around each text.
    """

    @property
    def source(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def padding(self) -> int: ...
    @property
    def mask(self) -> int | None: ...
    @property
    def special(self) -> frozenset[int]: ...
    @property
    def around(self) -> int: ...

    def encode(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Return the ids of each text, special ones included, truncated to `length`."""


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes: b is id 4 + b. In front are <s> <pad> </s> <mask>, or [PAD] [CLS] [SEP] [MASK] where padding is 0."""

    padding: int
    source: str = "bytes"
    unit: str = "bytes"
    size: int = 260
    mask: int | None = 3
    special: frozenset[int] = frozenset(range(4))
    around: int = 2

    def encode(self, texts: Sequence[str], length: int) -> list[list[int]]:
        start, end = (0, 2) if self.padding == 1 else (1, 2)
        return [[start, *(byte + 4 for byte in text.encode()[: length - self.around]), end] for text in texts]


class TokenizerFile:
    """A tokenizer of Hugging Face's tokenizers.

    Args:
        file: its JSON.

    Raises:
        DataError: there is no such file, it is no tokenizer, or has no token for padding.
    """

    unit = "tokens"

    def __init__(self, file: Path):
        if not file.is_file():
            raise DataError(f"There is no tokenizer {file}. Make it with revzoo tokenizer FILES... --out {file}.")
        with text_extra():
            import tokenizers
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # that is what it raises
            raise DataError(f"{file} is no tokenizer of Hugging Face's tokenizers ({error}).") from error
        found = self._tokenizer.padding
        padding = found["pad_id"] if found else self._id("<pad>", "[PAD]")
        if padding is None:
            raise DataError(f"The tokenizer {file} has no padding token: neither <pad> nor [PAD], nor one that it pads with.")
        self.source, self.padding, self.mask = str(file), int(padding), self._id("<mask>", "[MASK]")
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if not self.size:
            raise DataError(f"The tokenizer {file} has no tokens.")
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.around = int(self._tokenizer.num_special_tokens_to_add(is_pair=False))

    def _id(self, *tokens: str) -> int | None:
        return next((i for token in tokens if (i := self._tokenizer.token_to_id(token)) is not None), None)

    def encode(self, texts: Sequence[str], length: int) -> list[list[int]]:
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(length)
        try:
            return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        except Exception as error:  # of a token for the unknown that its vocabulary lacks, for example
            raise DataError(f"The tokenizer {self.source} cannot encode these texts ({error}).") from error


def open_tokenizer(file: str | None, input: TextInput) -> Tokenizer:
    """Return a tokenizer that fits a model's input; without a file, bytes.

    Raises:
        DataError: its padding is not the model's, it has more tokens than the model, or it leaves no room for the text.
    """
    padding = input.padding if input.padding in (0, 1) else 1
    tokenizer: Tokenizer = Bytes(padding) if file is None else TokenizerFile(Path(file))
    wrong = []
    if tokenizer.padding != input.padding:
        wrong.append(f"input.padding={tokenizer.padding}")
    if (ids := max(tokenizer.size, tokenizer.padding + 1)) > input.vocabulary:
        wrong.append(f"input.vocabulary={ids}")
    if input.length <= tokenizer.around:
        raise DataError(
            f"The tokenizer ({tokenizer.source}) puts {tokenizer.around} special ids around a text. Received: a model for "
            f"{input.length} ids. Use model.overrides=[input.length={tokenizer.around + 1}] or more."
        )
    if wrong:
        raise DataError(
            f"The tokenizer ({tokenizer.source}) pads with id {tokenizer.padding} and has {tokenizer.size} tokens. Received: a "
            f"model that has {input.padding} for padding and a vocabulary of {input.vocabulary}. Use "
            f"model.overrides=[{','.join(wrong)}]."
        )
    return tokenizer


def train_tokenizer(
    files: Sequence[Path], vocabulary: int, out: Path, kind: Kind = "bytes", column: str = "text"
) -> tuple[int, int]:
    """Train a tokenizer and write it; return the number of its tokens, at most `vocabulary`, and the id that pads.

    `bytes` is byte-level BPE with RoBERTa's special tokens, `wordpiece` is uncased and has BERT's. Two runs number the pieces
    of `wordpiece` differently, so the file belongs to whatever is trained with it.

    Args:
        files: text files, or tables (.csv, .jsonl, .json, .parquet) with the texts in `column`.

    Raises:
        InputError: the vocabulary is smaller than the bytes and special tokens, or there is a file at `out`.
        DataError: a file cannot be read.
    """
    if vocabulary < _LEAST:
        raise InputError(
            f"A tokenizer has 256 bytes and 5 special tokens. Received: {vocabulary} tokens. Use {_LEAST} or more."
        )
    if out.exists():
        raise InputError(f"There is {out} already: models trained with it need it. Name another.")
    if not out.parent.is_dir():
        raise InputError(f"There is no folder {out.parent} to write {out.name} into. Make it, or name another.")
    if missing := [str(file) for file in files if not file.is_file()]:
        raise InputError(f"No such text files or tables: {listing(missing)}. A folder is named as FOLDER/*.txt.")
    texts = [text for file in files for text in _texts(file, column)]
    with text_extra():
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
    special = _SPECIAL[kind]
    settings: dict[str, Any] = {"vocab_size": vocabulary, "special_tokens": list(special), "show_progress": False}
    if kind == "bytes":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
        trainer: Any = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **settings)
    else:
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        trainer = trainers.WordPieceTrainer(**settings)
    tokenizer.train_from_iterator(texts, trainer)
    padding = special.index("<pad>" if kind == "bytes" else "[PAD]")
    tokenizer.enable_padding(pad_id=padding, pad_token=special[padding])
    tokenizer.save(str(out))
    return int(tokenizer.get_vocab_size()), padding


def _texts(file: Path, column: str) -> Iterator[str]:
    if file.suffix in (".csv", ".jsonl", ".json", ".parquet"):
        yield from read_table(file, column, None).texts
    else:
        yield from read_utf8(file).decode(errors="ignore").splitlines()
