"""Conversions by hand: a spec is built, entries are applied, and the networks are compared."""

from pathlib import Path

import pytest
import torch
import yaml

import revzoo
from revzoo.conversion.choice import CouplingChoice

GOLDEN = Path(__file__).parent / "golden"
FAITHFUL = CouplingChoice("momentum", kept_bits=None, b=0.0)  # b = 0 is the original's function


class Trial:
    """A source of weights and what becomes of tiny originals."""

    def __init__(self, source, folder):
        self.source, self.folder = source, folder

    def build(self, original, choice=FAITHFUL, **options):
        file = self.folder / "spec.yaml"
        file.write_text(yaml.safe_dump({"name": "converted", **self.source.make_spec(original, choice)}))
        return revzoo.build(revzoo.load_spec(file), **options).eval()

    def convert(self, original, choice=FAITHFUL):
        """Return the converted network in eval mode; entries must name all of ours and of theirs, once each."""
        model, theirs = self.build(original, choice), original.state_dict()
        ours = {}
        entries = self.source.map_tensors(original)
        for entry in entries:
            changed = entry.to_ours([theirs[key] for key in entry.theirs])
            assert not ours.keys() & set(entry.ours)
            ours |= dict(zip(entry.ours, changed, strict=True))
        assert sorted(key for entry in entries for key in entry.theirs) == sorted(
            key for key in theirs if not self.source.ignores(key)
        )
        model.load_state_dict(ours, strict=True)
        model.schedule = "store"
        return model

    @torch.no_grad()
    def difference(self, original, x, choice=FAITHFUL):
        """Return the largest difference of the logits, relative to the largest of the original's."""
        model, expected = self.convert(original, choice), original.eval()(x)
        found = model(x)
        assert found.shape == expected.shape
        assert expected.abs().max() > 0.01
        return ((found - expected).abs().max() / expected.abs().max()).item()

    def check_round_trip(self, original):
        """Assert that what was converted, converted back, has the original's keys and bits."""
        ours, back = self.convert(original).state_dict(), {}
        for entry in self.source.map_tensors(original):
            back |= dict(zip(entry.theirs, entry.to_theirs([ours[key] for key in entry.ours]), strict=True))
        expected = {key: value for key, value in original.state_dict().items() if not self.source.ignores(key)}
        assert back.keys() == expected.keys()
        assert all(torch.equal(back[key], value) for key, value in expected.items())

    def keys(self, original):
        """Return where every tensor goes, a line each."""
        entries = self.source.map_tensors(original)
        return "".join(f"{' + '.join(e.theirs)} -> {' + '.join(e.ours)} ({e.transform})\n" for e in entries)

    def check_keys(self, original, name):
        """Assert that every tensor goes where the golden list says."""
        assert self.keys(original) == (GOLDEN / f"{name}.txt").read_text()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def trial(request, tmp_path):
    """Return what the test's module calls SOURCE, on trial."""
    return Trial(request.module.SOURCE, tmp_path)


@pytest.fixture
def randomised():
    """Return a function that gives an original random values everywhere, norms and their statistics included."""

    def randomise(original, scale=0.2, seed=0):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in original.state_dict().items():
                noise = torch.randn(value.shape, generator=generator) * scale
                leaf = name.rpartition(".")[2]
                if leaf == "num_batches_tracked":
                    value.fill_(7)
                elif leaf == "running_var":
                    value.copy_(1 + noise.abs())
                else:
                    value.copy_(noise + (1 if value.ndim == 1 and leaf in ("weight", "gamma") else 0))
        return original.eval()

    return randomise


@pytest.fixture
def rebuilds_exactly():
    """Return an assertion that inverting gives, bit for bit, the gradients of storing, random masks included."""

    def check(model, x):
        gradients = []
        for schedule in ("store", "invert"):
            torch.manual_seed(1)
            model.schedule = schedule
            model.zero_grad()
            model(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert gradients[0]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    return check
