"""Conversions by hand: build the spec, apply the mappings, compare the networks."""

from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file

import revzoo
from revzoo.conversion.choice import CouplingChoice

GOLDEN = Path(__file__).parent / "golden"
FAITHFUL = CouplingChoice("momentum", kept_bits=None, b=0.0)  # b = 0 is the original's function


class Converter:
    """Converts networks of one source with the source's methods alone, without `revzoo.convert`."""

    def __init__(self, source, folder):
        self.source, self.folder = source, folder

    def build(self, description, choice=FAITHFUL):
        file = self.folder / "converted.yaml"
        file.write_text(yaml.safe_dump({"name": "converted", **self.source.make_spec(description, choice)}))
        return revzoo.build(revzoo.load_spec(file)).eval()

    def convert(self, description, theirs, choice=FAITHFUL):
        """Return the converted network in eval mode; assert that every tensor has its place, and only one."""
        model, ours, used = self.build(description, choice), {}, []
        for mapping in self.source.map_tensors(description):
            values = mapping.to_ours([theirs[key] for key in mapping.theirs])
            assert not ours.keys() & set(mapping.ours)
            ours |= dict(zip(mapping.ours, values, strict=True))
            used += mapping.theirs
        assert len(used) == len({*used})
        assert all(map(self.source.ignores, theirs.keys() - {*used}))
        left = model.load_state_dict(ours, strict=False)
        assert left.unexpected_keys == []
        state = model.state_dict()
        loaded = {state[key].data_ptr() for key in ours}
        assert loaded >= {state[key].data_ptr() for key in left.missing_keys}  # tied to another one
        model.schedule = "store"
        return model

    def check_way_back(self, description, model, theirs, unused=()):
        """Assert that the converted network gives the keys and bits that it was made of."""
        ours, back = model.state_dict(), {}
        for mapping in self.source.map_tensors(description):
            made = mapping.to_theirs([ours[key] for key in mapping.ours])
            back |= zip(mapping.theirs, made, strict=bool(mapping.ours))
        assert all(key in unused or self.source.ignores(key) for key in theirs.keys() - back.keys())
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in back.items())

    def check_keys(self, description, name):
        """Assert that the mappings are those of the golden list."""
        rows = [f"{' + '.join(e.theirs)} -> {' + '.join(e.ours)} ({e.transform})" for e in self.source.map_tensors(description)]
        assert rows == (GOLDEN / f"{name}.txt").read_text().splitlines()


def measure_distance(outputs, expected):
    """Return the largest difference, relative to the largest value of what is expected."""
    assert outputs.shape == expected.shape
    return float((outputs - expected).abs().max() / expected.abs().max())


def check_export(folder, expected):
    """Assert that the way back gives a file with these tensors, bit for bit."""
    file = folder.parent / "back.safetensors"
    assert revzoo.export(folder, file) == len(expected)
    back = load_file(file)
    assert back.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in back.items())


@pytest.fixture
def make_converter(tmp_path):
    """Return a function that makes the converter of a source."""
    return lambda source: Converter(source, tmp_path)


@pytest.fixture
def randomise():
    """Return a function that sets all tensors of an original at random, norms and their statistics included."""

    def set_values(original, scale=0.2, seed=0):
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

    return set_values


@pytest.fixture
def rebuilds_exactly():
    """Return a check that inverting gives, bit for bit, the gradients of storing, random masks included."""

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


@pytest.fixture
def file(tmp_path):
    """Weights of timm's `test_vit`, whose name stands for any."""
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=5).state_dict(), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"
