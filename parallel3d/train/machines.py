"""Checks of the machines that a run is started on."""

from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.engine.swap import check_writable
from parallel3d.mesh.agree import agree, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import appears, find_nodes
from parallel3d.plan.impossible import MOST_BYTES, refuse_impossible
from parallel3d.train.claim import token_of


def refuse_unshared(folder: Path, directory: str, mesh: Mesh) -> None:
    """Raise ConfigError on all ranks unless every node sees the run's `folder`.

    A node does if it finds the lock that rank 0 holds beside it. Collective.
    """
    nodes = find_nodes(mesh)
    if not nodes.are_several:
        return
    token = on_first(mesh, lambda: token_of(folder))

    def look() -> None:
        if nodes.first(mesh.rank) == mesh.rank and not appears(lambda: token_of(folder) == token):
            raise ConfigError(
                f'parallel3d.run.directory = "{directory}": {folder.parent.absolute()} on '
                f"{nodes.hosts[mesh.rank]} (rank {mesh.rank}) is not the folder that rank 0 on "
                f"{nodes.hosts[0]} writes to; name one that all nodes share"
            )

    agree(mesh, look)


def check_machine(config: RunConfig, mesh: Mesh, say: Callable[[str], None]) -> None:
    """Raise ConfigError on all ranks if the run cannot fit, or its NVMe folders not be written.

    Before there is a corpus or a model: what takes an hour must not be what fails. Says so where a
    tensor-parallel group is on several hosts.
    """
    nodes = find_nodes(mesh)
    if torn := nodes.torn(mesh.size("tp")):
        others = f", and {len(torn) - 1} more groups" if torn[1:] else ""
        say(
            f"mesh    tp = {mesh.size('tp')} SPANS HOSTS: {nodes.in_words(torn[0])}{others}; each "
            "layer waits for what is between them. Use a tp that divides the ranks of a node, and "
            "start a node's ranks one after the other (srun --distribution=block)"
        )

    def look() -> None:
        host = (psutil.virtual_memory().total + psutil.swap_memory().total) // mesh.local_size
        device = 0
        if mesh.device.type != "cpu":
            ask = getattr(torch.get_device_module(mesh.device), "mem_get_info", None)
            device = ask(mesh.device)[1] if ask else MOST_BYTES
        refuse_impossible(config, mesh.size("world"), host + device)
        for name in ("offload_optimizer", "offload_param"):
            section = getattr(config.zero_optimization, name)
            if section.device == "nvme":
                setting = f"zero_optimization.{name}.nvme_path"
                check_writable(section.nvme_path, mesh, setting)

    agree(mesh, look)
