"""Checks of a run's machines before it starts: one config, one folder, enough memory."""

import json
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from parallel3d.base.errors import ConfigError
from parallel3d.base.say import Say
from parallel3d.checkpoint.state import changes
from parallel3d.config import RunConfig
from parallel3d.engine.swap import check_writable
from parallel3d.mesh.agree import agree, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes, wait_until
from parallel3d.plan.impossible import MOST_BYTES, refuse_impossible
from parallel3d.train.claim import token_of


def refuse_drift(settings: Mapping[str, object], mesh: Mesh, nodes: Nodes) -> None:
    """Raise ConfigError on all ranks unless every rank has read rank 0's settings.

    Paths of the text and of the cache may differ, as in `changes`.
    """
    of_first = on_first(mesh, lambda: settings)

    def look() -> None:
        own = json.loads(json.dumps(settings))
        different = list(changes(of_first, own))
        if different:
            raise ConfigError(
                f"{different[0]}: rank 0 on {nodes.hosts[0]} has the first value, and rank "
                f"{mesh.rank} on {nodes.hosts[mesh.rank]} the second; start all ranks with the "
                "same config and options"
            )

    agree(mesh, look)


def refuse_unshared(folder: Path, directory: str, mesh: Mesh, nodes: Nodes) -> None:
    """Raise ConfigError on all ranks unless every node sees rank 0's lock beside `folder`."""
    if len(set(nodes.machines)) == 1:
        return
    token = on_first(mesh, lambda: token_of(folder))

    def look() -> None:
        is_first = nodes.first(mesh.rank) == mesh.rank
        if is_first and not wait_until(lambda: token_of(folder) == token):
            raise ConfigError(
                f'parallel3d.run.directory = "{directory}": {folder.parent.absolute()} on '
                f"{nodes.hosts[mesh.rank]} (rank {mesh.rank}) is not the folder that rank 0 on "
                f"{nodes.hosts[0]} writes to; use a folder that all nodes share"
            )

    agree(mesh, look)


def check_machine(config: RunConfig, mesh: Mesh, nodes: Nodes, say: Say) -> None:
    """Raise ConfigError on all ranks if the run cannot fit, or its NVMe folders are not writable.

    Called before the corpus and the model, which take long. Warns if a tp group spans hosts, or
    the ranks over which mesh.dp_shards shards.
    """
    block = mesh.shards.size * mesh.tensor.size
    if mesh.copies.size > 1 and (torn := nodes.torn(block)):
        say(
            f"mesh    dp_shards = {config.mesh.dp_shards} SPANS HOSTS: {nodes.in_words(torn[0])}; "
            "weights are gathered over the network. Use a number that divides the dp ranks of a "
            "node, and number each node's ranks consecutively (srun --distribution=block)"
        )
    if torn := nodes.torn(mesh.tensor.size):
        others = f", and {len(torn) - 1} more groups" if torn[1:] else ""
        say(
            f"mesh    tp = {mesh.tensor.size} SPANS HOSTS: {nodes.in_words(torn[0])}{others}; "
            "every layer waits for the network. Use a tp that divides the ranks of a node, and "
            "number each node's ranks consecutively (srun --distribution=block)"
        )

    def look() -> None:
        host = (psutil.virtual_memory().total + psutil.swap_memory().total) // mesh.local_size
        device = 0
        if mesh.device.type != "cpu":
            ask = getattr(torch.get_device_module(mesh.device), "mem_get_info", None)
            device = ask(mesh.device)[1] if ask else MOST_BYTES
        refuse_impossible(config, mesh.world.size, host + device)
        for name in ("offload_optimizer", "offload_param"):
            section = getattr(config.zero_optimization, name)
            if section.device == "nvme":
                setting = f"zero_optimization.{name}.nvme_path"
                check_writable(section.nvme_path, mesh, setting)

    agree(mesh, look)
