"""Imports of `parallel3d/extras/guard` and `tasks` by a run that wants them, and by no other."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.base.say import Say

if TYPE_CHECKING:  # torch and DeepSpeed are loaded after the config and the folder are checked
    from parallel3d.checkpoint.places import Place
    from parallel3d.config import RunConfig
    from parallel3d.config.parallel3d_block import CheckpointConfig
    from parallel3d.extras.tasks.score import Tasks
    from parallel3d.mesh.mesh import Mesh
    from parallel3d.mesh.nodes import Nodes
    from parallel3d.train.assembly import Assembly
    from parallel3d.train.ending import StopRequest
    from parallel3d.train.observer import Observer
    from parallel3d.train.progress import Progress
    from parallel3d.train.start import Start


def open_places(
    settings: "CheckpointConfig",
    mesh: "Mesh",
    nodes: "Nodes",
    folder: Path,
    say: Say,
) -> "list[Place]":
    """Return the places besides the disk to which the run in `folder` saves. Collective."""
    if not settings.in_memory_every:
        return []
    from parallel3d.extras.guard.host_memory import open_memory

    return [open_memory(settings, mesh, nodes, folder, say)]


def leave_memory(start: "Start", mesh: "Mesh") -> None:
    """Forget the steps in memory if this launch, which will be ahead of them, keeps none there."""
    if mesh.rank == 0 and not start.config.checkpoint.in_memory_every:
        with suppress(OSError):
            (start.folder / "memory.json").unlink(missing_ok=True)


def observers_of(
    start: "Start",
    mesh: "Mesh",
    parts: "Assembly",
    tasks: "Tasks | None",
    stop: "StopRequest",
    progress: "Progress | None",
) -> "list[Observer]":
    """Return the observers that the config asks the extras for. Collective.

    They guard the run against faulty hardware, and score it on `tasks`, which `progress` shows.
    """
    observers: list[Observer] = []
    if start.config.train.check_bits.recompute_every:
        from parallel3d.extras.guard.recomputation_check import RecomputationCheck

        observers.append(RecomputationCheck(start.config, mesh, parts, start.position))
    if tasks:
        observers.append(tasks.observer(start, parts, stop=stop, progress=progress))
    return observers


def warn_of_slow_links(config: "RunConfig", mesh: "Mesh", say: Say) -> None:
    """Measure the links between hosts if the ranks span several, and warn of slow ones.

    Collective, and not longer than two seconds.
    """
    from parallel3d.mesh.nodes import find_nodes

    nodes = find_nodes(mesh)
    if len(set(nodes.machines)) == 1:
        return
    from parallel3d.extras.doctor.checks import slow_network

    if text := slow_network(config, mesh, nodes):
        say(text)


def load_tasks(config: "RunConfig", mesh: "Mesh") -> "Tasks | None":
    """Load the tasks of `train.evaluate_tasks`, if there are any; raise ConfigError. Collective."""
    if not config.train.evaluate_tasks.tasks:
        return None
    from parallel3d.extras.tasks.score import Tasks

    return Tasks(config.train.evaluate_tasks.tasks, mesh)
