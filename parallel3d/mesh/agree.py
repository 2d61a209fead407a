"""Make an error of one rank an error of all, so that no rank waits for another (floor 1)."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from parallel3d.base.errors import Parallel3DError, TrainingError, pack_error, unpack_error
from parallel3d.mesh.mesh import Mesh

_T = TypeVar("_T")


def agree(mesh: Mesh, work: Callable[[], _T]) -> _T:
    """Run `work` on every rank and return this rank's result, or raise the first error on all.

    Collective, on the group beside training: a rank that waits here still handles signals. A
    Parallel3DError or TrainingError is raised on all ranks with the same kind and message.
    """
    problem = ""
    try:
        result = work()
    except (Parallel3DError, TrainingError) as error:
        problem = pack_error(error)
    if problems := [text for text in mesh.messages.gather_texts(problem, aside=True) if text]:
        raise unpack_error(problems[0])
    return result


def on_first(mesh: Mesh, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 alone and return its result, a JSON value, on every rank.

    Collective. Errors are raised on all ranks, as by `agree`.
    """
    answer = agree(mesh, lambda: work() if mesh.rank == 0 else None)
    return json.loads(mesh.messages.broadcast_text(json.dumps(answer)))


def gather_json(mesh: Mesh, value: object, aside: bool = False) -> list[Any]:
    """Return every rank's JSON value, by global rank; `aside` as in `Messages.gather_texts`."""
    return [json.loads(text) for text in mesh.messages.gather_texts(json.dumps(value), aside)]
