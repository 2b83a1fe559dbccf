"""Seal a folder of files: afterwards it is on the disk, and a later look tells whether it is as it was.

The checksums are in the format of `sha256sum`, so that `sha256sum --check checksums.sha256` repeats the look.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from revzoo.file import sync

CHECKSUMS = "checksums.sha256"


def seal(folder: Path, known: Mapping[str, str]) -> None:
    """Write the checksums of all files of a folder, give them the user's permissions, and wait until all is on the disk.

    Args:
        folder: the folder, which holds files only.
        known: checksums that are known already, by name of the file.
    """
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS)
    checksums = folder / CHECKSUMS
    lines = (f"{known.get(path.name) or hash_file(path)}  {path.name}\n" for path in files)
    checksums.write_text("".join(lines), encoding="utf-8")
    mode = checksums.stat().st_mode  # that of any new file; some libraries write files that only their owner can read
    for path in (*files, checksums):
        path.chmod(mode)
        sync(path)
    sync(folder)


def find_damage(folder: Path) -> str:
    """Return in words what is not as it was when the folder was sealed, or an empty string."""
    try:
        lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return f"{CHECKSUMS} is missing or damaged"
    for line in lines:
        digest, _, name = line.partition("  ")
        if Path(name).name != name:
            return f"{CHECKSUMS} is damaged"
        if not (folder / name).is_file():
            return f"{name} is missing"
        if hash_file(folder / name) != digest:
            return f"{name} has changed since it was written: its checksum differs"
    return "" if lines else f"{CHECKSUMS} is empty"


def hash_file(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
