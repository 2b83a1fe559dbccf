"""What a budget means in bytes, and what is none."""

import math
import resource

import psutil
import pytest
import torch

from revzoo.errors import InputError
from revzoo.planning import budget
from revzoo.planning.budget import free_bytes, parse_budget


@pytest.mark.parametrize(
    ("given", "size"),
    [(1, 1), ("123B", 123), ("1e9", 10**9), ("8GiB", 8 * 2**30), ("1.5MiB", 3 * 2**19), ("2KiB", 2048), ("2.5MB", 2_500_000)],
)
def test_sizes(given, size):
    assert parse_budget(given, "cpu") == size


@pytest.fixture
def memory(monkeypatch):
    """Let the machine have 1000 bytes, 400 of them free."""
    monkeypatch.setattr(budget, "_read_memory", lambda device: (400, 1000))


def test_shares_are_of_the_whole_memory(memory):
    assert parse_budget("60%", "cpu") == 600
    assert parse_budget("12.5 %", "cpu") == 125
    assert parse_budget("100%", "cpu", present_bytes=77) == 1000
    assert parse_budget("60%", "cpu", sharing=2) == 300


def test_auto_is_nine_tenths_of_what_is_free_and_what_the_model_holds(memory):
    assert parse_budget("auto", "cpu") == 360
    assert parse_budget("auto", "cpu", present_bytes=100) == 460
    assert parse_budget("auto", "cpu", present_bytes=100, sharing=2) == 280
    assert free_bytes("cpu") == 400


def test_the_memory_of_a_cpu_is_the_machines():
    assert parse_budget("50%", "meta") == budget._read_memory("cpu")[1] // 2 <= psutil.virtual_memory().total // 2
    assert 0 < free_bytes(torch.device("cpu")) <= psutil.virtual_memory().total


NONSENSE = ["", "8gib", "8K", "-1GiB", "1e99GiB", "0.4B", "nan", -1, True, None, math.nan]


@pytest.mark.parametrize("given", NONSENSE)
def test_nonsense_is_refused(given):
    with pytest.raises(
        InputError, match=r"A budget is bytes, a size such as '8GiB', a share such as '60%', or 'auto'\. Received: "
    ):
        parse_budget(given, "cpu")


@pytest.mark.parametrize("given", ["0%", "101%"])
def test_a_share_of_nothing_or_of_more_than_all(given):
    with pytest.raises(InputError, match=rf"above 0 % and at most 100 %\. Received: '{given}'"):
        parse_budget(given, "cpu")


def test_a_device_whose_memory_is_unknown():
    with pytest.raises(
        InputError, match=r"The memory of mps devices is not known here\. Give the budget in bytes, such as '8GiB'\."
    ):
        parse_budget("50%", "mps")
    assert parse_budget("8GiB", "mps") == 2**33


def test_limits_of_control_groups(tmp_path):
    """Of both versions of control groups, of every group around the process; cached files are free, "max" is no limit."""

    def write(folder, names, *sizes):
        folder.mkdir(parents=True, exist_ok=True)
        for name, size in zip(names, sizes, strict=True):
            (folder / name).write_text(f"{size}\n")

    new, old = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    write(tmp_path / "job", (*new, "memory.stat"), 1000, 700, "anon 600\ninactive_file 20\nactive_file 30")
    write(tmp_path / "job" / "step", (*new, "memory.stat"), "max", 700, "inactive_file 50\nactive_file 0")
    write(tmp_path / "memory", (*old, "memory.stat"), 500, 490, "total_inactive_file 90\ntotal_active_file 0")
    groups = tmp_path / "cgroup"
    groups.write_text("5:devices:/\n4:memory:/elsewhere\n0::/job/step\n")
    assert list(budget._read_group_limits(tmp_path, groups)) == [(100, 500), (350, 1000)]
    assert list(budget._read_group_limits(tmp_path, tmp_path / "none")) == []


def test_a_limit_of_the_process():
    before, limit = resource.getrlimit(resource.RLIMIT_AS), psutil.Process().memory_info().vms + (1 << 34)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        assert parse_budget("100%", "cpu") <= limit
        assert free_bytes("cpu") <= 1 << 34
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
