"""A user in an empty folder, who types what the documentation says."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import zoo_cli

_BORDERS = re.compile("[│┃━─┌└]")


class User:
    """Types commands, and sees what they print in a terminal of 80 columns.

    Args:
        capsys: catches what is printed.
    """

    root = Path(__file__).parents[2]

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self._capsys = capsys

    def open(self, document: str) -> str:
        """Return a text of the documentation."""
        return (self.root / document).read_text()

    def read(self, document: str, command: str) -> list[str]:
        """Return the commands of the one block of a document that shows a command which begins like this one."""
        blocks = re.findall(r"^```bash\n(.*?)^```$", self.open(document), flags=re.M | re.S)
        lines = ([line.split("  #")[0].strip() for line in block.replace("\\\n", " ").splitlines()] for block in blocks)
        [found] = [block for block in lines if any(line.startswith(command) for line in block)]
        return found

    def type(self, command: str) -> str:
        """Run a command, which has to succeed; return what it prints."""
        program, *words = shlex.split(command)
        assert program == "revzoo", command
        self._capsys.readouterr()
        code = zoo_cli.main(words)
        out, err = self._capsys.readouterr()
        assert code == 0, f"{command}: {err}"
        assert "Traceback" not in err + out
        assert [line for line in out.splitlines() if _BORDERS.search(line) and len(line) > 80] == [], command
        return out


@pytest.fixture
def user(capsys, tmp_path, monkeypatch) -> User:
    """A user in an empty folder, with a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return User(capsys)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Forty photographs of two kinds, in one folder per class, and one more of the first kind; and others of three kinds."""
    rng = np.random.default_rng(0)
    for folder, names, count in (("photos", ("cat", "dog"), 20), ("leaves", ("ash", "elm", "oak"), 15)):
        for kind, name in enumerate(names):
            for i in range(count):
                file = tmp_path / folder / name / f"{i}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                draw_photo(rng, kind).save(file)
    draw_photo(rng, 0).save(tmp_path / "photo.jpg")
    return tmp_path / "photos"


def draw_photo(rng: np.random.Generator, kind: int) -> Image.Image:
    """Return a noisy picture: a bright disk in red, or stripes in blue or green, at a random place."""
    rows, columns = np.mgrid[:72, :96]
    row, column = rng.integers(20, 52), rng.integers(20, 76)
    disk, stripes = np.hypot(rows - row, columns - column) < 18, (rows + columns * (kind - 1) + column) % 16 < 8
    pixels = rng.integers(0, 90, (72, 96, 3))
    pixels[..., (0, 2, 1)[kind]] += 160 * (disk if kind == 0 else stripes)
    return Image.fromarray(pixels.astype(np.uint8))
