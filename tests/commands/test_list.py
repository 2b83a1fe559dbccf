"""`revzoo list`: names, what the models are, and what was measured."""

import revzoo


def test_a_pipe_gets_the_names_that_match_a_pattern_or_begin_alike(run):
    assert run("list", "revnet_1*_cifar100").split() == ["revnet_110_cifar100", "revnet_164_cifar100"]
    assert run("list", "reformer_enw").split() == ["reformer_enwik8", "reformer_enwik8_6", "reformer_enwik8_full"]
    assert run("list", "reformer_enwik8") == "reformer_enwik8\n"


def test_a_terminal_gets_a_line_for_each_model_by_family(run, monkeypatch, tmp_path):
    (tmp_path / "my_vit.yaml").write_text("# Mine.\nbase: rev_vit_digits")
    monkeypatch.setenv("REVZOO_SPECS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = [line.split() for line in run("list").splitlines()]
    rows = [words for words in lines if words and words[0].strip("*") in revzoo.list_models()]
    assert len(rows) == 78
    assert rows[0] == ["irevnet_digits*", "8", "x", "8", "83.6", "k", "Injective", "i-RevNet", "for", "digits"]
    assert rows[-1] == ["my_vit", "-", "-", "Mine"]
    assert min(map(len, rows[:-1])) > 5  # each has words
    assert len(lines) - len(rows) == 17  # none takes two lines: headings, families and the caption are the rest


def test_long_lists_what_was_measured_and_dashes_for_own_models(run, monkeypatch, tmp_path):
    (tmp_path / "rev_vit_own.yaml").write_text("base: rev_vit_digits")
    monkeypatch.setenv("REVZOO_SPECS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("list", "rev_vit_[dow]*", "--long").splitlines()
    rows = [words for line in lines if (words := line.replace("│", " ").split()) and words[0].startswith("rev_vit_")]
    assert rows == [
        ["rev_vit_digits", "302,794", "4.92", "MMACs", "12.8", "MiB", "2.1", "MiB", "98.87", "%"],
        ["rev_vit_own", *"-----"],
    ]
    assert max(map(len, lines)) <= 80


def test_recipes_and_what_they_do(run, refused):
    assert run("list", "--recipes", "digits_irev*") == "digits_irevnet\n"
    printed = run("list", "--recipes", "--long", "*i*t")
    sentences = " ".join(printed.split())
    assert "digits_irevnet A small injective i-RevNet on scikit-learn's 8x8 digits. " in sentences
    assert "revnet_imagenet RevNet on ImageNet with the numbers of Gomez et al. 2017 (renmengye/revnet-public, " in sentences
    assert refused("list", "--recipes", "digts").startswith("Unknown recipe 'digts'. Did you mean 'digits'? ")
