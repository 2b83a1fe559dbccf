"""Numbers are on the host when the event of their device says so."""

from unittest.mock import Mock

import pytest
import torch

from revzoo import device


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_copy_has_arrived_when_its_device_says_so_and_reading_waits_for_that(has_ended, monkeypatch):
    stream = Mock()
    event = stream.record_event.return_value
    event.query.return_value = has_ended
    get_stream = Mock(return_value=stream)  # of the device with the numbers, not of the current one
    monkeypatch.setattr(device, "can_read_now", lambda x: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", get_stream)
    numbers = torch.tensor([1.0, 2.0])
    copy = device.HostCopy(numbers, torch.tensor([3]))
    get_stream.assert_called_once_with(numbers.device)
    assert copy.has_arrived == has_ended
    assert copy.read() == [[1.0, 2.0], [3]]
    assert event.synchronize.called != has_ended


def test_on_the_cpu_there_is_nothing_to_wait_for():
    copy = device.HostCopy(torch.tensor([1.0]))
    assert copy.has_arrived
    assert copy.read() == [[1.0]]
