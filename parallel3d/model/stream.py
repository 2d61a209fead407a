"""The residual stream of one microbatch on one tensor-parallel rank (floor 0, no torch)."""

from typing import NamedTuple

from parallel3d.model.spec import Collective, Shape


class Stream(NamedTuple):
    """The activations that a layer's modules read and add to, on one tensor-parallel rank.

    - `sequence_parallel`: True if the ranks cut the sequence between modules; only with tp > 1.
    - `dropout`: True if a dropout follows each module, before the sum.
    """

    shape: Shape
    hidden: int
    tp: int = 1
    sequence_parallel: bool = False
    dropout: bool = False

    @property
    def full(self) -> int:
        """Elements of [batch, seq, hidden], the sbh of arXiv:2205.05198."""
        return self.shape.tokens * self.hidden

    @property
    def part(self) -> int:
        """Elements of one rank between modules: a tp-th of `full` under sequence parallelism."""
        return self.full // self.tp if self.sequence_parallel else self.full

    @property
    def gradients(self) -> int:
        """Elements of the gradients when a module's backward starts.

        The stream's gradient is also that of the module's output, unless a dropout is between them.
        """
        return self.part * (2 if self.dropout else 1)

    @property
    def gather(self) -> tuple[Collective, ...]:
        """The collective in front of a column-parallel product; the backward repeats it.

        It is that of the backward through a row-parallel product, too.
        """
        return (Collective("all_gather", self.full),) if self.sequence_parallel else ()

    @property
    def reduce(self) -> tuple[Collective, ...]:
        """The collective behind a row-parallel product.

        It is that of the backward through a column-parallel product, too.
        """
        if self.sequence_parallel:
            return (Collective("reduce_scatter", self.full),)
        return (Collective("all_reduce", self.full),) if self.tp > 1 else ()

    def share(self, number: int) -> int:
        """Return the largest part of `number` when the ranks' parts differ by at most one."""
        return -(-number // self.tp)
