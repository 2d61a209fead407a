"""In half precision the averages over a copy's ranks were added to their fp32 sums before they were
averaged over the copies.
"""

from typing import Any

import torch
import torch.distributed as dist

from parallel3d.engine.quirks import reducing
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 4, 1), needs=("copies", "ZeRO-1 or 2", "bf16"), kind="half")


@in_place_of(reducing, "average_over_copies")
def plant(original: Any, optimizer: Any, copies: Any) -> None:
    """Average what DeepSpeed has added to its sums already."""
    average = optimizer.average_tensor

    def average_late(bucket: Any, dtype: Any) -> None:
        average(bucket, dtype)
        for part in reducing._own_parts(optimizer, bucket, dtype):
            mean = part / copies.size
            dist.all_reduce(mean, group=copies.group)
            part.copy_(mean.to(torch.float32))

    optimizer.average_tensor = average_late
