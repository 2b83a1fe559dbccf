"""The matrix: what is right passes all rows, and what is wrong fails those that it should."""

from dataclasses import replace
from itertools import product

import pytest
from revzoo.bench.checks import CHECKS
from revzoo.bench.ddp import SETTINGS, check_ddp
from revzoo.bench.method import METHODS
from revzoo.bench.net import SMALL_NETS
from revzoo.bench.torch_only import Loop
from torch.utils.checkpoint import checkpoint

BY_NAME = {method.name: method for method in METHODS}
TRANSFORMER, CONV = SMALL_NETS
QUICK = [check for check in CHECKS if not check.is_slow]


class Careless(Loop):
    """Reentrant checkpointing of every block that forgets the state of the random generator."""

    def forward(self, x1, x2):
        for i in range(0, len(self.steps), 2):
            x1, x2 = checkpoint(self.run, i, i + 2, x1, x2, use_reentrant=True, preserve_rng_state=False)
        return x1, x2


class Halves(Loop):
    """Half of every gradient, and a state that grows."""

    def forward(self, x1, x2):
        x1, x2 = super().forward(x1, x2)
        self.kept = (*getattr(self, "kept", ()), x1.detach())
        return tuple((x + x.detach()) / 2 for x in (x1, x2))


def failures(make, net, checks=QUICK):
    method = replace(BY_NAME["plain autograd"], name="mine", make=make)
    return {check.name for check in checks if check.run(method, net)}


def test_there_are_thirty_five():
    assert len(QUICK) == 30
    assert len(CHECKS) + len(SETTINGS) == 35
    assert len({check.name for check in CHECKS} | SETTINGS.keys()) == 35


@pytest.mark.parametrize("net", [CONV, pytest.param(TRANSFORMER, marks=pytest.mark.slow)], ids=lambda net: net.name)
def test_plain_autograd_passes(net):
    assert failures(BY_NAME["plain autograd"].make, net) == set()


def test_inverting_passes():
    assert {check.name for check in QUICK if check.run(BY_NAME["revzoo invert"], CONV)} == set()


def test_careless_checkpointing_fails_where_it_should():
    assert failures(lambda steps, net: Careless(steps), CONV) == {
        "dropout: gradients with the same seed",
        "dropout: gradient of its own forward",
        "dropout: random generator left where plain autograd leaves it",
        "the same with dropout",
        "BatchNorm: statistics updated once",
        "torch.autograd.grad of the parameters",
        "inputs that require no gradient",
        "double backward with create_graph",
    }


def test_wrong_gradients_are_seen_wherever_there_are_some():
    right = {
        *("dropout: random generator left where plain autograd leaves it", "BatchNorm: statistics updated once"),
        *("hooks on parameters fire once", "hooks on F and G fire", "no_grad in training and eval mode"),
        *("state_dict: one key for a tensor", "input left after forward, outputs after backward"),
    }
    wrong = {check.name for check in QUICK} - right
    assert failures(lambda steps, net: Halves(steps), CONV) == wrong


def test_an_error_is_a_failure_with_its_message():
    def refuse(steps, net):
        raise TypeError("not\n  these")

    method = replace(BY_NAME["plain autograd"], make=refuse)
    assert QUICK[0].run(replace(method, name="mine"), CONV) == "TypeError: not these"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "net"),
    [*product(("invert", "exact", "planned"), SMALL_NETS), ("store", CONV), ("selective", TRANSFORMER), ("recompute", CONV)],
    ids=lambda value: getattr(value, "name", value),
)
def test_revzoo_passes_everything_in_one_process(mode, net):
    assert {check.name: problem for check in CHECKS if (problem := check.run(BY_NAME[f"revzoo {mode}"], net))} == {}


@pytest.mark.slow
def test_ddp():
    methods = [BY_NAME["plain autograd"], BY_NAME["revzoo invert"], BY_NAME["revzoo exact"]]
    verdicts = check_ddp(methods)
    fine = {method.name: {"transformer": "", "conv": ""} for method in methods}
    assert verdicts == dict.fromkeys(SETTINGS, fine)
