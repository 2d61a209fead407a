"""Bytes of a rank's weights, gradients and optimizer states under ZeRO.

The rules are those of the engine, DeepSpeed 0.19.8 (docs/planner/memory.md), with the properties of
a program's Software.
"""

from typing import NamedTuple

from parallel3d.model.optimizers import MATRIX
from parallel3d.model.spec import MASTER_BYTES
from parallel3d.plan.layers.weight_counts import WeightSizes
from parallel3d.plan.setting import Setting

_SWAP_BUFFERS = 4  # DeepSpeed's offload_optimizer.buffer_count
_PARAM_BUFFERS = 5 * 100_000_000  # elements: DeepSpeed's offload_param.buffer_count x buffer_size


class StateBytes(NamedTuple):
    """Bytes of weights, gradients and optimizer states of one rank.

    Device memory:

    - `weights`, `optimizer`: at any time.
    - `shard`: reduced gradients. `standing`: True if they exist at any time; at ZeRO 0 to 2 they
      exist only from the reduction on.
    - `unreduced`: unreduced gradients, if they are reduced once per step.
    - `buffers`: at any time.
    - `bucket`: during all backwards, if each of them reduces.
    - `reducing`: additional bytes of a reduction.
    - `stepping`: additional bytes of the optimizer's step.

    Offloaded states: `host`, `nvme`.
    """

    weights: int
    optimizer: int
    shard: int
    standing: bool
    unreduced: int
    buffers: int
    bucket: int
    reducing: int
    stepping: int
    host: int
    nvme: int


def page_locked(num_bytes: int) -> int:
    """Return the bytes of page-locked host memory, which torch rounds to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def states(setting: Setting, s: WeightSizes, on_cpu: bool) -> StateBytes:
    """Return the bytes of weights, gradients and optimizer states for weights of sizes `s`."""
    work = setting.workload
    software = work.software
    buffers = work.buffers
    element = work.bytes_per_element
    gradient = software.gradient_bytes
    shards = setting.shards
    ep = setting.flow.ep
    _, stage, reduces_once, offload_optimizer, offload_param, *_ = setting.state
    zero3 = stage == 3
    share = s.shard(s.params, shards, ep) if stage else s.params
    weight_bytes = (share if zero3 else s.params) * element
    at_home = s.shard(s.matrices, shards, ep)
    matrices = at_home if stage else s.matrices
    optimizer = (share - matrices) * work.state_bytes()
    optimizer += matrices * work.state_bytes(MATRIX)
    if element == MASTER_BYTES and offload_optimizer == offload_param == "none":
        optimizer -= share * MASTER_BYTES  # the weights are their own masters
    shard = share * gradient
    places = {"none": 0, "cpu": 0, "nvme": 0}
    places[offload_optimizer] += optimizer
    places[offload_param] += weight_bytes
    offloads = offload_optimizer != "none"
    swaps = offload_optimizer == "nvme"
    # Below ZeRO-3, if no type changes, DeepSpeed keeps gradients one by one, not in one buffer.
    loose = not zero3 and element == gradient
    host = places["cpu"]
    standing = 0
    bucket = 0

    def locked(num_bytes: int) -> int:
        return num_bytes if on_cpu else page_locked(num_bytes)

    def in_groups(elements: int, size: int) -> int:
        """Return the bytes of one locked buffer for each of ZeRO-3's groups of parameters."""
        groups, rest = divmod(elements, buffers.sub_group_size)
        return groups * locked(buffers.sub_group_size * size) + locked(rest * size)

    if offload_param == "cpu":
        host += in_groups(share, element) - share * element
    content = min(buffers.reduce_bucket_size, s.params)
    if zero3:
        reduced = software.reduction_bytes
        # Gradients that are reduced once per step need no bucket of their own.
        standing = 0 if reduces_once else content * reduced
        # The bucket is copied rank by rank, and gloo makes another copy.
        reducing = content * reduced
        if on_cpu:
            reducing *= 2
        if reduced != gradient:
            reducing += -(-content // shards) * gradient
        if offloads:  # the reduced gradients, and a copy for the host's Adam
            again = 0 if swaps else in_groups(share, gradient)
            host = host + locked(shard) + again
            shard = 0
    else:
        if loose and shards > 1:  # both ranks that share a parameter hold all of its gradient
            shard += s.largest * gradient
        if reduces_once:
            # Gradients move into the bucket, whose content is copied once, and once more if it is
            # sent in another type. One rank's loose gradients are copied before the shard exists.
            reducing = content * gradient
            if software.reduction_bytes != gradient:
                reducing += content * software.reduction_bytes
            if loose and shards == 1:
                reducing -= min(reducing, shard)
        else:
            # The bucket is in the training type; its content is copied, and once more in fp32.
            bucket = content * element
            reducing = content * (element + software.reduction_bytes)
        if offloads:
            # Gradients and new weights in transit. Only the masters of the states are locked.
            host += locked(shard) + locked(share * element) + locked(s.largest * element)
            host += locked(share * MASTER_BYTES) - share * MASTER_BYTES
            standing = s.largest * element
    if swaps:
        swapped = _SWAP_BUFFERS + 1 if work.has_ema else _SWAP_BUFFERS
        host += swapped * MASTER_BYTES * min(buffers.sub_group_size, share)
        places["nvme"] += share * gradient
    if offload_param == "nvme":
        host += (_PARAM_BUFFERS + 2 * min(buffers.sub_group_size, share)) * element
    stepping = 0
    if not offloads and (zero3 or loose):  # separate tensors are copied into one buffer
        stepping = min(share, buffers.sub_group_size) * MASTER_BYTES
    if work.newton_schulz is not None:
        # The matrices that are sent, and the result; at a home the matrices as they arrive, whole,
        # and stacked, and three of their size in a step of Newton-Schulz.
        stepping += (2 * matrices + 6 * at_home) * MASTER_BYTES
    return StateBytes(
        weights=weight_bytes if offload_param == "none" else 0,
        optimizer=optimizer if not offloads else 0,
        shard=shard,
        standing=zero3,
        unreduced=s.params * gradient if reduces_once or not stage else 0,
        buffers=standing,
        bucket=bucket,
        reducing=reducing,
        stepping=stepping,
        host=host,
        nvme=places["nvme"],
    )
