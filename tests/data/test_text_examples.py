"""Texts as examples: windows, labels, masked tokens, and that all of it follows from seed and epoch."""

import pytest
import tokenizers
import torch

from revzoo.data.base import IGNORED
from revzoo.data.corpus import read_standard_text, read_standard_texts
from revzoo.data.loading import load_data
from revzoo.errors import DataError
from revzoo.spec.schema import TextInput

BYTES = TextInput("text", 16, 256)
MASKED = TextInput("text", 48, 260, 1)
SUBWORDS = TextInput("text", 48, 280, 1)


def test_windows(story, options, epoch):
    data = load_data(options("causal_lm", story), BYTES, 0)
    content = story.read_bytes()
    assert (data.num_classes, data.label_noun, data.example_noun) == (None, "bytes", "texts")
    assert len(data.train.dataset) == 57  # as many as cover 900 bytes
    for ids, labels in epoch(data, 0):
        assert ids.shape == labels.shape == (4, 16)
        assert torch.equal(ids[:, 1:], labels[:, :-1])
        assert all(bytes([*row, last]) in content[:900] for row, last in zip(ids.tolist(), labels[:, -1].tolist(), strict=True))
    predicted = [label for _, labels in data.test for label in labels.flatten().tolist() if label != IGNORED]
    assert bytes(predicted) == content[901:]  # each byte but the first exactly once, in order


def test_documents_are_packed_with_the_end_of_a_text_between_them(tmp_path, tables, tokenizer, options):
    """Files in the order of their names, rows of a table, and of a data set of Hugging Face; bytes, or ids of a tokenizer."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "files").mkdir()
    for name in ("b", "a"):
        (tmp_path / "files" / f"{name}.txt").write_text(name * 90)
    whole = load_data(options("causal_lm", tmp_path / "files", batch_size=1), BYTES, 0)
    assert b"".join(each.dataset.list_contents()[0] for each in (whole.train, whole.test)) == b"a" * 90 + b"\0" + b"b" * 90
    table = {name: {"text": [f"a {name} text", "a dog"] * 9} for name in ("train", "test")}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict(rows) for name, rows in table.items()})
    saved.save_to_disk(tmp_path / "saved")
    data = load_data(options("causal_lm", tmp_path / "saved", tokenizer), SUBWORDS, 0)
    assert (data.label_noun, data.is_held_out, data.data_config) == ("tokens", False, {"tokenizer": str(tokenizer)})
    reader = tokenizers.Tokenizer.from_file(str(tokenizer))
    encode = lambda text: reader.encode(text, add_special_tokens=False).ids  # noqa: E731
    ids = data.test.dataset.text.tolist()
    assert ids == (([*encode("a test text"), 2, *encode("a dog"), 2]) * 9)[:-1]  # 2 is </s>
    rows = datasets.Dataset.from_dict({"text": [f"this is text number {i}" for i in range(30)]})
    rows.save_to_disk(tmp_path / "one")  # every tenth row is held out
    rows.to_csv(tmp_path / "one.csv")
    one, csv = (load_data(options("causal_lm", tmp_path / name, batch_size=1), BYTES, 0) for name in ("one", "one.csv"))
    assert [each.dataset.list_contents() for each in (one.train, one.test)] == [
        each.dataset.list_contents() for each in (csv.train, csv.test)
    ]
    for name, rows in table.items():
        datasets.Dataset.from_dict(rows).to_parquet(tables / f"{name}.parquet")
        (tables / ("train.csv" if name == "train" else "test.jsonl")).unlink()
    same = load_data(options("causal_lm", tables, tokenizer), SUBWORDS, 0)
    assert [same.train.dataset.text.tolist(), same.test.dataset.text.tolist()] == [data.train.dataset.text.tolist(), ids]
    with pytest.raises(DataError, match=r"280 of them.*input.vocabulary=280"):
        load_data(options("causal_lm", tables, tokenizer), BYTES, 0)


def test_every_offset_is_drawn(story, options):
    dataset = load_data(options("causal_lm", story), BYTES, 0).train.dataset
    drawn = set()
    for number in range(200):
        dataset.start_epoch(number)
        drawn |= set(dataset.begins.tolist())
    assert drawn == set(range(900 - 16))


@pytest.mark.parametrize(("name", "workers"), [("causal_lm", 0), ("masked_lm", 2), ("text_classification", 0)])
def test_batches_follow_from_seed_and_epoch(name, workers, story, tables, tokenizer, options, epoch, same):
    def load(seed=7, workers=workers):
        if name == "causal_lm":
            return load_data(options(name, story, num_workers=workers), BYTES, seed)
        return load_data(options(name, tables, tokenizer, num_workers=workers), SUBWORDS, seed)

    data = load()
    second = epoch(data, 1)
    assert same(second, epoch(load(workers=0), 1))
    assert same(second[1:], epoch(data, 1, skip=4))
    assert not same(second, epoch(data, 2))
    assert not same(second, epoch(load(seed=8), 1))
    drawn = [sorted(int(each.clamp(0).sum()) for _, labels in epoch(data, number) for each in labels) for number in (1, 2)]
    assert drawn[0] != drawn[1] or name == "text_classification"  # in whatever order
    assert same(list(data.test), list(load(seed=8).test))


def test_masking(options, epoch):
    """15 % of the bytes are labels; of these 80 % are the mask, 10 % another byte, 10 % themselves; special ids never are."""
    data = load_data(options("masked_lm", batch_size=1000), MASKED, 0)
    plain = torch.cat([ids.long() for ids in data.train.dataset.ids])
    counts = torch.zeros(4)
    for ids, labels in epoch(data, 0):
        chosen, original = labels != IGNORED, torch.where(labels == IGNORED, ids, labels)
        assert chosen.any(1).all()
        assert (original[chosen] >= 4).all()
        assert torch.isin(original[original >= 4], plain).all()
        masked, kept = ids[chosen] == 3, ids[chosen] == original[chosen]
        counts += torch.tensor([chosen.sum(), (original >= 4).sum(), masked.sum(), kept.sum()])
    chosen, ordinary, masked, kept = counts.tolist()
    assert chosen / ordinary == pytest.approx(0.15, abs=0.01)
    assert masked / chosen == pytest.approx(0.8, abs=0.02)
    assert kept / chosen == pytest.approx(0.1 + 0.1 / 256, abs=0.02)


def test_the_documentation_is_split_without_repetition():
    content = read_standard_text()
    assert 300_000 < len(content) < 600_000
    assert 'The "assert" statement' in content
    paragraphs = [" ".join(paragraph.split()) for paragraph in content.split("\n\n")]
    train_texts, test_texts = read_standard_texts(labelled=False)
    assert len(set(paragraphs)) == len(paragraphs) == len(train_texts.texts) + len(test_texts.texts)
    assert not set(train_texts.texts) & set(test_texts.texts)
    for texts in read_standard_texts(labelled=True):
        shares = [texts.labels.count(label) / len(texts.labels) for label in set(texts.labels)]
        assert len(shares) == 4
        assert min(shares) > 0.1


def test_text_files_that_cannot_be_read(tmp_path, story, options, refusal):
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text("\n\n")
    latin.write_bytes(b"one\ntwo\ncaf\xe9\n")
    assert refusal(options("causal_lm", empty), BYTES).startswith(f"{empty} is empty.")
    assert refusal(options("causal_lm", latin), BYTES).startswith(
        f"{latin} is no text in UTF-8: line 3, byte 11 of the whole. "
    )
    assert refusal(options("causal_lm", tmp_path), BYTES).startswith(f"{empty} is empty.")  # whatever else is there
    assert refusal(options("causal_lm", tmp_path / "no.txt"), BYTES).startswith(
        f"There is no file or folder {tmp_path}/no.txt."
    )
    (tmp_path / "folder").mkdir()
    assert refusal(options("causal_lm", tmp_path / "folder"), BYTES).startswith(f"{tmp_path}/folder has no .txt files.")
    assert "Use model.overrides=[input.vocabulary=256]" in refusal(options("causal_lm", story), TextInput("text", 16, 255))
    message = refusal(options("causal_lm", story), TextInput("text", 100, 256))
    assert "The text of 1000 bytes is too short" in message
    assert "Use model.overrides=[input.length=99]" in message
    load_data(options("causal_lm", story), TextInput("text", 99, 256), 0)
    assert "Use model.overrides=[input.padding=null]" in refusal(options("causal_lm", story), TextInput("text", 9, 256, 48))
    story.write_bytes(story.read_bytes() + "é".encode()[:1])  # cut within a character
    load_data(options("causal_lm", story), BYTES, 0)


@pytest.mark.parametrize("name", ["masked_lm", "text_classification"])
def test_texts_of_one_table_are_held_out_by_their_position(name, tables, tokenizer, options):
    """Those of a folder with two tables are not, nor are Python's own, to which nobody adds any."""
    many = tables / "many.csv"
    many.write_text("text,label\n" + "a cat,cat\na dog,dog\n" * 12)
    assert load_data(options(name, many, tokenizer), SUBWORDS, 0).is_held_out
    assert not load_data(options(name, tables, tokenizer), SUBWORDS, 0).is_held_out
    assert not load_data(options(name), MASKED, 0).is_held_out


def test_the_last_bytes_of_a_file_are_held_out(story, options):
    assert load_data(options("causal_lm", story), BYTES, 0).is_held_out
    assert not load_data(options("causal_lm"), BYTES, 0).is_held_out
