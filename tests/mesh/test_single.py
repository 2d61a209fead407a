"""Collectives of one tensor on real ranks: right, and by the names that this torch wants."""

import warnings

import pytest
import torch

from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor.collectives import all_gather_sequence, reduce_scatter_sequence
from parallel3d.verify.local_ranks import run_locally

pytestmark = pytest.mark.gloo


def gathered_and_scattered_on_rank(rank, samples):
    mesh = Mesh(1, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        part = torch.full((samples, 2, 3), 1.0 + rank)
        whole = all_gather_sequence(part, mesh.group("tp"))
        again = reduce_scatter_sequence(whole, mesh.group("tp"))
        rows = mesh.gather_floats([float(rank)])
    mesh.close()
    return whole[:, :, 0].tolist(), (again - 2 * part).abs().max().item(), rows


@pytest.mark.parametrize("samples", [1, 2])
def test_torch_does_not_warn_of_an_older_name(samples):
    """Several samples' collectives are one call of torch, which knows them by these names."""
    for found in run_locally(gathered_and_scattered_on_rank, 2, samples):
        assert found == ([[1.0, 1.0, 2.0, 2.0]] * samples, 0.0, [[0.0], [1.0]])
