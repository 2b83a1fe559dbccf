"""The order of files and classes."""

from itertools import permutations

import pytest

from revzoo.data.image_folders import find_classes
from revzoo.data.image_labels import name_classes, natural_key


def test_numbers_count_and_case_does_not():
    names = ["Img10", "img2", "img²", "b", "", "10²", "9", "a3c10", "A3c2"]
    assert sorted(names, key=natural_key) == ["", "9", "10²", "A3c2", "a3c10", "b", "img2", "Img10", "img²"]


@pytest.mark.parametrize("names", [["a", "A", "b"], ["1", "01", "001"], ["Grün", "grün", "GRÜN"]])
def test_names_that_differ_in_case_or_zeros_alone_have_one_order(names):
    """That of timm's key is the folder's or the set's: that of sets of strings differs between processes."""
    orders = {tuple(sorted(order, key=natural_key)) for order in permutations(names)}
    assert len(orders) == 1


def test_classes_of_labels_and_of_folders_have_the_same_order(tmp_path):
    names = ["b", "a", "B", "A"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").touch()
    assert name_classes(names, "labels") == list(find_classes(tmp_path).files) == ["A", "a", "B", "b"]
