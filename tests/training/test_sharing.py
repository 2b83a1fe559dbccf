"""Processes share every batch: what is in it and how it is mixed does not depend on them, nor does who may go on with a run."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from timm.data import Mixup

from revzoo.data.base import EpochSampler
from revzoo.data.random import derive_seed
from revzoo.errors import InputError
from revzoo.training import epochs
from revzoo.training.checksums import CHECKSUMS, seal
from revzoo.training.loop import resume, train
from revzoo.training.loss import SharedMixup
from revzoo.training.run_folder import RunFolder
from revzoo.training.setup import share_batch
from tests.training.runs import RANDOM, assert_same_run, killed, make_recipe

WHOLE = 24
KEY = 2


def list_shares(processes: int, batch: int = WHOLE, skip: int = 0) -> list[list[int]]:
    """Return the indices of each process in each batch."""
    sampler = EpochSampler(100, 3, batch // processes, processes)
    sampler.epoch, sampler.skip = 5, skip
    indices, size = list(sampler), batch // processes
    return [indices[i : i + size] for i in range(0, len(indices), size)]


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_batches_have_the_same_examples(processes):
    [alone, shares] = list_shares(1), list_shares(processes)
    assert len(alone) == 4  # of 100 examples, 4 are left out
    for number, batch in enumerate(alone):
        parts = shares[number * processes : (number + 1) * processes]
        assert sorted(chain(*parts)) == sorted(batch)
        if processes < 8:  # an even share each, in which mixup finds its pairs
            pairs = {frozenset(pair) for part in parts for pair in zip(part, part[::-1], strict=True)}
            assert pairs == set(map(frozenset, zip(batch, batch[::-1], strict=True)))
    assert list_shares(processes, skip=2 * WHOLE) == shares[2 * processes :]


def test_an_odd_share():
    assert sorted(chain(*list_shares(5, batch=25))) == sorted(chain(*list_shares(1, batch=25)))


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_a_shared_batch_is_mixed_as_a_whole(mode, alphas):
    """Each process mixes its share; together that is the batch which one process mixes."""
    images, labels = torch.rand(WHOLE, 3, 8, 8), torch.arange(WHOLE)
    options = {"mixup_alpha": alphas[0], "cutmix_alpha": alphas[1], "mode": mode, "num_classes": WHOLE}
    whole = SharedMixup(Mixup(**options), 0)(images.clone(), labels, KEY)
    assert (whole[0] != images).flatten(1).any(1).sum() > WHOLE / 2
    torch.testing.assert_close(whole[1].sum(1), torch.ones(WHOLE))
    for processes in (2, 4):
        places = EpochSampler(WHOLE, 0, WHOLE // processes, processes)._places.view(processes, -1)
        for process, share in enumerate(places):
            mixed = SharedMixup(Mixup(**options), process)(images[share], labels[share], KEY)
            assert all(map(torch.equal, mixed, (part[share] for part in whole)))


def test_one_process_mixes_as_timm_does():
    images, labels = torch.rand(WHOLE, 3, 8, 8), torch.arange(WHOLE)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=WHOLE)
    np.random.seed(derive_seed(7, 1) % 2**32)
    expected = mixup(images.clone(), labels)
    assert all(map(torch.equal, SharedMixup(mixup, 0)(images.clone(), labels, 7, 1), expected))


def test_pairs_of_a_mode_share_their_strength():
    images, labels = torch.rand(WHOLE, 3, 8, 8), torch.arange(WHOLE)
    strengths = {}
    for mode in ("pair", "elem"):
        mixup = Mixup(mixup_alpha=0.8, mode=mode, num_classes=WHOLE, label_smoothing=0.0)
        mixed, targets = SharedMixup(mixup, 0)(images.clone(), labels, 7)
        own = targets.diagonal()
        torch.testing.assert_close(mixed, own[:, None, None, None] * images + (1 - own)[:, None, None, None] * images.flip(0))
        strengths[mode] = own
    assert torch.equal(strengths["pair"], strengths["pair"].flip(0))
    assert len(strengths["elem"].unique()) == WHOLE


def pretend_two_processes(run: Path) -> None:
    """Let a run of one process with batches of 320 be one of two processes with 160 each."""
    config = OmegaConf.load(run / "config.yaml")
    config.data.batch_size = 160
    OmegaConf.save(config, run / "config.yaml")
    for state in RunFolder(run).list_states():
        for name in ("origin.json", "progress.json"):
            content = json.loads((state / name).read_text())
            if name == "origin.json":
                content["recipe"]["data"]["batch_size"] = 160
            else:
                content["processes"] = 2
            (state / name).write_text(json.dumps(content))
        (state / CHECKSUMS).unlink()
        seal(state)


def test_one_process_goes_on_with_a_run_of_two(tmp_path, whole, capsys):
    with killed(epochs, "save_state", 2):
        train(make_recipe(*RANDOM), tmp_path / "run")
    pretend_two_processes(tmp_path / "run")
    resume(tmp_path / "run")
    assert "Processes: 2 before, 1 now, which share the same batches." in capsys.readouterr().out
    assert_same_run(whole, tmp_path / "run")
    resume(tmp_path / "run")  # now by as many as before
    assert "Processes" not in capsys.readouterr().out


def test_a_batch_that_cannot_be_shared():
    assert share_batch(24, 3, make_recipe()) == 8
    with pytest.raises(
        InputError, match=r"has 24 examples, .*5 processes cannot share it equally. .*with 1, 2, 3, 4, 6, 8, 12, 24 "
    ):
        share_batch(24, 5, make_recipe())
    assert share_batch(24, 8, make_recipe()) == 3
    with pytest.raises(InputError, match=r"has 24 examples, 12 pairs for mixup, .*Resume it with 1, 2, 3, 4, 6, 12 processes"):
        share_batch(24, 8, make_recipe("mixup={mixup_alpha: 0.8}"))


def test_a_restarted_job_goes_on_in_its_folder(tmp_path, monkeypatch, whole):
    """The command is the same; another recipe, and a first start, are refused."""
    out = tmp_path / "mine"
    with killed(epochs, "save_state", 2):
        train(make_recipe(*RANDOM), out)
    with pytest.raises(InputError, match="is not empty. Resume that run"):
        train(make_recipe(*RANDOM), out)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(InputError, match="is not empty. Resume that run"):
        train(make_recipe(*RANDOM, "train.seed=1"), out)
    assert train(make_recipe(*RANDOM), out).folder == out
    assert_same_run(whole, out)


def test_a_job_that_may_be_restarted_names_its_folder(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(InputError, match="add --out DIR"):
        train(make_recipe())
