"""Numbers are on the host when the event says so, whichever device computes them."""

import pytest
import torch

from revzoo import host_copy


class Stream:
    """The stream of a device that computes later than it is asked."""

    def __init__(self, device: torch.device):
        self.device, self.has_ended, self.waits = device, False, 0

    def record_event(self) -> "Stream":
        return self

    def query(self) -> bool:
        return self.has_ended

    def synchronize(self) -> None:
        self.waits += 1


def test_the_event_is_that_of_the_device_with_the_numbers(monkeypatch):
    """Not of the current device, which is cuda:0 in a forward on cuda:1."""
    second = torch.device("cuda", 1)
    streams = {}
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams.setdefault(device, Stream(device)))
    assert host_copy._record_event(second) is streams[second]
    assert list(streams) == [second]


@pytest.mark.parametrize("ended", [False, True])
def test_a_copy_has_arrived_when_its_device_says_so_and_reading_waits_for_that(ended, monkeypatch):
    stream = Stream(torch.device("cpu"))
    monkeypatch.setattr(host_copy, "can_read_now", lambda x: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    copy = host_copy.HostCopy(torch.tensor([1.0, 2.0]), torch.tensor([3]))
    stream.has_ended = ended
    assert copy.has_arrived == ended
    assert stream.waits == 0
    assert copy.read() == [[1.0, 2.0], [3]]
    assert stream.waits == (0 if ended else 1)


def test_on_the_cpu_there_is_nothing_to_wait_for():
    copy = host_copy.HostCopy(torch.tensor([1.0]))
    assert copy.has_arrived
    assert copy.read() == [[1.0]]
