"""What a coupling refuses."""

import re

import pytest

from revzoo.errors import InputError
from revzoo.runtime import Coupling


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ((float("nan"), 1, 1), "finite numbers. Received: (nan, 1, 1)"),
        ((0, "1", 1), "finite numbers. Received: (0, '1', 1)"),
        ((0, 1, float("inf")), "finite numbers"),
        ((1, 0.3, 1, 2), "kept for |b| = 2^-kept_bits"),
        ((0, 1, 0), "c = 0 leaves f out"),
    ],
)
def test_coefficients_that_make_no_coupling(coefficients, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Coupling(*coefficients)
