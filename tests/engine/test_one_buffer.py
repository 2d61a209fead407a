"""Gradients averaged through one buffer: the bits of DeepSpeed's loops over the ranks."""

import deepspeed
import pytest
import torch
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

from parallel3d.engine.quirks import core
from parallel3d.engine.quirks.reducing import _reduce_scatter
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import run_locally

pytestmark = pytest.mark.gloo

LENGTHS = (1, 2, 3, 7, 12, 100)  # some ranks hold no part, or a shorter one


def both_on_rank(rank):
    mesh = Mesh(dp=3)
    core.skip_shared_memory_operator()  # compiling it takes a minute
    deepspeed.init_distributed("gloo", dist_init_required=False)
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(length, generator=generator) for length in LENGTHS]
    ours = _reduce_scatter(gradients, torch.float32, mesh.shards.group, 3)
    theirs = reduce_scatter_coalesced(gradients, mesh.shards.group)
    return [[part.tolist() for part in parts] for parts in (ours, theirs)]


def test_parts_equal_those_of_deepspeed_bitwise():
    for ours, theirs in run_locally(both_on_rank, 3):
        assert ours == theirs
