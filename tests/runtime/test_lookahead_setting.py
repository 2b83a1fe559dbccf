"""The option `lookahead`."""

import copy

import pytest
from torch import nn

import revzoo
from revzoo.errors import InputError
from revzoo.runtime import ReversibleChain


def test_the_setting_is_checked_copied_and_said():
    chain = ReversibleChain([nn.Linear(6, 6)])
    assert chain.lookahead == 0
    for wrong in (2, -1, True, "auto", None):
        with pytest.raises(InputError, match=f"lookahead is 0 or 1, .*Received: {wrong!r}"):
            chain.lookahead = wrong
    assert ReversibleChain([nn.Linear(6, 6)], lookahead=1).lookahead == 1
    assert revzoo.create("rev_vit_digits", lookahead=1, device="meta").lookahead == 1
    chain.lookahead = 1
    assert copy.deepcopy(chain).lookahead == 1
    assert list(chain.state_dict()) == ["steps.0.weight", "steps.0.bias"]
