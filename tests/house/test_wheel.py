"""What is built from the checkout works without it."""

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPECS = {path.stem for path in (ROOT / "specs/models").glob("*/*.yaml")}
RECIPES = {path.stem for path in (ROOT / "specs/recipes").glob("*.yaml")}

CREATE_EVERYTHING = """
import json, revzoo, zoo_cli
from pathlib import Path
from revzoo.checkpoint import index
from revzoo.spec import data_root, list_recipes
models = revzoo.list_models()
for name in models:
    assert all(p.is_meta for p in revzoo.create(name, device="meta").parameters())
for name in index.read_index():
    revzoo.create(name, pretrained=True)
homes = [str(Path(place).resolve()) for place in (revzoo.__file__, zoo_cli.__file__, data_root())]
print(json.dumps({"models": models, "recipes": list_recipes(), "weights": sorted(index.read_index()), "homes": homes}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("dist"))


def build(target: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (file,) = folder.iterdir()
    return file


@pytest.mark.slow
def test_wheel_creates_every_model_from_an_empty_directory(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # PYTHONPATH comes before everything that is installed, so neither the checkout nor an installed revzoo is seen.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CREATE_EVERYTHING],
        cwd=empty,
        env={"PYTHONPATH": str(site), "PATH": "", "HOME": str(empty)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert set(made["models"]) == SPECS
    assert set(made["recipes"]) == RECIPES
    assert len(made["weights"]) == 7
    assert all(home.startswith(str(site.resolve())) for home in made["homes"])


def test_wheel_holds_what_it_should_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    tops = {name.split("/")[0] for name in names}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"revzoo", "zoo_cli.py", info}
    assert {f"{info}/licenses/LICENSE", "revzoo/py.typed", "revzoo/_data/weights/index.yaml"} <= set(names)
    packed = {Path(name).relative_to("revzoo/_data") for name in names if name.startswith("revzoo/_data/")}
    assert packed == {path.relative_to(ROOT) for folder in ("specs", "weights") for path in (ROOT / folder).rglob("*.*")} | {
        Path("docs/zoo.json")
    }
    assert len(packed) > 80
    assert not [name for name in names if "__pycache__" in name]
    assert "revzoo = zoo_cli:run" in entry_points


def test_page_on_pypi_has_no_links_to_files_beside_it(wheel):
    """`twine check` sees that it renders, and not where it leads."""
    with zipfile.ZipFile(wheel) as archive:
        (page,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    assert "Description-Content-Type: text/markdown" in page
    assert "\n# revzoo\n" in page
    assert not re.findall(r"\]\((?!https?:|#)", page)


@pytest.mark.slow
def test_source_distribution_builds_the_same_wheel(wheel, tmp_path):
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("revzoo-*")
    assert (source / "README.md").is_file()
    assert build("wheel", source, tmp_path / "wheel").read_bytes() == wheel.read_bytes()
