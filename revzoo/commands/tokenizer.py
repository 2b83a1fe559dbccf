"""`revzoo tokenizer`: a tokenizer trained on one's own texts."""

import argparse
from pathlib import Path

from revzoo.commands.parser import Parser, positive_count
from revzoo.errors import quote

SUMMARY = "Train a tokenizer on your own texts."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo tokenizer`."""
    parser.epilog = (
        "bytes is byte-level BPE with RoBERTa's special tokens. wordpiece is BERT's, uncased; it numbers its tokens "
        "differently each time: keep the file."
    )
    parser.add_argument("files", nargs="+", type=Path, help="text files, or tables (.csv, .tsv, .jsonl, .json, .parquet)")
    parser.add_argument(
        "--vocabulary", type=positive_count, required=True, metavar="N", help="number of tokens at most, such as 8000"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write it, such as tokenizer.json")
    parser.add_argument("--kind", choices=("bytes", "wordpiece"), default="bytes", help="kind of tokenizer (default: bytes)")
    parser.add_argument("--column", default="text", metavar="NAME", help="column of the texts in tables (default: text)")


def run(arguments: argparse.Namespace) -> int:
    """Train a tokenizer, and print how to use it."""
    from revzoo.display.console import show_status

    with show_status("training the tokenizer"):
        from revzoo.data.tokenizer import train_tokenizer

        size, padding = train_tokenizer(arguments.files, arguments.vocabulary, arguments.out, arguments.kind, arguments.column)
    print(
        f"{arguments.out}: {size} tokens. Use it with {quote(f'data.text.tokenizer={arguments.out}')} "
        f"model.overrides=[input.vocabulary={size},input.padding={padding}]"
    )
    return 0
