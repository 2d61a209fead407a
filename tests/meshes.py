"""The sizes of meshes as tests write them: (2, 1, 2) is pp x dp x tp, four numbers have cp, too."""

from collections.abc import Sequence

from parallel3d.base.mesh_sizes import MeshSizes


def sizes_of(numbers: Sequence[int]) -> MeshSizes:
    """Return the sizes of a mesh from three or four numbers, which mean what "2x1x2" means."""
    return MeshSizes.parse("x".join(map(str, numbers)))
