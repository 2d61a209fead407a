"""Messages between two ranks, and single-tensor collectives under this torch's names (floor 1)."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed as dist


@dataclass(frozen=True)
class Transfer:
    """A send or receive in flight, with its timeout; None leaves the timeout to the backend.

    gloo's transfers ignore their group's timeout; NCCL's watchdog handles its own.
    """

    work: dist.Work
    timeout: timedelta | None

    @classmethod
    def of(cls, work: dist.Work | None, timeout: timedelta | None) -> Self:
        """Return what torch has started; it starts nothing on a rank outside the group."""
        assert work is not None
        return cls(work, timeout)

    def wait(self) -> None:
        """Wait until the transfer is done; RuntimeError if the peer dies or is silent too long."""
        if self.timeout is None:
            self.work.wait()
        else:
            self.work.wait(self.timeout)

    def is_completed(self) -> bool:
        """True if the transfer is done."""
        return self.work.is_completed()


if hasattr(dist, "all_gather_single"):
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor
