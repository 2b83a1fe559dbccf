import json
import math
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import revzoo
from revzoo.checkpoint import files
from revzoo.data.base import IGNORED
from revzoo.data.corpus import read_table, standard_text, standard_texts
from revzoo.data.loading import load_data
from revzoo.data.options import DataOptions, TextOptions
from revzoo.errors import DataError, InputError, RevzooError, SpecError
from revzoo.spec.schema import ImageInput, TextInput
from revzoo.training.evaluation import evaluate, evaluate_checkpoint
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.loop import resume, train
from revzoo.training.recipe import load_recipe, notes
from revzoo.training.setup import Loss
from zoo_cli import main

BYTES = TextInput("text", 16, 256)
MASKED = TextInput("text", 48, 260, 1)
SUBWORDS = TextInput("text", 48, 280, 1)
CAUSAL = """
name: causal
family: test
input: {kind: text, length: 16, vocabulary: 256}
stem: {type: token_embed, width: 16}
split: duplicate
block: {coupling: additive, f: {type: shared_qk_attention, heads: 2, dropout: 0.1}, g: mlp}
stages: [{depth: 1, width: 16}]
fuse: {type: mean, norm: none}
head: {type: token_linear, outputs: 256}
"""
SMALL = "stem.width=16,block.f.heads=2,stages.0.width=16,stages.0.depth=1"
FAST = ["train.epochs=2", "train.accumulate=2", "schedule.warmup_epochs=0"]
MEASURED = {"seconds", "texts_per_second", "memory_bytes"}


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """A text of 1,000 bytes, no two windows of which are alike."""
    file = tmp_path / "story.txt"
    file.write_text("".join(f"{i:04d}" for i in range(250)))
    return file


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder of tables, with quotation marks, several lines in one text, and what could be taken for a missing value."""
    folder = tmp_path / "tables"
    folder.mkdir()
    animals = [(f"a cat purrs {i} times", "cat") for i in range(7)] + [(f'the dog\nbarks "{i}" times', "dog") for i in range(7)]
    lines = [f'"{text.replace(chr(34), 2 * chr(34))}",{label}' for text, label in [*animals, ("NA", "cat"), ("007", "dog")]]
    (folder / "train.csv").write_text("\n".join(["text,label", *lines]))
    rows = [{"text": "the cat purrs", "label": "cat"}, {"text": "a dog", "label": "dog"}, {"text": "cat", "label": "cat"}]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def tokenizer(tables: Path, tmp_path: Path) -> Path:
    file = tmp_path / "tokenizer.json"
    assert main(["tokenizer", str(tables / "train.csv"), "--vocabulary", "280", "--out", str(file)]) == 0
    return file


def options(name, root=None, tokenizer=None, **more):
    text = TextOptions(tokenizer=None if tokenizer is None else str(tokenizer))
    return DataOptions(name, **{"batch_size": 4, "root": None if root is None else str(root), "text": text, **more})


def epoch(data, number, skip=0):
    data.start_epoch(number, skip)
    return list(data.train)


def same(one, other):
    return all(torch.equal(a, b) and torch.equal(i, j) for (a, i), (b, j) in zip(one, other, strict=True))


def test_windows(story):
    data = load_data(options("characters", story), BYTES, 0)
    content = story.read_bytes()
    assert (data.classes, data.unit, data.things) == (None, "bytes", "texts")
    assert len(data.train.dataset) == 57  # as many as cover 900 bytes
    for ids, labels in epoch(data, 0):
        assert ids.shape == labels.shape == (4, 16)
        assert torch.equal(ids[:, 1:], labels[:, :-1])
        assert all(bytes([*row, last]) in content[:900] for row, last in zip(ids.tolist(), labels[:, -1].tolist(), strict=True))
    asked = [label for _, labels in data.test for label in labels.flatten().tolist() if label != IGNORED]
    assert bytes(asked) == content[901:]  # each byte but the first exactly once, in order


def test_every_offset_is_drawn(story):
    dataset = load_data(options("characters", story), BYTES, 0).train.dataset
    drawn = set()
    for number in range(200):
        dataset.start_epoch(number)
        drawn |= set(dataset.begins.tolist())
    assert drawn == set(range(900 - 16))


@pytest.mark.parametrize("name", ["characters", "masked_lm", "text_classification"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_from_seed_and_epoch(name, workers, story, tables, tokenizer):
    def load(seed=7, workers=workers):
        if name == "characters":
            return load_data(options(name, story, num_workers=workers), BYTES, seed)
        return load_data(options(name, tables, tokenizer, num_workers=workers), SUBWORDS, seed)

    data = load()
    second = epoch(data, 1)
    assert same(second, epoch(load(workers=0), 1))
    assert same(second[1:], epoch(data, 1, skip=4))
    assert not same(second, epoch(data, 2))
    assert not same(second, epoch(load(seed=8), 1))
    assert same(list(data.test), list(load(seed=8).test))


def test_masking():
    """15 % of the bytes are labels; of these 80 % are the mask, 10 % another byte, 10 % themselves; special ids never are."""
    data = load_data(options("masked_lm", batch_size=1000), MASKED, 0)
    plain = torch.cat([ids.long() for ids in data.train.dataset.ids])
    counts = torch.zeros(4)
    for ids, labels in epoch(data, 0):
        asked, original = labels != IGNORED, torch.where(labels == IGNORED, ids, labels)
        assert asked.any(1).all()
        assert (original[asked] >= 4).all()
        assert torch.isin(original[original >= 4], plain).all()
        masked, kept = ids[asked] == 3, ids[asked] == original[asked]
        counts += torch.tensor([asked.sum(), (original >= 4).sum(), masked.sum(), kept.sum()])
    asked, ordinary, masked, kept = counts.tolist()
    assert asked / ordinary == pytest.approx(0.15, abs=0.01)
    assert masked / asked == pytest.approx(0.8, abs=0.02)
    assert kept / asked == pytest.approx(0.1 + 0.1 / 256, abs=0.02)


def test_byte_ids(tables, tokenizer):
    roberta, bert = (load_data(options("masked_lm"), TextInput("text", 6, 260, padding), 0).test.dataset for padding in (1, 0))
    first = standard_texts(labelled=False)[1].texts[0].encode()[:4]
    assert roberta.ids[0].tolist() == [0, *(byte + 4 for byte in first), 2]
    assert bert.ids[0].tolist() == [1, *(byte + 4 for byte in first), 2]


@pytest.mark.parametrize("name", ["masked_lm", "text_classification"])
def test_a_batch_of_different_lengths_is_each_text_alone(name, tables, tokenizer):
    """Padding is seen by nothing: logits and the loss of a batch are those of its texts one by one."""
    model_name = "rev_roberta_mini" if name == "masked_lm" else "rev_bert_mini"
    sizes = ["input.length=48", "input.vocabulary=280", "input.padding=1"]
    torch.manual_seed(0)
    model = revzoo.create(model_name, overrides=[*SMALL.split(","), *sizes], dtype=torch.float64).eval()
    data = load_data(options(name, tables, tokenizer), model.spec.input, 0)
    loss, checked = Loss(0.1), 0
    for ids, labels in epoch(data, 0):
        lengths = (ids != 1).sum(1)
        assert (ids[torch.arange(48)[: ids.shape[1]] >= lengths[:, None]] == 1).all()
        assert ids.shape[1] == lengths.max()  # no longer than the longest
        checked += int(lengths.min() < lengths.max())
        logits = model(ids)
        total = weight = 0.0
        for i, n in enumerate(lengths.tolist()):
            alone = model(ids[i : i + 1, :n])
            label = labels[i : i + 1, :n] if labels.dim() == 2 else labels[i : i + 1]
            torch.testing.assert_close(logits[i : i + 1, :n] if labels.dim() == 2 else logits[i : i + 1], alone)
            asked = int((label != IGNORED).sum())
            total += asked * loss(alone, label)
            weight += asked
        torch.testing.assert_close(loss(logits, labels), total / weight)
    assert checked


class Lookup(nn.Module):
    """A model whose logits are looked up."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, ids):
        return self.logits[ids]


def test_scores_of_ids_by_hand():
    logits = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    batches = [
        (torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[1, IGNORED, 3], [IGNORED, 0, 0]])),
        (torch.tensor([[6, 7]]), torch.tensor([[8, IGNORED]])),
    ]
    scores = evaluate(Lookup(logits), batches, Accelerator(), "tokens")
    pairs = [(0, 1), (2, 3), (4, 0), (5, 0), (6, 8)]
    losses = [-logits[i].log_softmax(0)[label].item() for i, label in pairs]
    ranks = [int((logits[i] > logits[i, label]).sum()) for i, label in pairs]
    assert (scores.count, scores.loss) == (5, pytest.approx(sum(losses) / 5))
    assert (scores.top1, scores.top5) == (20 * ranks.count(0), 20 * sum(rank < 5 for rank in ranks))
    assert f"loss {scores.loss:.4f}, {scores.loss / math.log(2):.3f} bits per token on 5 tokens" in str(scores)


def recipe(kind, tmp_path, story, tables, tokenizer):
    """Return overrides of a shipped recipe that make it small, on little data."""
    if kind == "characters":
        (tmp_path / "causal.yaml").write_text(CAUSAL)
        model = [f"model.name={tmp_path}/causal.yaml", "model.overrides=[]"]
        return load_recipe("text_reformer", [*FAST, *model, f"data.root={story}", "data.batch_size=8"])
    name = "text_roberta" if kind == "masked_lm" else "text_bert"
    model = [f"model.overrides=[{SMALL},input.length=48,input.vocabulary=280,input.padding=1]"]
    data = [f"data.root={tables}", f"data.text.tokenizer={tokenizer}", "data.batch_size=4"]
    return load_recipe(name, [*FAST, *model, *data])


@pytest.mark.parametrize("kind", ["characters", "masked_lm", "text_classification"])
def test_a_run_is_resumed_and_evaluated(kind, tmp_path, story, tables, tokenizer, monkeypatch, capsys):
    options = recipe(kind, tmp_path, story, tables, tokenizer)
    capsys.readouterr()
    train(options, tmp_path / "whole")
    out, err = capsys.readouterr()
    assert (" bits per " in out) == (kind != "text_classification")
    assert "texts/s" in out
    assert err == ""
    asked = iter([0, 15])
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "received", lambda self: next(asked))
        with pytest.raises(Interrupted):
            train(options, tmp_path / "cut")
    monkeypatch.chdir("/")
    resume(tmp_path / "cut")
    whole, cut = (
        [
            {key: value for key, value in json.loads(line).items() if key not in MEASURED}
            for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("whole", "cut")
    )
    assert whole == cut
    assert len(whole) == 2
    left, right = (files.read_tensors(tmp_path / run / "last.safetensors") for run in ("whole", "cut"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    scores = evaluate_checkpoint(tmp_path / "cut" / "last.safetensors", ["data.batch_size=3"])
    assert scores.loss == pytest.approx(whole[-1]["loss"], rel=1e-5)
    assert (scores.top1, scores.unit) == (
        pytest.approx(whole[-1]["top1"]),
        {"characters": "bytes", "masked_lm": "tokens"}.get(kind, "texts"),
    )
    spec = revzoo.load_spec(tmp_path / "cut")
    assert spec.head.arguments.get("outputs") == {"characters": 256, "masked_lm": None, "text_classification": 2}[kind]


@pytest.mark.parametrize("name", ["text_reformer", "text_roberta", "text_bert"])
def test_recipes_need_no_files(name):
    """The documentation of whichever Python this is gives each of them batches that its model takes."""
    shipped = load_recipe(name)
    assert notes(shipped) == []
    outputs = [] if name != "text_bert" else ["head.outputs=4"]  # the data say it
    spec = revzoo.load_spec(shipped.model.name, [*shipped.model.overrides, *outputs])
    data = load_data(shipped.data, spec.input, 0)
    assert data.classes == (4 if outputs else None)
    ids, labels = epoch(data, 0)[0]
    assert ids.shape[0] == labels.shape[0] == shipped.data.batch_size
    assert ids.max() < spec.input.vocabulary


def test_the_documentation_is_split_without_repetition():
    content = standard_text()
    assert 300_000 < len(content) < 600_000
    assert 'The "assert" statement' in content
    paragraphs = [" ".join(paragraph.split()) for paragraph in content.split("\n\n")]
    train_texts, test_texts = standard_texts(labelled=False)
    assert len(set(paragraphs)) == len(paragraphs) == len(train_texts.texts) + len(test_texts.texts)
    assert not set(train_texts.texts) & set(test_texts.texts)
    for texts in standard_texts(labelled=True):
        shares = [texts.labels.count(label) / len(texts.labels) for label in sorted(set(texts.labels))]
        assert len(shares) == 4
        assert min(shares) > 0.1
        assert max(shares) < 0.45


@pytest.mark.parametrize("kind", ["bytes", "wordpiece"])
def test_tokenizer_command(kind, tables, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("the cat purrs\nthe dog barks\n" * 9)
    file = tmp_path / "t.json"
    command = ["tokenizer", str(tmp_path / "a.txt"), str(tables / "train.csv"), "--vocabulary=290", f"--kind={kind}"]
    assert main([*command, "--out", str(file)]) == 0
    trained = tokenizers.Tokenizer.from_file(str(file))
    size, padding = trained.get_vocab_size(), {"bytes": 1, "wordpiece": 0}[kind]
    assert capsys.readouterr().out == (
        f"{file}: {size} tokens. Use it with data.text.tokenizer={file} "
        f"model.overrides=[input.vocabulary={size},input.padding={padding}]\n"
    )
    special = [trained.id_to_token(i) for i in range(5)]
    assert (
        special
        == {
            "bytes": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
            "wordpiece": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        }[kind]
    )
    encoding = trained.encode("the cat purrs")
    assert trained.decode(encoding.ids) == "the cat purrs"
    assert (encoding.tokens[0], encoding.tokens[-1]) == (("<s>", "</s>") if kind == "bytes" else ("[CLS]", "[SEP]"))
    data = load_data(options("masked_lm", tables, file), TextInput("text", 8, size, padding), 0)
    assert data.train.dataset.ids[0].tolist()[0] == encoding.ids[0]
    assert max(map(len, data.train.dataset.ids)) == 8
    assert main([*command, "--out", str(file)]) == 2
    assert f"There is {file} already" in capsys.readouterr().err
    for arguments, message in (
        ([str(file), f"--out={tmp_path}/none/t.json"], f"There is no folder {tmp_path}/none to write t.json into."),
        ([str(tmp_path), "nope.txt", "--out=x.json"], f"No such text files or tables: {tmp_path}, nope.txt."),
    ):
        assert main(["tokenizer", "--vocabulary=290", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["tokenizer", str(file), "--vocabulary=10", "--out=x.json"]) == 2
    assert "Received: 10 tokens. Use 261 or more." in capsys.readouterr().err


def test_tables_of_every_format_hold_the_same(tables, tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in (tables / "test.jsonl").read_text().splitlines()]
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.json").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list(rows).to_parquet(other / "validation.parquet")
    data = load_data(options("text_classification", other, tokenizer, batch_size=3), SUBWORDS, 0)
    assert same(list(data.test), [data.train.dataset.__getitems__([0, 1, 2])])
    assert next(iter(data.test))[1].tolist() == [0, 1, 0]


def test_a_csv_is_texts_as_they_stand(tmp_path):
    long = "a" * 200_000  # more than csv reads in one field unless told
    content = f'\ufeff\r\nlabel,text\r\n007,"good film, really ""good""\r\nin two lines"\r\n\r\nNA,{long}\r\n'
    (tmp_path / "table.csv").write_bytes(content.encode())
    table = read_table(tmp_path / "table.csv", "text", "label")
    assert table.texts == ['good film, really "good"\r\nin two lines', long]
    assert (table.labels, table.rows) == (["007", "NA"], [1, 2])


def test_one_file_is_split(tables, tokenizer):
    file = tables / "many.csv"
    rows = [f"text {i},{('b', 'a')[i % 2]}" for i in range(42)]  # 21 of each
    file.write_text("\n".join(["text,label", *rows]))
    data = load_data(options("text_classification", file, tokenizer), SUBWORDS, 0)
    assert (len(data.train.dataset), len(data.test.dataset)) == (38, 4)
    assert data.test.dataset.labels.tolist() == [1, 0, 1, 0]  # two of each label, though every tenth row is an a
    unlabelled = load_data(options("masked_lm", file, tokenizer), SUBWORDS, 0)
    assert len(unlabelled.test.dataset) == 4


def test_a_run_is_not_evaluated_on_other_classes(tmp_path, story, tables, tokenizer):
    train(recipe("text_classification", tmp_path, story, tables, tokenizer), tmp_path / "run")
    other = tables / "other.csv"
    other.write_text("text,label\n" + "a cat,cow\na dog,pig\n" * 10)
    with pytest.raises(InputError, match=r"to tell these 2 classes apart: cat, dog\. Received: data of 2: cow, pig\."):
        evaluate_checkpoint(tmp_path / "run", [f"data.root={other}"])


def test_reading_is_local(tables, tokenizer, tmp_path, monkeypatch):
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


def test_what_is_not_installed_is_named(tables, tokenizer, monkeypatch):
    for package in ("datasets", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(RevzooError, match=rf"need the package {package}. Install it: pip install {package}"):
                load_data(options("masked_lm", tables, tokenizer), SUBWORDS, 0)


def refusal(options, input, processes=1):
    with pytest.raises(DataError) as caught:
        load_data(options, input, 0, processes)
    return str(caught.value)


def test_text_files_that_cannot_be_read(tmp_path, story):
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text("\n\n")
    latin.write_bytes(b"one\ntwo\ncaf\xe9\n")
    assert refusal(options("characters", empty), BYTES).startswith(f"{empty} is empty.")
    assert refusal(options("characters", latin), BYTES).startswith(
        f"{latin} is not UTF-8: row 3, byte 11 of the file is b'\\xe9'. Convert it, "
    )
    assert refusal(options("characters", tmp_path), BYTES).startswith(f"{empty} is empty.")  # whatever else is there
    assert refusal(options("characters", tmp_path / "no.txt"), BYTES).startswith(f"There is no file {tmp_path}/no.txt.")
    (tmp_path / "folder").mkdir()
    assert refusal(options("characters", tmp_path / "folder"), BYTES).startswith(f"{tmp_path}/folder has no .txt files.")
    assert "Use model.overrides=[input.vocabulary=256]" in refusal(options("characters", story), TextInput("text", 16, 255))
    message = refusal(options("characters", story), TextInput("text", 100, 256))
    assert "The text of 1000 bytes is too short" in message
    assert "Use model.overrides=[input.length=99]" in message
    load_data(options("characters", story), TextInput("text", 99, 256), 0)
    assert "Use model.overrides=[input.padding=null]" in refusal(options("characters", story), TextInput("text", 9, 256, 48))
    story.write_bytes(story.read_bytes() + "é".encode()[:1])  # cut within a character
    load_data(options("characters", story), BYTES, 0)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.csv", b"", "train.csv is empty."),
        ("train.csv", b"text,label\n", "train.csv has no rows."),
        ("train.csv", b"text,label\nfine,a\ncaf\xe9,b\n", "train.csv is not UTF-8: row 3, byte 21 of the file is b'\\xe9'."),
        ("train.csv", b"text,label\nfine,a\n,b\n", "train.csv, row 2: the column 'text' is empty."),
        ("train.csv", b"text,label\nfine,a\nalso,\n", "train.csv, row 2: the column 'label' has no label."),
        (
            "train.csv",
            b"text,labels\nfine,a\n",
            "train.csv has no column 'label'. Did you mean 'labels'? Received: text, labels.",
        ),
        (
            "train.csv",
            b"words,label\nfine,a\n",
            "train.csv has no column 'text'. Received: words, label. Name one with data.text.c",
        ),
        ("train.csv", b"text,label\nfine,a\nalso,a\n", "train.csv has one label: a. Classification needs two or more."),
        (
            "train.csv",
            b"text,label\nfine,a\ngood film, really good,pos\n",
            "train.csv, row 2: there are 3 fields, and the header names 2. A text with a comma stands in quotation marks.",
        ),
        ("train.csv", b"text,label\nfine,a,\nbad,b,\n", "train.csv, row 1: there are 3 fields, and the header names 2."),
        ("train.csv", b"text,label\nfine\n", "train.csv, row 1: there are 1 fields, and the header names 2."),
        ("train.csv", b"text,label,\nfine,a,\n", "train.csv has a column without a name. Received: text,label,."),
        ("train.csv", b"text,text\nfine,a\n", "train.csv has more than one column 'text'. Received: text,text."),
        ("train.csv", b'text,label\nfine,a\n"bad,b\n', "train.csv cannot be read: line 3: unexpected end of data."),
        ("train.csv", b"\ntext,label\n\nfine,a\n,b\n", "train.csv, row 2: the column 'text' is empty."),
        ("test.jsonl", b'{"text": "a", "label": "cat"}\n{"text": 3\n', "test.jsonl cannot be read: row 2 is no JSON (Exp"),
        ("test.jsonl", b'{"text": null, "label": "cat"}\n', "test.jsonl, row 1: the column 'text' is empty."),
        ("test.jsonl", b'{"text": 3, "label": "cat"}\n', "test.jsonl, row 1: the column 'text' is 3, which is no text."),
        ("test.jsonl", b'{"text": "a", "label": 0.5}\n', "test.jsonl, row 1: the column 'label' is 0.5, which is neither"),
        (
            "test.jsonl",
            b'{"text": "a", "label": "cat"}\n{"text": "b"}\n',
            "test.jsonl, row 2: the column 'label' has no label.",
        ),
        ("test.jsonl", b'{"text": "a", "label": " "}\n', "test.jsonl, row 1: the column 'label' has no label."),
        (
            "train.csv",
            "text,label\nfine,a\n".encode("utf-16"),
            "train.csv is not UTF-8: row 1, byte 0 of the file is b'\\xff'. Convert it, for example with iconv -f utf-16",
        ),
        (
            "test.jsonl",
            b'{"text": "a", "label": "cow"}\n',
            "test.jsonl, row 1: the training texts have no label 'cow'. They have",
        ),
        (
            "test.jsonl",
            None,
            "No test texts in {}: looked for test or validation or valid or val or dev with the ending .csv or",
        ),
    ],
)
def test_tables_that_cannot_be_read(tables, tokenizer, file, content, message):
    if content is None:
        (tables / file).unlink()
    else:
        (tables / file).write_bytes(content)
    found = refusal(options("text_classification", tables, tokenizer), SUBWORDS)
    expected = message.format(tables) if content is None else f"{tables}/{message}"
    assert found.startswith(expected), found


def test_tokenizers_that_do_not_fit(tables, tokenizer, tmp_path):
    def load(file=tokenizer, input=SUBWORDS):
        return refusal(options("masked_lm", tables, file), input)

    assert f"There is no tokenizer {tmp_path}/no.json. Make it with revzoo tokenizer" in load(tmp_path / "no.json")
    (tmp_path / "half.json").write_text('{"version":')
    assert f"{tmp_path}/half.json is no tokenizer of Hugging Face's tokenizers (" in load(tmp_path / "half.json")
    assert load(input=TextInput("text", 48, 279, 1)) == (
        f"The tokenizer ({tokenizer}) pads with id 1 and has 280 tokens. Received: a model that has 1 for padding and a "
        "vocabulary of 279. Use model.overrides=[input.vocabulary=280]."
    )
    assert load(input=TextInput("text", 48, 30, None)).endswith(
        "has None for padding and a vocabulary of 30. Use model.overrides=[input.padding=1,input.vocabulary=280]."
    )
    for name, input, file in (("bytes", MASKED, None), (tokenizer, SUBWORDS, tokenizer)):
        assert refusal(options("masked_lm", file and tables, file), replace(input, length=2)) == (
            f"The tokenizer ({name}) puts 2 special ids around a text. Received: a model for 2 ids. Use "
            "model.overrides=[input.length=3] or more."
        )
        load_data(options("masked_lm", file and tables, file), replace(input, length=3), 0)
    assert "The tokenizer (bytes) pads with id 1 and has 260 tokens." in refusal(
        options("masked_lm"), TextInput("text", 48, 260, 7)
    )
    tokenizers = pytest.importorskip("tokenizers")
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[PAD]": 1, "[UNK]": 2}, "[UNK]"))
    bare.save(str(tmp_path / "bare.json"))
    assert load(tmp_path / "bare.json") == (f"The tokenizer {tmp_path}/bare.json has no mask token: neither <mask> nor [MASK].")
    nothing = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    nothing.save(str(tmp_path / "nothing.json"))
    assert "has no padding token: neither <pad> nor [PAD]" in load(tmp_path / "nothing.json")
    nothing.enable_padding(pad_id=5000, pad_token="a")
    nothing.save(str(tmp_path / "far.json"))
    assert load(tmp_path / "far.json").endswith("Use model.overrides=[input.padding=5000,input.vocabulary=5001].")
    unknown = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "[PAD]": 1, "[MASK]": 2}, unk_token="[UNK]"))
    unknown.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    unknown.save(str(tmp_path / "unknown.json"))
    assert f"The tokenizer {tmp_path}/unknown.json cannot encode these texts (" in load(tmp_path / "unknown.json")
    assert refusal(options("masked_lm", tmp_path / "nowhere", tokenizer), SUBWORDS) == (
        f"There is no file or folder {tmp_path}/nowhere. Set data.root to where the texts are."
    )


def test_models_that_do_not_fit(tmp_path, story):
    assert refusal(DataOptions("digits", 4), MASKED).startswith(
        "data.name=digits is images. Received: a model for text. Use da"
    )
    assert refusal(options("masked_lm"), ImageInput("image", 1, (8, 8))).startswith(
        "data.name=masked_lm is text. Received: a model for images. Use data.name=digits or folder, or a model for text such "
    )
    assert refusal(options("characters", story, batch_size=99), BYTES) == (
        "The 57 training texts are not a batch for each of 1 processes. Received: data.batch_size=99. Use data.batch_size=57 "
        "or less."
    )
    (tmp_path / "causal.yaml").write_text(CAUSAL)
    causal = [f"model.name={tmp_path}/causal.yaml", "model.overrides=[]", f"data.root={story}", "data.batch_size=8"]
    later = "'stages=[{depth: 1, width: 64}, {depth: 1, width: 64, f: {type: self_attention, heads: 2}}]'"
    cases = [
        (
            "text_bert",
            ["data.name=masked_lm"],
            "asks for an id for each token. Received: rev_bert_mini with the head sequence_classification",
        ),
        ("text_roberta", ["data.name=text_classification"], "asks for a class for a text. Received: rev_roberta_mini with the"),
        ("text_roberta", ["data.name=characters"], "asks for the next character. Received: rev_roberta_mini, which sees it."),
        ("text_reformer", [*causal, "model.overrides=[block.f.causal=false]"], "Received: causal, which sees it."),
        ("text_reformer", [f"model.overrides=[{later}]"], "Received: reformer_mini, which sees it."),
        ("text_reformer", [*causal, "model.num_outputs=255"], "model.num_outputs: found 255; allowed: at least 256, the vocab"),
        ("text_roberta", ["model.num_outputs=300"], "scores the 260 ids of its vocabulary. Received: 300 outputs."),
    ]
    for name, overrides, message in cases:
        with pytest.raises(RevzooError, match=message.replace("(", r"\(")):
            train(load_recipe(name, overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_few_outputs_for_the_vocabulary(tmp_path, story):
    (tmp_path / "causal.yaml").write_text(CAUSAL)
    model = [f"model.name={tmp_path}/causal.yaml", "model.overrides=[]"]
    train(load_recipe("text_reformer", [*FAST, *model, f"data.root={story}", "data.batch_size=8"]), tmp_path / "run")
    model = revzoo.create(tmp_path / "run", num_outputs=200)
    facts = files.read_metadata(tmp_path / "run" / "best.safetensors")
    files.save_weights(model, model.spec, tmp_path / "few.safetensors", {"revzoo.recipe": facts["revzoo.recipe"]})
    with pytest.raises(RevzooError, match="causal has 200 outputs and cannot tell the 256 ids of its vocabulary apart"):
        evaluate_checkpoint(tmp_path / "few.safetensors")


def test_fine_tuning_with_a_head_that_the_data_complete(tmp_path, tables, tokenizer):
    """An override that sets a head leaves its outputs to the data, with weights to start from as well."""
    sizes = f"{SMALL},input.length=48,input.vocabulary=280,input.padding=1"
    model = f"model.overrides=[{sizes},'head={{type: pooled_linear}}']"
    data = [f"data.root={tables}", f"data.text.tokenizer={tokenizer}", "data.batch_size=4"]
    train(load_recipe("text_bert", [*FAST, *data, model]), tmp_path / "run")
    start = f"model.checkpoint={tmp_path}/run/last.safetensors"
    train(
        load_recipe("text_bert", [*FAST, *data, model, start, "optimizer.lr=1e-12", "schedule.sched=constant"]),
        tmp_path / "tuned",
    )
    before, after = (files.read_tensors(tmp_path / run / "last.safetensors") for run in ("run", "tuned"))
    for key in before:
        torch.testing.assert_close(before[key], after[key], rtol=0, atol=1e-6)


def test_settings_that_contradict(tmp_path):
    with pytest.raises(SpecError) as caught:
        load_recipe("text_roberta", [f"data.root={tmp_path}", "mixup={mixup_alpha: 0.8}"])
    assert [(problem.path, problem.received) for problem in caught.value.problems] == [
        ("data.text.tokenizer", "nothing"),
        ("mixup", "{'mixup_alpha': 0.8}"),
    ]
    idle = ["data.shift=1", "data.augment.hflip=0.1", "data.text.label=kind"]
    assert notes(load_recipe("text_roberta", idle)) == [
        "data.shift has no effect with masked_lm",
        "data.augment has no effect with masked_lm",
        "data.text.label has no effect with masked_lm",
    ]
    assert notes(load_recipe("digits", ["data.text.label=kind"])) == ["data.text has no effect with digits"]


def test_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = load_recipe("text_bert", ["data.root=rows.csv", "data.text.tokenizer=t.json"]).data
    assert (data.root, data.text.tokenizer) == (str(tmp_path / "rows.csv"), str(tmp_path / "t.json"))
