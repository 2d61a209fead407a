"""Functions on ranks of this machine that keep NCCL's rules."""

import os

from parallel3d.mesh.groups import BACKEND
from parallel3d.verify.local_ranks import run_locally


def on_strict(rank, text, function, *args):
    os.environ[BACKEND] = text
    return function(rank, *args)


def run_strictly(function, world_size, *args, text="strict", **options):
    """`run_locally` over the strict backend, which `text` chooses."""
    return run_locally(on_strict, world_size, text, function, *args, **options)
