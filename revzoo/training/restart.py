"""Jobs of torchrun that start all processes anew after one has died: such a job goes on in the folder that it began.

torchrun's `--max-restarts` counts the starts. On each machine its agent outlives them; the folder of a run names the agents
that work on it. The id of a job (`--rdzv-id`) does not tell which job it is: the next one may have it, too.
"""

import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from accelerate.utils import gather_object
from torch import distributed

from revzoo.training.run_folder import RunFolder, is_numbered


def form_group_anew(timeout: timedelta | None = None, backend: str | None = None) -> None:
    """Form the group of the processes after a restart; before one do nothing, and leave it to Accelerate.

    torchrun keeps its store over restarts, with the addresses of the processes before, which the new ones must not read. With
    several machines, whose counts of restarts may differ, its TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes a new store instead.

    Args:
        timeout: how long a process waits for another; None: PyTorch's choice.
        backend: of the group; None: "nccl" on GPUs, else "gloo".
    """
    start, is_shared = count_restarts(), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if start == 0 or not is_shared or os.environ.get("GROUP_WORLD_SIZE") != "1" or distributed.is_initialized():
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    on_gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() not in ("1", "true", "yes")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(
        backend or ("nccl" if on_gpu else "gloo"),
        store=distributed.PrefixStore(f"start-{start}", store),  # type: ignore[attr-defined]
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )


def count_restarts() -> int:
    """Return how often torchrun has started this process anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def name_agent() -> str:
    """Return a name for the agent of torchrun that started this process, the same after a restart; empty without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # FOLDER/attempt_1/0/error.json; each agent makes a FOLDER
        return f"{socket.gethostname()} {Path(error_file).parents[2]}"
    agent = psutil.Process(os.getppid())  # that has no folder, because of --log-dir /dev/null
    return f"{socket.gethostname()} {agent.pid} {agent.create_time()}"


def sign_folder(folder: RunFolder, agents: set[str]) -> None:
    """Write into the folder of a run which agents work on it."""
    if agents:
        folder.job.write_text("\n".join(sorted(agents)), encoding="utf-8")


def name_agents() -> set[str]:
    """Return the names of the agents of all processes, which call this together."""
    return set(gather_object([name_agent()])) - {""}


def find_own_folder(parent: Path, name: str, out: Path | None, agents: set[str]) -> RunFolder | None:
    """Return the folder that one of the agents signed before a restart, or None; all processes call this together.

    Args:
        parent: where folders without a name of their own are made.
        name: their name, which a number may follow.
        out: the folder that the user has named.
        agents: of all processes. On machines that were replaced, they are others than before.
    """
    if not any(gather_object([count_restarts()])):  # where only another machine's processes had died, this count is 0
        return None
    paths = [path for path in parent.glob("*") if is_numbered(path.name, name)] if out is None else [out]
    signed = (folder for folder in map(RunFolder, paths) if folder.job.is_file())
    return next((folder for folder in signed if agents & set(folder.job.read_text(encoding="utf-8").splitlines())), None)
