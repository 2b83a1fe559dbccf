"""README and docs: what they show runs, what they promise is held, what they must not say is not said."""

import contextlib
import importlib
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM

import revzoo
import zoo_cli
from revzoo import registry
from revzoo.commands.parser import Parser

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = [*DOCUMENTS, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))]
# Run by .ci/run, tests/distributed and tests/house/test_benchmarks.py.
NOT_RUN = (
    *("python -m pip install", "python -m pytest", "python benchmarks/", "accelerate launch", "ACCELERATE_USE_CPU=true "),
    "torchrun ",
)
# They train and plan, as tests of these packages do with less.
LONG = {
    *("README.md", "convert.md", "distributed.md", "fits.md", "gpt.md", "planning.md", "start.md", "sweeps.md"),
    "training.md",
}
# Typed in tests/walks, where somebody looks at what is printed: the README's commands, and these sections.
WALKED = {
    "language.md": ("With TRL and LoRA",),  # run by tests/in_place/test_trainers.py
    "start.md": ("Look around",),
    "training.md": ("Your own images", "Use what was trained", "Watch, and stop early", "Texts"),
}
NEEDED = {"sweeps.md": "optuna"}  # what a page shows that is not among the extras
SHORT = ("train.epochs=1", "data.batch_size=256", "schedule.warmup_epochs=0", "model.overrides=[stages.0.depth=1]")


def slow_if_long(document: Path):
    return pytest.param(document, marks=pytest.mark.slow if document.name in LONG else ())


class Fence(NamedTuple):
    """One fenced block of a document."""

    language: str
    body: str


def fences(path: Path, but: tuple[str, ...] = ()) -> list[Fence]:
    """Return the blocks of a document, without those in some sections."""
    sections = re.split(r"^(?=## )", path.read_text(), flags=re.M)
    assert {section[3:].partition("\n")[0] for section in sections} >= set(but)
    kept = "".join(section for section in sections if not section.startswith(tuple(f"## {heading}\n" for heading in but)))
    return [Fence(*match) for match in re.findall(r"^```(\w*)\n(.*?)^```$", kept, flags=re.M | re.S)]


def commands(body: str) -> list[str]:
    """Return the commands of a shell block, comments taken off."""
    lines = body.replace("\\\n", " ").splitlines()
    return [c.strip() for line in lines for c in line.split("  #")[0].split("&&") if c.strip()]


@pytest.fixture
def own_registries(monkeypatch):
    importlib.import_module("revzoo.model.builder")  # fills the registries, so that what is put back is whole
    for table in vars(registry).values():
        if isinstance(table, registry.Registry):
            monkeypatch.setattr(table, "_entries", dict(table._entries))


@pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")  # peft and Transformers, of each other
@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # peft, of a network that has no name
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")  # Trainer, where there is no accelerator
@pytest.mark.parametrize("document", list(map(slow_if_long, DOCUMENTS)), ids=lambda path: path.name)
def test_everything_shown_runs(document, tmp_path, monkeypatch, own_registries):
    """Blocks run in order and share names; YAML and modules are written under the name in their first line; text is output."""
    if document.name in NEEDED:
        pytest.importorskip(NEEDED[document.name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REVZOO", str(ROOT))
    write_photos()
    if document.name == "index.md":  # shows a network of the hub
        tiny = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_attention_heads=1)
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: LlamaForCausalLM(tiny))
    names, output = {"__name__": "__main__"}, ""
    for language, body in fences(document, WALKED.get(document.name, ())):
        if language == "yaml":
            Path(re.match(r"# (\S+\.yaml)\n", body)[1]).write_text(body)
        elif language == "python" and (module := re.match(r"# (\w+\.py)\b", body)):
            Path(module[1]).write_text(body)
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(body, document.name, "exec"), names)
            output = printed.getvalue()
        elif language == "bash":
            for command in commands(body) if document.name not in ("README.md", "index.md") else ():
                run(command)
        else:
            assert (language, body) == ("text", output)


def write_photos() -> None:
    """Write what a reader brings along: photographs in one folder per class, 256 of them for training, and one more."""
    for i in range(160):
        for label in ("cat", "dog"):
            file = Path("photos", label, f"{i}.jpg")
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((12, 8), 10 + i).save(file)
    Image.effect_noise((12, 8), 50).save("photo.jpg")


def run(command: str) -> None:
    if command.startswith(NOT_RUN):
        return
    if command.startswith("revzoo plan timm:resnet50") and "1GiB" not in command:  # the tightest budget is enough
        command = command.replace("resnet50", "resnet10t")
    if command.startswith(("revzoo plan rev_vit_digits", "revzoo profile rev_vit_digits")):
        command += " stages.0.depth=1"
    program, *arguments = shlex.split(re.sub(r"^MALLOC_MMAP_THRESHOLD_=\d+ ", "", command))  # for a process that starts anew
    assert program == "revzoo", f"nobody runs {command!r}"
    if arguments[0] == "train" and "--resume" not in arguments:
        own = any(argument.startswith(("model.overrides=", "model=")) for argument in arguments)  # weights fit as they are
        arguments += SHORT[:-1] if own else SHORT
    assert zoo_cli.main(arguments) == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_shown_is_understood(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = [c for language, body in fences(document) if language == "bash" for c in commands(body) if c.startswith("revzoo ")]
    for _, name, *arguments in map(shlex.split, shown):
        parser = Parser(prog=name)
        zoo_cli.load_command(name).declare(parser)
        parser.parse(arguments)


@pytest.mark.parametrize("document", TEXTS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(document):
    text = document.read_text()
    links = [link for link in re.findall(r"(?<!\w)\[[^]]+\]\(([^)]+)\)", text) if not link.startswith("http")]
    paths = re.findall(r"`((?:tests|specs|docs|benchmarks|revzoo|weights)/[\w/.]+)`", text)
    assert [link for link in links if not leads_somewhere(document, link)] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


def leads_somewhere(document: Path, link: str) -> bool:
    """Return whether there is such a file, with such a heading if the link names one."""
    name, _, heading = link.partition("#")
    file = document.parent / name if name else document
    if not file.exists() or not heading:
        return file.exists()
    return heading in {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in file.read_text().split("\n")
    }


def test_messages_that_are_explained_are_those_of_the_code():
    parts = re.compile(r'" *\n\s*f?"|\{[^{}]*\}')  # a message goes on in the next line, and holds values
    code = "".join(parts.sub("", path.read_text()) for path in sorted((ROOT / "revzoo").rglob("*.py")))
    messages = re.findall(r'^### "(.*)"$', (ROOT / "docs/troubleshooting.md").read_text(), flags=re.M)
    assert len(messages) >= 12
    assert [words for message in messages for words in message.split("...") if words.strip(" .") not in code] == []


def test_claims_nobody_can_keep_are_not_made():
    for claim in ("constant memory", "no overhead", "drop-in for any model", "same accuracy as the original"):
        assert [path.name for path in TEXTS if claim in " ".join(path.read_text().lower().split())] == []


def test_no_file_knows_the_machine_it_was_written_on():
    kinds = {".py", ".md", ".yaml", ".toml", ".json", ".jsonl", ""}
    files = [path for path in ROOT.rglob("*") if path.is_file() and path.suffix in kinds and not ignored(path)]
    assert len(files) > 80
    private = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt)/\w")
    assert [str(path) for path in files if private.search(path.read_text())] == []


def ignored(path: Path) -> bool:
    top = path.relative_to(ROOT).parts[0]
    return "__pycache__" in path.parts or top in {"runs", "dist", "build"} or (top.startswith(".") and top != ".ci")


def test_the_version_is_in_the_changelog():
    assert f"\n## [{revzoo.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
