"""Collectives of one tensor, by the names that this torch has for them (floor 1).

Torch 2.13 renamed both, and says so (a FutureWarning) wherever the older name is called.
"""

import torch.distributed as dist

if hasattr(dist, "all_gather_single"):
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor
