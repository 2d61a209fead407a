"""The sizes of a mesh: its axes, how they are written, and how they are read (floor 0)."""

import re
from math import prod
from typing import NamedTuple, Self


class MeshSizes(NamedTuple):
    """The number of ranks along each axis, from the outermost axis to the innermost.

    A mesh without an axis is a mesh where it is 1. As text it is "2x2x1".
    """

    pp: int = 1
    """Pipeline parallelism: cuts the layers into stages."""
    dp: int = 1
    """Data parallelism: cuts the batch; ZeRO shards the states."""
    tp: int = 1
    """Tensor parallelism: cuts the matrices."""

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return prod(self)

    @property
    def label(self) -> str:
        """The sizes with the names of their axes: "pp 2 × dp 2 × tp 1"."""
        return " × ".join(f"{axis} {size}" for axis, size in self._asdict().items())

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the sizes that a text such as "2x2x1" names. Raises ValueError for others."""
        sizes = re.findall("[1-9][0-9]*", text)
        if "x".join(sizes) != text or len(sizes) != len(AXES):
            raise ValueError(f"{text!r}: must be {' x '.join(AXES)}, for example 2x2x1")
        return cls(*map(int, sizes))


AXES = MeshSizes._fields
