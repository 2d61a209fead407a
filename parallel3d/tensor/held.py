"""What is known of each parameter that this rank holds: its name, its spec, how it was cut."""

from dataclasses import dataclass
from math import prod

from torch import nn

from parallel3d.model.spec import ParamSpec
from parallel3d.tensor.cut import Cut, cut_of


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of this rank's stages, under its global name.

    `tied_across` marks a weight whose other copy lives on another pipeline coordinate; `copy` marks
    the second of the two, which is counted, saved and reported nowhere. `partial` marks a parameter
    whose gradient on each tp rank is a part of the whole: the engine sums it over tp.
    """

    name: str
    parameter: nn.Parameter
    spec: ParamSpec
    tied_across: bool = False
    copy: bool = False
    partial: bool = False

    @property
    def cut(self) -> Cut:
        """How tensor parallelism cut the parameter."""
        return cut_of(self.parameter)

    @property
    def elements(self) -> int:
        """Elements of this tensor-parallel rank's part."""
        return prod(self.cut.local_shape)

    @property
    def counts(self) -> bool:
        """Whether this rank's elements count where each of the model counts once."""
        return self.cut.counts and not self.copy
