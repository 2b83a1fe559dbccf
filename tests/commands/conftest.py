"""Commands run in this process, on small models whose specs are files."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from timm.optim import create_optimizer_v2

import revzoo
import zoo_cli
from revzoo.planning.profiling.profile import Profile, profile

SHORT = {
    "rev_vit_digits": ["stages.0.depth=2"],
    "revnet_digits": ["stages.0.depth=1", "stages.1.depth=1", "stages.2.depth=1"],
    "rev_roberta_mini": ["stages.0.depth=1"],
}
BATCH = 4


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, which must succeed, and returns what it prints."""

    def run(*arguments: object) -> str:
        assert zoo_cli.main([str(argument) for argument in arguments]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, which must be refused with status 2, and returns the message."""

    def run(*arguments: object) -> str:
        assert zoo_cli.main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("revzoo: ")
        assert "Traceback" not in err
        return err.removeprefix("revzoo: ")

    return run


@pytest.fixture
def short() -> Callable[..., revzoo.Model]:
    """Return a function that creates a model of few blocks."""
    return lambda name, device="meta": revzoo.create(name, overrides=SHORT[name], device=device)


@pytest.fixture
def file(tmp_path: Path, short) -> Callable[[str], str]:
    """Return a function that writes the spec of a model of few blocks and returns its path."""

    def write(name: str) -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(short(name).spec.to_yaml())
        return str(path)

    return write


@cache
def count_profile(name: str) -> Profile:
    """Return the profile of a model of few blocks that is trained with AdamW: bytes and FLOPs, no times."""
    model = revzoo.create(name, overrides=SHORT[name], device="meta")
    return profile(model, model.example_input(BATCH), create_optimizer_v2(model, "adamw"))


@pytest.fixture
def profile_of() -> Callable[[str], Profile]:
    """Return the function that returns the profile of a model of few blocks, made once in a run."""
    return count_profile
