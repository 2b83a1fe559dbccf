"""A comparison of three methods on small nets, made once."""

import pytest
from revzoo.bench import report as module
from revzoo.bench.checks import CHECKS
from revzoo.bench.method import METHODS, Method
from revzoo.bench.net import SMALL_NETS
from revzoo.bench.report import Size

BY_NAME = {method.name: method for method in METHODS}
ROWS = ("gradients in float64", "BatchNorm: statistics updated once")


@pytest.fixture(scope="session")
def report():
    missing = Method("missing", BY_NAME["RevTorch"].make, package="no-such-package")
    compiled = BY_NAME["torch.compile, budget 0.5"]
    size = Size({"transformer": (1, 2), "conv": (1, 2)}, {"transformer": 1, "conv": 1}, rounds=1, full=False)
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NETS", SMALL_NETS)
        methods = (BY_NAME["plain autograd"], compiled, BY_NAME["checkpoint per block"], BY_NAME["revzoo invert"], missing)
        patch.setattr(module, "METHODS", methods)
        patch.setattr(module, "CHECKS", tuple(check for check in CHECKS if check.name in ROWS))
        result = module.compare_methods(size, announce=said.append)
    assert said[0] == "memory and FLOPs of the transformer net, plain autograd"
    assert len(said) == 2 * 3 + 2 + 1 + 2
    return result
