"""A process group that keeps NCCL's rules, over gloo: for CPUs, or for ranks on one GPU.

What gloo forgives, a GPU does not. Here, as there:

- a group runs its operations one after another, in the order of their calls; sends and receives
  stand in the same queue as collectives;
- a send is over when its receive has come; tags match nothing (they are compared: a transfer whose
  ends disagree is an error);
- ranks must call a group's collectives in the same order, with the same sizes and types: each is
  compared before it runs, and the error names the ranks and what each of them called;
- a result is in its buffer once `wait` has returned, and NaN (-1, True) before; a buffer that is
  sent must stay as it is until the operation is over;
- memory that is freed before its operation was waited for is lost: what reads it gets NaN. A
  collective's handle keeps the tensors, but not memory that `data =` takes from them; the buffer of
  a send is the caller's to keep;
- each operation must be over within its group's time-out, counted from its call. A peer that dies
  is not noticed before. Who waits hears no signals.

A violation on one rank ends all: its message is raised from every `wait`.
"""

from typing import Any

import torch.distributed as dist

from tests.strict.communicator import NAME, Communicator, QueueWatch, StrictError, StrictOptions
from tests.strict.group import StrictGroup

__all__ = ["NAME", "StrictError", "StrictGroup", "StrictOptions", "strict"]


def strict(settings: str, device: str) -> str:
    """Register the backend with torch, for the CPU and this type of device, and give its name.

    `PARALLEL3D_BACKEND=tests.strict:strict` names this function. `settings` are delays, as in
    "delay=0.001,seed=7,send@1=0.5" (seconds), for groups that are made from now on.
    """
    options = StrictOptions.from_text(settings)
    watch: QueueWatch | None = None

    def create(made: Any, _: Any) -> StrictGroup:
        nonlocal watch
        ranks = made.global_ranks_in_group or range(made.group_size)
        if watch is None or watch.is_closed:  # the world's group, which is the first
            watch = QueueWatch(made.store.clone(), made.group_rank, made.group_size)
        seconds = made.timeout.total_seconds()
        return StrictGroup(
            Communicator(made.store, made.group_rank, ranks, seconds, watch=watch, options=options)
        )

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=sorted({"cpu", device}))
    return NAME
