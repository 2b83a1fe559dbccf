"""A file is written completely or not at all."""

import pytest

from revzoo.file import write_atomically


def test_a_file_is_there_when_it_is_complete(tmp_path):
    path = tmp_path / "file.txt"

    def write(partial):
        partial.write_text("new")
        assert not path.exists()

    write_atomically(path, write)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write(partial):
        partial.write_text("half")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_reason_of_a_failure_is_not_hidden_by_cleaning_up(tmp_path):
    def write(partial):
        partial.unlink()
        partial.mkdir()  # which cannot be unlinked
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        write_atomically(tmp_path / "file.txt", write)
