"""`revzoo list`: names, and what was measured."""


def test_names_that_match_a_pattern(run):
    assert run("list", "revnet_1*_cifar100").split() == ["revnet_110_cifar100", "revnet_164_cifar100"]


def test_long_lists_what_was_measured_and_dashes_for_own_models(run, monkeypatch, tmp_path):
    (tmp_path / "rev_vit_own.yaml").write_text("base: rev_vit_digits")
    monkeypatch.setenv("REVZOO_SPECS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("list", "rev_vit_[dow]*", "--long").splitlines()
    rows = [words for line in lines if (words := line.replace("│", " ").split()) and words[0].startswith("rev_vit_")]
    assert rows == [
        ["rev_vit_digits", "302,794", "4.92", "MMAC", "12.8", "MiB", "2.1", "MiB", "98.87", "%"],
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
