"""Tables of texts: what each format gives, that reading is local, and that what cannot be read is named."""

import json
import re
import socket
import sys

import pytest
import torch

from revzoo.data.loading import load_data
from revzoo.data.text_tables import read_lines, read_table
from revzoo.errors import DataError, RevzooError
from revzoo.spec.schema import TextInput

SUBWORDS = TextInput("text", 48, 280, 1)


def test_tables_of_every_format_hold_the_same(tables, tokenizer, tmp_path, options):
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in (tables / "test.jsonl").read_text().splitlines()]
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.json").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list(rows).to_parquet(other / "validation.parquet")
    data = load_data(options("text_classification", other, tokenizer, batch_size=3), SUBWORDS, 0)
    (test_batch,), train_batch = list(data.test), data.train.dataset.__getitems__([0, 1, 2])
    assert all(map(torch.equal, test_batch, train_batch))
    assert next(iter(data.test))[1].tolist() == [0, 1, 0]


def test_a_csv_is_read_as_text(tmp_path):
    long = "a" * 200_000  # more than csv reads in one field by default
    content = f'\ufeff\r\nlabel,text\r\n007,"good film, really ""good""\r\nin two lines"\r\n\r\nNA,{long}\r\n'
    (tmp_path / "table.csv").write_bytes(content.encode())
    table = read_table(tmp_path / "table.csv", "text", "label")
    assert table.texts == ['good film, really "good"\r\nin two lines', long]
    assert (table.labels, table.rows) == (["007", "NA"], [1, 2])


def test_a_tsv_has_tabs_and_suffixes_may_have_capitals(tmp_path):
    (tmp_path / "table.TSV").write_text('text\tlabel\nyes, "no"\t1\n"a\ttab\nor two"\t0\n')
    table = read_table(tmp_path / "table.TSV", "text", "label")
    assert (table.texts, table.labels) == (['yes, "no"', "a\ttab\nor two"], ["1", "0"])
    (tmp_path / "wide.tsv").write_text("text\tlabel\na\tb\tc\n")
    with pytest.raises(DataError, match="there are 3 fields, and the header names 2"):
        read_table(tmp_path / "wide.tsv", "text", "label")


def test_lines_end_where_an_editor_ends_them(tmp_path):
    """Not at the other characters at which Python splits; the byte-order mark is no text."""
    file = tmp_path / "lines.txt"
    file.write_bytes("\ufefffirst\u2028still\x0c first\r\n\nthird\rfourth\r\n".encode())
    assert read_lines(file, "text") == ["first\u2028still\x0c first", "", "third", "fourth"]
    file.with_suffix(".CSV").write_text("label,text\n1,a row\n")
    assert read_lines(file.with_suffix(".CSV"), "text") == ["a row"]


def test_one_file_is_split(tables, tokenizer, options):
    file = tables / "many.csv"
    rows = [f"text {i},{('b', 'a')[i % 2]}" for i in range(42)]  # 21 of each
    file.write_text("\n".join(["text,label", *rows]))
    data = load_data(options("text_classification", file, tokenizer), SUBWORDS, 0)
    assert (len(data.train.dataset), len(data.test.dataset)) == (38, 4)
    assert data.test.dataset.labels.tolist() == [1, 0, 1, 0]  # two of each label, though every tenth row is an a
    assert data.notes == [f"{file} has no texts for validation: every tenth of each label is held out, 4 in all"]
    unlabelled = load_data(options("masked_lm", file, tokenizer), SUBWORDS, 0)
    assert len(unlabelled.test.dataset) == 4
    assert unlabelled.notes == [f"{file} has no texts for validation: every tenth is held out, 4 in all"]


def test_reading_is_local(tables, tokenizer, tmp_path, monkeypatch, options):
    """No connection is opened, and no cache is left."""

    def refuse(*arguments):
        raise AssertionError(f"a connection to {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "scratch").mkdir()
    load_data(options("text_classification", tables, tokenizer), SUBWORDS, 0)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_is_not_installed_is_named(tables, tokenizer, tmp_path, monkeypatch, options):
    (tmp_path / "rows.parquet").touch()
    for package, root in (("datasets", tmp_path / "rows.parquet"), ("tokenizers", tables)):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(RevzooError, match=rf"need the package {package}. Install it: pip install {package}"):
                load_data(options("masked_lm", root, tokenizer), SUBWORDS, 0)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.csv", b"", "train.csv is empty"),
        ("train.csv", b"text,label\n", "train.csv has no rows"),
        ("train.csv", b"text,label\nfine,a\nalso,a\n", "train.csv has one label: a. .* add texts of another"),
        ("train.csv", b'text;label\n"fine, so";a\n', "train.csv cannot be read: line 2: .* Separate columns by commas"),
        ("train.csv", b"text,label\nfine,a\ncaf\xe9,b\n", "train.csv is no text in UTF-8: line 3, .* iconv"),
        ("train.csv", b"text;label\nfine;a\n", "train.csv has one column, 'text;label'. Separate columns by commas"),
        ("train.csv", b"text,labels\nfine,a\n", "no column 'label'. Did you mean 'labels'.* data.text.label="),
        ("train.csv", b"text,label\nfine,a\ngood film, really good,pos\n", "row 2: there are 3 fields, .* quotation"),
        ("train.csv", b"text,text\nfine,a\n", "Two columns of .*train.csv have the same name. Received: text, text"),
        ("train.csv", b"\ntext,label\n\nfine,a\n,b\n", "train.csv, row 2: the column 'text' holds no text, but ''"),
        ("test.jsonl", b'{"text": "a", "label": "cat"}\n{"text": 3\n', "test.jsonl cannot be read: "),
        ("test.jsonl", b'{"text": "a", "label": 0.5}\n', "test.jsonl, row 1: the column 'label' holds no label, but 0.5"),
        ("test.jsonl", b'{"text": "a", "label": "cow"}\n', "test.jsonl, row 1: the training texts have no label 'cow'"),
        ("test.jsonl", None, "No validation texts in .*: looked for val or valid"),
    ],
)
def test_tables_that_cannot_be_read(tables, tokenizer, file, content, message, options, refusal):
    if content is None:
        (tables / file).unlink()
    else:
        (tables / file).write_bytes(content)
    assert re.search(message, refusal(options("text_classification", tables, tokenizer), SUBWORDS))
