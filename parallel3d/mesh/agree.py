"""A fault of one rank is a fault of all: none is left waiting for another (floor 1)."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from parallel3d.base.errors import Parallel3DError, TrainingError, packed, unpacked
from parallel3d.mesh.mesh import Mesh

_T = TypeVar("_T")


def agree(mesh: Mesh, work: Callable[[], _T]) -> _T:
    """Do `work` on every rank: gives this rank's result, or raises the first rank's error on all.

    Collective, aside: a rank that waits here hears signals. A Parallel3DError or TrainingError is
    raised on all with the same kind and message.
    """
    problem = ""
    try:
        result = work()
    except (Parallel3DError, TrainingError) as error:
        problem = packed(error)
    if problems := [text for text in mesh.gather_texts(problem, aside=True) if text]:
        raise unpacked(problems[0])
    return result


def on_first(mesh: Mesh, work: Callable[[], Any]) -> Any:
    """Do `work` on rank 0 alone, and give its result, a JSON value, on every rank.

    Collective; its errors are raised as `agree` does.
    """
    mine = agree(mesh, lambda: work() if mesh.rank == 0 else None)
    return json.loads(mesh.broadcast_text(json.dumps(mine)))


def gather_json(mesh: Mesh, value: Any, aside: bool = False) -> list[Any]:
    """Every rank's JSON value, in the order of global ranks; `aside` as in `Mesh.gather_texts`."""
    return [json.loads(text) for text in mesh.gather_texts(json.dumps(value), aside)]
