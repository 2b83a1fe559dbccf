"""The mesh of processes: which of them hold the same shards, which divide a network, and which divide a layer."""

from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from revzoo.errors import InputError

Shard = Literal["none", "full", "hybrid"]


def make_mesh(
    processes: int, shard: Literal["full", "hybrid"], tensor_parallel: int = 1, nodes: int = 1, device_type: str = "cpu"
) -> DeviceMesh:
    """Arrange the processes of `torch.distributed` in a mesh; every process calls this.

    Its dimensions are named "replicate" (hybrid only: one index per node), "shard" (the processes that a network is divided
    over) and "tensor" (only where it is larger than 1: the processes that divide each layer, neighbours in rank).

    Args:
        processes: number of all processes.
        shard: "full" divides over all of them, "hybrid" over those of a node, and every node holds the whole.
        tensor_parallel: processes that divide each layer, 1 or more.
        nodes: number of nodes, with the same number of processes each.
        device_type: such as "cuda" or "cpu".

    Raises:
        InputError: the processes cannot be arranged like this.
    """
    shape, names = [count_shards(processes, shard, tensor_parallel, nodes)], ["shard"]
    if shard == "hybrid":
        shape, names = [nodes, *shape], ["replicate", *names]
    if tensor_parallel > 1:
        shape, names = [*shape, tensor_parallel], [*names, "tensor"]
    return init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names))


def read_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Return the dimensions of a mesh that `make_mesh` has made, by name."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def leave_out_tensor(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh that FSDP2 divides over, which is all but the dimension "tensor"."""
    return mesh[tuple(name for name in read_sizes(mesh) if name != "tensor")]


def count_shards(processes: int, shard: Literal["full", "hybrid"], tensor_parallel: int = 1, nodes: int = 1) -> int:
    """Return over how many processes a parameter is divided beside tensor parallelism. Arguments and errors: `make_mesh`."""
    if shard == "hybrid" and nodes == 1:
        raise InputError(
            f"shard=hybrid divides a network over the processes of each node, and repeats it on every node. Received: "
            f"{processes} processes on one node. Use shard=full, or start several nodes with torchrun --nnodes."
        )
    groups = nodes if shard == "hybrid" else 1
    if processes % (groups * tensor_parallel):
        wanted = [f"{nodes} nodes"] if shard == "hybrid" else []
        wanted += [f"tensor_parallel={tensor_parallel}"] if tensor_parallel > 1 else []
        raise InputError(
            f"The number of processes must be a multiple of {groups * tensor_parallel}, for {' and '.join(wanted)}. Received: "
            f"{processes} processes. Start another number, or the same number on every node."
        )
    return processes // (groups * tensor_parallel)
