"""What the runtime imports, and when, in a process of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch
alone = set(sys.modules)
import revzoo.runtime
from torch import nn
chain = revzoo.runtime.ReversibleChain([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
chain.schedule = ["invert", "recompute", "invert", "store"]
y1, y2 = chain(*torch.randn(2, 3, 4).unbind())
(y1 * y2).sum().backward()
assert all(p.grad is not None for p in chain.parameters())
print(*sorted(set(sys.modules) - alone))
"""


def test_the_runtime_imports_neither_the_compiler_nor_dtensor_nor_the_rest_of_revzoo():
    """They take longer to import than PyTorch itself."""
    command = [sys.executable, "-c", PROGRAM]
    modules = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "revzoo.runtime.chain" in modules
    for name in ("torch._dynamo", "torch.distributed.tensor", "torch.utils.flop_counter", "timm", "rich", "yaml"):
        assert not [module for module in modules if f"{module}.".startswith(f"{name}.")]
    others = {module.split(".")[1] for module in modules if module.startswith("revzoo.")} - {"runtime"}
    assert others == {"bijection", "bounds", "device", "dtype", "errors", "inplace_abn", "invertible", "noise", "registry"}
