"""Tokenizers: plain bytes, or a file of Hugging Face's tokenizers, which `revzoo tokenizer` can train."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from revzoo.data.text_tables import read_lines
from revzoo.errors import DataError, InputError, explain_missing, join_names, quote
from revzoo.file import write_text
from revzoo.spec.names import BYTES
from revzoo.spec.schema import TextInput

Kind = Literal["bytes", "wordpiece"]
_SPECIAL = {  # ids 0 to 4, with the names that RoBERTa and BERT use
    "bytes": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
}
_END = ("<|endoftext|>", "<|end_of_text|>")  # where GPT-2 and Llama 3 have it, they have no padding
_MIN_VOCABULARY = 256 + 5  # every byte and the special tokens


@dataclass(frozen=True)
class PlainBytes:
    """UTF-8 bytes: byte b has id 4 + b. Ids 0 to 3 are <s> <pad> </s> <mask>, or [PAD] [CLS] [SEP] [MASK] if padding is 0.

    Attributes, those of `TokenizerFile` too:
        source: file of the tokenizer, or "bytes", for messages.
        label_noun: what one id stands for: "tokens" or "bytes".
        size: number of ids.
        padding: id that pads.
        mask: id of the mask token; None where there is none.
        special: ids that are never masked and never replace a masked id.
        num_around: number of special ids put around each text.
    """

    padding: int
    source: str = "bytes"
    label_noun: str = "bytes"
    size: int = 260
    mask: int | None = 3
    special: frozenset[int] = frozenset(range(4))
    num_around: int = 2

    def encode(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Return the ids of each text, at most `length` of them, special ids included."""
        start, end = (0, 2) if self.padding == 1 else (1, 2)
        return [[start, *(byte + 4 for byte in text.encode()[: length - self.num_around]), end] for text in texts]


class TokenizerFile:
    """A tokenizer of Hugging Face's tokenizers.

    Args:
        file: the tokenizer's JSON file.

    Raises:
        DataError: the file does not exist, is not a tokenizer, or has no padding token.
    """

    label_noun = "tokens"

    def __init__(self, file: Path):
        if not file.is_file():
            raise DataError(f"There is no tokenizer {file}. Make it with revzoo tokenizer FILES... --out {quote(file)}.")
        with explain_missing("tokenizers", "Tokenizers"):
            import tokenizers
        with _explain(f"{file} is not a tokenizer of Hugging Face's tokenizers", " Make one with revzoo tokenizer."):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            around = self._tokenizer.encode("").ids
        settings = self._tokenizer.padding
        padding = settings["pad_id"] if settings else self._find_id("<pad>", "[PAD]", *_END)
        if padding is None:
            raise DataError(f"The tokenizer {file} has no padding token: neither <pad> nor [PAD], nor a padding setting.")
        self.source, self.padding, self.mask = str(file), int(padding), self._find_id("<mask>", "[MASK]")
        self.end = self._find_id(*_END, "</s>", "<eos>", "[SEP]")
        self.size = max((*self._tokenizer.get_vocab().values(), *around), default=-1) + 1
        if not self.size:
            raise DataError(f"The tokenizer {file} has no tokens.")
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.num_around = int(self._tokenizer.num_special_tokens_to_add(is_pair=False))

    def _find_id(self, *tokens: str) -> int | None:
        return next((i for token in tokens if (i := self._tokenizer.token_to_id(token)) is not None), None)

    def encode(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Return the ids of each text, at most `length` of them, special ids included."""
        self._tokenizer.enable_truncation(length)
        return self._encode(texts, around=True)

    def pack(self, texts: Sequence[str]) -> list[int]:
        """Return the ids of all texts, with the token that ends a text between them.

        Raises:
            DataError: the tokenizer has no such token, or cannot encode the texts.
        """
        if self.end is None:
            raise DataError(
                f"The tokenizer {self.source} has no token that ends a text: neither <|endoftext|> nor </s> or [SEP]."
            )
        self._tokenizer.no_truncation()
        packed = list[int]()
        for ids in self._encode(texts, around=False):
            packed += [self.end, *ids] if packed else ids
        return packed

    def _encode(self, texts: Sequence[str], around: bool) -> list[list[int]]:
        self._tokenizer.no_padding()
        with _explain(f"The tokenizer {self.source} cannot encode these texts"):  # it may lack the token for unknown words
            return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=around)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without the special ones."""
        return str(self._tokenizer.decode(list(ids)))


Tokenizer = PlainBytes | TokenizerFile


@contextmanager
def _explain(what: str, remedy: str = "") -> Iterator[None]:
    """Raise DataError for whatever the library raises: nothing more specific, and its panic is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise DataError(f"{what} ({error}).{remedy}") from error


def open_tokenizer(file: str | None, input: TextInput) -> Tokenizer:
    """Return the tokenizer for a model's input, checked against it.

    Args:
        file: tokenizer file; None or "bytes": ids are bytes.
        input: vocabulary, length and padding id of the model.

    Raises:
        DataError: its padding is not the model's, it has more tokens than the model, or its special ids leave no room for the
            text.
    """
    padding = input.padding if input.padding in (0, 1) else 1
    tokenizer: Tokenizer = PlainBytes(padding) if file in (None, BYTES) else TokenizerFile(Path(str(file)))
    overrides = []
    if tokenizer.padding != input.padding:
        overrides.append(f"input.padding={tokenizer.padding}")
    if (ids := max(tokenizer.size, tokenizer.padding + 1)) > input.vocabulary:
        overrides.append(f"input.vocabulary={ids}")
    if input.length <= tokenizer.num_around:
        raise DataError(
            f"The tokenizer ({tokenizer.source}) puts {tokenizer.num_around} special ids around a text. Received: a model for "
            f"{input.length} ids. Use model.overrides=[input.length={tokenizer.num_around + 1}] or more."
        )
    if overrides:
        raise DataError(
            f"The tokenizer ({tokenizer.source}) pads with id {tokenizer.padding} and has {tokenizer.size} tokens. Received: a "
            f"model that pads with {input.padding} and has a vocabulary of {input.vocabulary}. Use "
            f"model.overrides=[{','.join(overrides)}]."
        )
    return tokenizer


def train_tokenizer(
    files: Sequence[Path], vocabulary: int, out: Path, kind: Kind = "bytes", column: str = "text"
) -> tuple[int, int]:
    """Train a tokenizer and write it to a file; return its number of tokens and its padding id.

    Two runs number the pieces of `wordpiece` differently, so keep the file with the models that are trained with it.

    Args:
        files: text files, or tables (.csv, .tsv, .jsonl, .json, .parquet) with the texts in `column`.
        vocabulary: largest number of tokens, at least 261.
        out: file to write; it must not exist yet.
        kind: "bytes" is byte-level BPE with RoBERTa's special tokens; "wordpiece" is uncased, with BERT's special tokens.
        column: name of the column that holds the texts of a table.

    Raises:
        InputError: the vocabulary is smaller than the bytes and special tokens, or `out` exists or has no folder.
        DataError: a file cannot be read.
    """
    if vocabulary < _MIN_VOCABULARY:
        raise InputError(
            f"A tokenizer has 256 bytes and 5 special tokens. Received: {vocabulary} tokens. Use {_MIN_VOCABULARY} or more."
        )
    if out.exists():
        raise InputError(f"{out} exists already, and models trained with it need it. Name another file.")
    if not out.parent.is_dir():
        raise InputError(f"There is no folder {out.parent} to write {out.name} into. Make the folder, or name another.")
    if missing := [str(file) for file in files if not file.is_file()]:
        raise InputError(f"No such text files or tables: {join_names(missing)}. For all files of a folder use FOLDER/*.txt.")
    texts = [text for file in files for text in read_lines(file, column)]
    with explain_missing("tokenizers", "Tokenizers"):
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
    write_text(out, tokenizer.to_str(pretty=True))
    return int(tokenizer.get_vocab_size()), padding
