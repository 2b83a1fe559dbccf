"""Tokenizers: bytes, files, training one, and the ones that do not fit a model."""

import json
from dataclasses import replace

import pytest

from revzoo.data.corpus import read_standard_texts
from revzoo.data.loading import load_data
from revzoo.data.tokenizer import train_tokenizer
from revzoo.errors import InputError
from revzoo.spec.schema import TextInput

SUBWORDS = TextInput("text", 48, 280, 1)


def test_byte_ids(tables, tokenizer, options):
    roberta, bert = (load_data(options("masked_lm"), TextInput("text", 6, 260, padding), 0).test.dataset for padding in (1, 0))
    first = read_standard_texts(labelled=False)[1].texts[0].encode()[:4]
    assert roberta.ids[0].tolist() == [0, *(byte + 4 for byte in first), 2]
    assert bert.ids[0].tolist() == [1, *(byte + 4 for byte in first), 2]


@pytest.mark.parametrize(
    ("kind", "padding", "special"),
    [
        ("bytes", 1, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]),
        ("wordpiece", 0, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
    ],
)
def test_training_a_tokenizer(kind, padding, special, tables, tmp_path, options):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("the cat purrs\nthe dog barks\n" * 9)
    file = tmp_path / "t.json"
    size, pad = train_tokenizer([tmp_path / "a.txt", tables / "train.csv"], 290, file, kind)
    trained = tokenizers.Tokenizer.from_file(str(file))
    assert (size, pad) == (trained.get_vocab_size(), padding)
    assert 5 < size <= 290
    assert [trained.id_to_token(i) for i in range(5)] == special
    encoding = trained.encode("the cat purrs")
    assert trained.decode(encoding.ids) == "the cat purrs"
    assert (encoding.tokens[0], encoding.tokens[-1]) == (("<s>", "</s>") if kind == "bytes" else ("[CLS]", "[SEP]"))
    data = load_data(options("masked_lm", tables, file), TextInput("text", 8, size, padding), 0)
    assert data.train.dataset.ids[0].tolist()[0] == encoding.ids[0]
    assert max(map(len, data.train.dataset.ids)) == 8


def test_tokenizers_that_cannot_be_trained(tables, tmp_path):
    table, file = tables / "train.csv", tmp_path / "t.json"
    file.write_text("{}")
    for files, vocabulary, out, message in (
        ([table], 290, file, f"{file} exists already, and models trained with it need it. Name another file."),
        ([table], 290, tmp_path / "none" / "t.json", f"There is no folder {tmp_path}/none to write t.json into."),
        ([tmp_path, tmp_path / "no"], 290, tmp_path / "x.json", f"No such text files or tables: {tmp_path}, {tmp_path}/no."),
        ([table], 10, tmp_path / "x.json", "Received: 10 tokens. Use 261 or more."),
    ):
        with pytest.raises(InputError) as caught:
            train_tokenizer(files, vocabulary, out)
        assert message in str(caught.value)
    assert file.read_text() == "{}"
    assert not (tmp_path / "x.json").exists()


def test_tokenizers_that_do_not_fit(tables, tokenizer, tmp_path, options, refusal):
    def load(file=tokenizer, input=SUBWORDS):
        return refusal(options("masked_lm", tables, file), input)

    assert f"There is no tokenizer {tmp_path}/no.json. Make it with revzoo tokenizer" in load(tmp_path / "no.json")
    (tmp_path / "half.json").write_text('{"version":')
    assert f"{tmp_path}/half.json is not a tokenizer of Hugging Face's tokenizers (" in load(tmp_path / "half.json")
    assert load(input=TextInput("text", 48, 30, None)) == (
        f"The tokenizer ({tokenizer}) pads with id 1 and has 280 tokens. Received: a model that pads with None and has a "
        "vocabulary of 30. Use model.overrides=[input.padding=1,input.vocabulary=280]."
    )
    assert "puts 2 special ids around a text. Received: a model for 2 ids" in load(input=replace(SUBWORDS, length=2))
    assert "(bytes) pads with id 1 and has 260 tokens" in refusal(options("masked_lm"), TextInput("text", 48, 260, 7))
    tokenizers = pytest.importorskip("tokenizers")
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[PAD]": 1, "[UNK]": 2}, "[UNK]"))
    bare.save(str(tmp_path / "bare.json"))
    assert load(tmp_path / "bare.json") == (f"The tokenizer {tmp_path}/bare.json has no mask token: neither <mask> nor [MASK].")
    settings = json.loads((tmp_path / "bare.json").read_text())
    around = {"single": [{"SpecialToken": {"id": "?", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": []}
    settings["post_processor"] = {"type": "TemplateProcessing", **around, "special_tokens": {}}
    (tmp_path / "panic.json").write_text(json.dumps(settings))
    assert f"{tmp_path}/panic.json is not a tokenizer of Hugging Face's tokenizers (" in load(tmp_path / "panic.json")
    settings["post_processor"] = {"type": "BertProcessing", "sep": ["[UNK]", 2], "cls": ["[PAD]", 4_000_000_000]}
    (tmp_path / "far.json").write_text(json.dumps(settings))
    assert "has 4000000001 tokens" in load(tmp_path / "far.json")
    nothing = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    nothing.save(str(tmp_path / "nothing.json"))
    assert "has no padding token: neither <pad> nor [PAD]" in load(tmp_path / "nothing.json")
    nothing.enable_padding(pad_id=5000, pad_token="a")
    nothing.save(str(tmp_path / "far.json"))
    assert load(tmp_path / "far.json").endswith("Use model.overrides=[input.padding=5000,input.vocabulary=5001].")
    assert refusal(options("masked_lm", tables), SUBWORDS).startswith("Texts of your own need a tokenizer. ")
    assert refusal(options("masked_lm", tmp_path / "nowhere", tokenizer), SUBWORDS) == (
        f"There is no file or folder {tmp_path}/nowhere. Set data.root to where the texts are."
    )
