"""One rank's numbers about a step, and their exchange."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parallel3d.mesh.mesh import Mesh
from parallel3d.train.metrics import peak_memory_bytes

Number = float | Tensor
"""A number, or a tensor of one element, which stays on its device until it was gathered."""


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """The numbers of one rank about a step, which all ranks know."""

    loss: float
    """The loss of the rank's part of the batch."""
    norm: float
    """The gradient's norm over the whole mesh, before clipping."""
    peak_memory_bytes: float
    stop: float
    """Above 0 if the rank was asked to stop: the first of `StopRequest.flags`."""
    save: float
    """1 if the rank was asked to save, else 0."""
    is_broken: bool
    """True if the rank's saves failed too often."""
    own_squares: float
    """The rank's part of the squared norm of its dp coordinate's own gradient, if measured."""
    side_losses: tuple[float, ...]
    """Each side loss of the model, summed over the rank's layers."""


def gather_rank_steps(
    mesh: Mesh,
    *,
    loss: Number,
    norm: Number,
    stop: float,
    save: float,
    is_broken: bool,
    own_squares: Number,
    side_losses: Sequence[Number],
) -> list[RankStep]:
    """Return the numbers of all ranks from those of this rank; see the fields of RankStep.

    The peak of the memory is that of now. Collective; the host waits for the device once.
    """
    memory = peak_memory_bytes(mesh.device)
    own = [loss, norm, memory, stop, save, is_broken, own_squares, *side_losses]
    return [_from_floats(row) for row in mesh.messages.gather_floats(own)]


def _from_floats(row: Sequence[float]) -> RankStep:
    """Return the numbers of a rank in the order in which they are gathered."""
    loss, norm, peak_memory_bytes, stop, save, is_broken, own_squares, *side_losses = row
    return RankStep(
        loss=loss,
        norm=norm,
        peak_memory_bytes=peak_memory_bytes,
        stop=stop,
        save=save,
        is_broken=is_broken > 0,
        own_squares=own_squares,
        side_losses=tuple(side_losses),
    )


def mean_of_ranks(mesh: Mesh, values: Sequence[float]) -> float:
    """Return the mean over the batch of a loss, from its value on every rank; 0 where it is not.

    The ranks of a stage have the means of their own samples, equal ones for all of tp.
    """
    return sum(values) / (mesh.replicas.size * mesh.tensor.size)
