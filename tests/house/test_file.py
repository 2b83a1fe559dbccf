"""A file is written completely or not at all, and is on the disk when it gets its name. Texts are in UTF-8 everywhere."""

import ast
import errno
import os
from pathlib import Path

import pytest

from revzoo.file import write_atomically

ROOT = Path(__file__).parents[2]


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


def test_an_error_of_the_disk_names_the_file(tmp_path):
    def write(partial):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(tmp_path / "file.txt", write)
    assert caught.value.filename == f"{tmp_path}/file.txt"


def test_the_content_is_on_the_disk_before_the_rename_and_the_name_after_it(tmp_path, monkeypatch):
    path, synced, fsync = tmp_path / "file.txt", [], os.fsync

    def record(descriptor):
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_atomically(path, lambda partial: partial.write_text("new"))
    folder = tmp_path.stat()
    assert synced == [(path.stat().st_ino, 3, False), (folder.st_ino, folder.st_size, True)]


def test_no_text_has_the_encoding_of_the_system():
    """A run goes on, and its folder is read, on a system with another one."""
    found, number = list[str](), 0
    for file in (ROOT / "zoo_cli.py", *(ROOT / "website").glob("*.py"), *(ROOT / "revzoo").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        texts = {node for node in nodes if isinstance(node, ast.Attribute) and node.attr in ("read_text", "write_text")}
        texts |= {
            call.func for call in calls if call.args and ast.unparse(call.args[0]) in ("'r'", "'w'", "'a'", "'x'", "'a+'")
        }
        number += len(texts)
        chosen = {call.func for call in calls if any(keyword.arg == "encoding" for keyword in call.keywords)}
        found += [f"{file}:{node.lineno}" for node in texts - chosen]
    assert number > 20
    assert found == []
