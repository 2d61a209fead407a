"""Functions on ranks of this machine that keep NCCL's rules."""

import os
from collections.abc import Callable
from typing import Any

from parallel3d.mesh.groups import BACKEND
from parallel3d.verify.local_ranks import run_locally

STRICT = "tests.strict:strict"


def on_strict(rank: int, text: str, function: Callable[..., Any], *args: Any) -> Any:
    os.environ[BACKEND] = f"{STRICT},{text}"
    return function(rank, *args)


def run_strictly(
    function: Callable[..., Any], world_size: int, *args: Any, text: str = "", **options: Any
) -> list[Any]:
    """`run_locally` over the strict backend with the settings `text`."""
    return run_locally(on_strict, world_size, text, function, *args, **options)
