"""A memory budget, as users give it, in bytes."""

from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

import psutil
import torch
from torch import nn

from revzoo.device import has_streams
from revzoo.errors import InputError
from revzoo.planning.amount import USABLE_SHARE, make_budget_error, read_amount
from revzoo.runtime.live_bytes import list_parts


def parse_budget(budget: str | int | float, device: torch.device | str, present_bytes: int = 0, *, sharing: int = 1) -> int:
    """Return a budget in bytes.

    Args:
        budget: bytes, "8GiB" (or KiB, MiB, TiB; KB, MB, GB, TB are powers of 1000), "60%" of the device's memory, or "auto":
            nine tenths of the memory that is free now, plus `present_bytes`.
        device: the device whose memory "60%" and "auto" refer to; "cpu" is the machine, or what the process or its
            control group may take of it.
        present_bytes: on this device already and part of what the budget is for: weights and buffers, for example.
        sharing: how many processes the device's memory is for; "60%" and "auto" are of an equal part of it.
    Raises:
        InputError: none of these, or less than one byte.
    """
    number, unit = read_amount(budget)
    if unit == "free":
        number = free_bytes(device, sharing) * USABLE_SHARE + present_bytes
    elif unit == "share":
        number *= min(_read_memory(device)[1] / sharing, _read_process_limit(device)[1])
    if number < 1:
        raise make_budget_error(budget)
    return int(number)


def count_model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(part.nbytes for t in tensors.values() for part in list_parts(t))


def free_bytes(device: torch.device | str, sharing: int = 1) -> int:
    """Return the memory of a device that one of `sharing` processes may still take [bytes]; "cpu" is the machine's."""
    return int(min(_read_memory(device)[0] // sharing, _read_process_limit(device)[0]))


def _read_memory(device: torch.device | str) -> tuple[int, int]:
    """Return the free and the total bytes of a device, for all processes that share it."""
    device = torch.device(device)
    if has_streams(device):
        free, total = torch.accelerator.get_memory_info(device)
        cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return free + cached, total
    if device.type in ("cpu", "meta"):
        memory = psutil.virtual_memory()
        limits = [(memory.available, memory.total), *_read_group_limits()]
        return min(free for free, _ in limits), min(total for _, total in limits)
    raise InputError(f"The memory of {device.type} devices is not known here. Give the budget in bytes, such as '8GiB'.")


def _read_process_limit(device: torch.device | str) -> tuple[float, float]:
    """Return the free and the total bytes of addresses that this process may have on a CPU (`ulimit -v`)."""
    with suppress(AttributeError):  # psutil reads it on Linux
        process = psutil.Process()
        total, _ = process.rlimit(psutil.RLIMIT_AS)
        if total != psutil.RLIM_INFINITY and torch.device(device).type == "cpu":
            return max(0, total - process.memory_info().vms), total
    return inf, inf


_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _read_group_limits(root: Path = _GROUPS, groups: Path = _OWN_GROUPS) -> Iterator[tuple[int, int]]:
    """Yield the free and the total bytes of every control group around this process that has a limit: containers, SLURM.

    Source: the Linux kernel's documentation, "Control Group v2" (memory.max, memory.current) and "Memory Resource Controller".
    What files are cached in counts as free.
    """
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        _, controllers, place = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names, prefix = ("memory.max", "memory.current"), ""
        if controllers:
            names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        top = root / controllers
        for folder in [top / place.strip("/"), *(top / place.strip("/")).parents]:
            if not folder.is_relative_to(top):
                break
            with suppress(OSError, ValueError, KeyError):  # a container sees its own group as the root; "max" is no limit
                total, used = (int((folder / name).read_text(encoding="utf-8")) for name in names)
                rows = dict(row.split() for row in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
                used -= sum(int(rows[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
                yield max(0, total - used), total
