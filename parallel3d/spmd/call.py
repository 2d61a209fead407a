"""One call of an operator, as the rules see it (floor 4)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from parallel3d.spmd.kinds import Kind, PerRank

Shape = tuple[int, ...]


class Operand(NamedTuple):
    """A tensor that an operator takes."""

    kind: Kind
    shape: Shape


@dataclass(frozen=True)
class Call:
    """An operator, its arguments with Operands for tensors, and the shapes of its results.

    `axis`: the one along which its operands are replicated, partial or cut.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[Shape, ...]
    tp: int
    axis: Literal["tp", "dp"] = "tp"

    def tensors(self) -> list[Operand]:
        """The operands of the call, those within lists, too."""
        return list(_operands((*self.args, *self.kwargs.values())))

    def arg(self, index: int, default: Any = None) -> Any:
        """A positional argument."""
        return self.args[index] if index < len(self.args) else default

    def differs(self) -> bool:
        """Whether a number that the operator takes differs between ranks."""
        return any(isinstance(a, PerRank) for a in self.args)


Rule = Callable[[Call], Kind | tuple[Kind, ...]]
"""The kinds of what a call gives: one for all, or each its own. Raises Mismatch and NoRule."""


def _operands(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from _operands(v)
