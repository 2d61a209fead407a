"""The sizes of a mesh: its axes, how they are written, and how they are read (floor 0)."""

import re
from math import prod
from typing import NamedTuple, Self


class _Axes(NamedTuple):
    pp: int = 1
    """Pipeline parallelism: cuts the layers into stages."""
    dp: int = 1
    """Data parallelism: cuts the batch; ZeRO shards the states."""
    cp: int = 1
    """Context parallelism: cuts the tokens of each sample."""
    tp: int = 1
    """Tensor parallelism: cuts the matrices."""


class MeshSizes(_Axes):
    """The number of ranks along each axis, from the outermost axis to the innermost.

    A mesh without an axis is a mesh where it is 1. As text, three sizes are pp, dp and tp:
    "2x2x1" is "2x2x1x1".
    """

    def __new__(cls, *, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1) -> Self:
        """Return the sizes; they are given by name, because three numbers would be ambiguous."""
        return super().__new__(cls, pp, dp, cp, tp)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        """Return what copies and pickles are made from: the sizes by name."""
        return (), self._asdict()

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return prod(self)

    @property
    def label(self) -> str:
        """The sizes with the names of their axes: "pp 2 × dp 2 × tp 1"."""
        return " × ".join(f"{axis} {size}" for axis, size in self.shown.items())

    @property
    def shown(self) -> dict[str, int]:
        """The sizes by axis as texts show them: without cp if it is 1."""
        return {a: size for a, size in self._asdict().items() if a in WITHOUT_CP or size > 1}

    @property
    def of_a_replica(self) -> dict[str, int]:
        """The sizes by axis besides dp, as texts show them."""
        return {axis: size for axis, size in self.shown.items() if axis != "dp"}

    def __str__(self) -> str:
        return "x".join(map(str, self.shown.values()))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the sizes that a text such as "2x2x1" names. Raises ValueError for others."""
        sizes = re.findall("[1-9][0-9]*", text)
        if "x".join(sizes) != text or len(sizes) not in (len(WITHOUT_CP), len(AXES)):
            rule = f"must be {' x '.join(WITHOUT_CP)}, for example 2x2x1, or {' x '.join(AXES)}"
            raise ValueError(f"{text!r}: {rule}")
        axes = WITHOUT_CP if len(sizes) == len(WITHOUT_CP) else AXES
        return cls(**dict(zip(axes, map(int, sizes), strict=True)))


AXES = _Axes._fields
WITHOUT_CP = tuple(axis for axis in AXES if axis != "cp")
