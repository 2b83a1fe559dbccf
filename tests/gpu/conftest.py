"""Tests of what only a CUDA device shows. On the stub (`tests/cuda_stub`) all run that are not marked `values`."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from tests.cuda_stub import stub

HERE = os.path.dirname(__file__)
if stub.is_in_use():
    stub.prepare_torch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_cuda = torch.cuda.is_available()
    for item in items:
        if not str(item.path).startswith(HERE):
            continue
        if not has_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif stub.is_in_use() and item.get_closest_marker("values"):
            item.add_marker(pytest.mark.skip(reason="needs numbers that a device has computed"))
        elif not stub.is_in_use() and item.get_closest_marker("counts"):
            item.add_marker(pytest.mark.skip(reason="needs the counters of the CUDA stub"))


@pytest.fixture(autouse=True)
def _repeatable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use kernels that repeat themselves bit for bit, and a fixed seed on every device."""
    if request.node.get_closest_marker("counts"):  # those of training as it is: deterministic mode also fills new memory
        yield
        return
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def forbid_waiting() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager in which the host may not wait for the device."""

    @contextmanager
    def forbid() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says that this is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbid
