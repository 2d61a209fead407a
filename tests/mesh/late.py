"""A device that queues communication: who starts it goes on at once, as the host of a GPU does."""

import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "_to_copy", "copy_"}  # the host waits for these


class LateDevice(TorchDispatchMode):
    """While it is on, only a barrier and a read of a tensor's values wait for what is queued."""

    def __init__(self):
        super().__init__()
        self.queued = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name != "barrier":
            *outputs, work = func(*args, **(kwargs or {}))
            self.queued.append(dist.Work.unbox(work))
            return *outputs, FakeWork().boxed()
        if name in READS:
            for work in self.queued:
                work.wait()
            self.queued.clear()
        return func(*args, **(kwargs or {}))
