"""Look-ahead on a GPU: the side stream, with streams that write down what they are told."""

from typing import Any

import torch
from torch import Tensor

from revzoo.registry import couplings
from revzoo.runtime import lookahead
from tests.runtime.test_lookahead import backward, told


class Stream:
    def __init__(self, name: str, log: list[str], current: list["Stream"]):
        self.name, self.log, self.current = name, log, current

    def __enter__(self) -> None:
        self.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.current.pop()

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for all of {other.name}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} marks")
        return f"mark of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_the_side_stream(monkeypatch):
    log: list[str] = []
    current: list[Stream] = []
    main, side = Stream("main", log, current), Stream("side", log, current)
    current.append(main)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch, "Stream", lambda _: side)
    monkeypatch.setattr(lookahead, "_side_streams", {})
    monkeypatch.setattr(lookahead, "_choose_executor", lambda _: lookahead._recover_on_side_stream)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: log.append(f"{tuple(tensor.shape)} read by {stream.name}")
    )
    chain = told(
        3, lambda k: log.append(f"{current[-1].name} recovers {k}"), lambda k: log.append(f"{current[-1].name} gradient {k}")
    )
    backward(chain, *torch.randn(2, 3, 6))
    assert log == [
        "main recovers 3",
        "side waits for all of main",
        "(3, 6) read by side",
        "(3, 6) read by side",
        "side recovers 2",
        "side marks",
        "main gradient 3",
        "main waits for mark of side",
        "side waits for all of main",
        "(3, 6) read by side",
        "(3, 6) read by side",
        "side recovers 1",
        "side marks",
        "main gradient 2",
        "main waits for mark of side",
        "main gradient 1",
    ]


def test_kept_bits_are_among_what_the_side_stream_reads():
    chain = told(3, lambda _: None, lambda _: None)
    chain.couplings = (couplings["momentum"](kept_bits=8),) * 3
    read: list[list[tuple[Any, Any]]] = []
    original = lookahead._choose_executor

    def choose(recoverable: Any) -> Any:
        read.append([(t.dtype, t.numel()) for t in recoverable.sources])
        return original(recoverable)

    lookahead._choose_executor, restore = choose, original
    try:
        backward(chain, *torch.randn(2, 3, 6))
    finally:
        lookahead._choose_executor = restore
    states = [(torch.float32, 18)] * 2
    assert read == [[*states, (torch.uint8, 18)], states]  # the state before the first step is not rebuilt
