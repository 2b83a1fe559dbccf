"""Checksums of the files of a folder: whether a state is what was written, for `sha256sum --check checksums.sha256` too."""

import hashlib
from pathlib import Path

from revzoo.file import sync

CHECKSUMS = "checksums.sha256"


def seal(folder: Path) -> None:
    """Write the checksums of all files of a folder, give them the user's permissions, and wait until all is on the disk."""
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS)
    checksums = folder / CHECKSUMS
    checksums.write_text("".join(f"{_hash(path)}  {path.name}\n" for path in files), encoding="utf-8")
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
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    names = {path.name for path in folder.iterdir()}
    unlisted = {name for name in names if name.endswith((".distcp", ".json", ".metadata"))} - digests.keys()  # and read
    if wrong := sorted(unlisted or digests.keys() - names):
        return f"{wrong[0][:80]} is {'not in ' + CHECKSUMS if unlisted else 'missing'}"
    changed = next((name for name, digest in digests.items() if _hash(folder / name) != digest), None)
    return "" if changed is None else f"{changed} has changed since it was written: its checksum differs"


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
