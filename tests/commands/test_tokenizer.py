import pytest

pytest.importorskip("tokenizers")


def test_the_settings_to_use_are_printed(tables, tmp_path, run, refused):
    file = tmp_path / "my t.json"
    arguments = ("tokenizer", tables / "train.csv", "--vocabulary=270", "--out", file)
    assert run(*arguments) == (
        f"{file}: 270 tokens. Use it with 'data.text.tokenizer={file}' model.overrides=[input.vocabulary=270,input.padding=1]\n"
    )
    assert refused(*arguments).startswith(f"{file} exists already, and models trained with it need it.")
    assert "input.padding=0]" in run(*arguments[:-1], tmp_path / "w.json", "--kind=wordpiece")
