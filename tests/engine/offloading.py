"""Runs the parity harness under offload: cases whose settings `Case` has no field for."""

from contextlib import nullcontext
from dataclasses import replace

from parallel3d.engine.quirks import nvme
from tests.verify import parity
from tests.verify.parity import NO_THRESHOLDS, Trainer, train_on_rank

BLOCK = 1024  # bytes; DeepSpeed's own would keep every parameter of a toy model in memory
AIO = {"block_size": BLOCK, "queue_depth": 8, "intra_op_parallelism": 1}


def changes(offload, folder, **more):
    """The settings of "cpu", "nvme", "param-cpu", "param-nvme" or some of them, joined by "+"."""
    settings = {"aio": AIO, "zero_options": NO_THRESHOLDS} | more
    for kind in offload.split("+"):
        device, path = kind.rpartition("-")[2], {"nvme_path": str(folder)}
        if kind.startswith("param-"):
            small = {"max_in_cpu": 0, "buffer_size": 8192, "buffer_count": 5}
            settings |= {"offload_param": device}
            settings |= {"param_options": path | small if device == "nvme" else {}}
        else:
            buffers = {"buffer_count": 4}
            settings |= {"offload_optimizer": device}
            settings |= {"optimizer_options": path | buffers if device == "nvme" else {}}
    return settings


def nothing():
    """Take no remedy away."""


def use(settings, swap_from=2 * BLOCK):
    """Let the harness train under these settings on this rank."""
    settings_of = parity.settings_of
    parity.settings_of = lambda case: replace(settings_of(case), **settings)
    return nvme.swapping_small_tensors(swap_from) if swap_from else nullcontext()


def train(rank, case, settings, take_away=nothing):
    """What `train_on_rank` gives, under other settings."""
    take_away()
    with use(settings):
        return train_on_rank(rank, case)


def trainer(case, settings):
    """The parts of a run, built under other settings."""
    with use(settings):
        return Trainer(case)
