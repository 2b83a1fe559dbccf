"""The notebooks in examples/ run, and show what they print."""

import json
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
NEEDED = {"llama_with_trl_and_lora": "trl"}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Jupyter
@pytest.mark.parametrize("notebook", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(notebook, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip(NEEDED.get(notebook.stem, "revzoo"))
    client = nbclient.NotebookClient(
        nbformat.read(notebook, as_version=4), timeout=300, resources={"metadata": {"path": tmp_path}}
    )
    client.execute()


def test_every_cell_shows_what_it_does():
    assert len(EXAMPLES) == 5
    for notebook in EXAMPLES:
        cells = json.loads(notebook.read_text())["cells"]
        assert sum(bool(cell["outputs"]) for cell in cells if cell["cell_type"] == "code") >= 3
        assert "Traceback" not in notebook.read_text()
