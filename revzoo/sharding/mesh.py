"""The mesh of processes: which of them hold the same shards, and which divide a network."""

from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from revzoo.errors import InputError


def make_mesh(processes: int, shard: Literal["full", "hybrid"], nodes: int = 1, device_type: str = "cpu") -> DeviceMesh:
    """Arrange the processes of `torch.distributed` in a mesh; every process calls this.

    Its dimensions are named "replicate" (hybrid only: one index per node) and "shard" (the processes that a network is divided
    over).

    Args:
        processes: number of all processes.
        shard: "full" divides over all of them, "hybrid" over those of a node, and every node holds the whole.
        nodes: number of nodes, with the same number of processes each.
        device_type: such as "cuda" or "cpu".

    Raises:
        InputError: the processes cannot be arranged like this.
    """
    shape, names = (count_shards(processes, shard, nodes),), ("shard",)
    if shard == "hybrid":
        return init_device_mesh(device_type, (nodes, *shape), mesh_dim_names=("replicate", *names))
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def read_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Return the dimensions of a mesh that `make_mesh` has made, by name."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def count_shards(processes: int, shard: Literal["full", "hybrid"], nodes: int = 1) -> int:
    """Return over how many processes a parameter is divided. Arguments and errors: `make_mesh`."""
    if shard == "full":
        return processes
    if nodes == 1:
        raise InputError(
            f"shard=hybrid divides a network over the processes of each node, and repeats it on every node. Received: "
            f"{processes} processes on one node. Use shard=full, or start several nodes with torchrun --nnodes."
        )
    if processes % nodes:
        raise InputError(
            f"The number of processes must be a multiple of {nodes}, for {nodes} nodes. Received: {processes} processes. Start "
            "the same number on every node."
        )
    return processes // nodes
