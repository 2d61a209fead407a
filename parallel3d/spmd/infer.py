"""The kinds of all values of a program, from those of its inputs (floor 4)."""

from collections.abc import Iterable
from math import prod
from typing import Any, Literal, NamedTuple

from parallel3d.spmd import (
    collectives,
    indexing,
    moving,
    pieces,
    pointwise,
    products,
    reducing,
    shifted,
)
from parallel3d.spmd.call import Call, Operand, Rule
from parallel3d.spmd.kinds import (
    EMPTY,
    REPLICATED,
    UNKNOWN,
    ZERO,
    Cut,
    Empty,
    Gathered,
    Kind,
    Mark,
    Mismatch,
    NoRule,
    PerRank,
    Piece,
    Replicated,
    Unknown,
    Zero,
)
from parallel3d.spmd.marks import Move, moved, through_view
from parallel3d.spmd.trace import CallSite, Node, Ref

RULES: dict[str, Rule] = {
    **moving.RULES, **pointwise.RULES, **reducing.RULES, **products.RULES, **indexing.RULES,
}  # fmt: skip
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


class Finding(NamedTuple):
    """A mismatch and its place, or (`is_error` False) an operator that could not be judged."""

    place: CallSite
    text: str
    is_error: bool = True


class Inference:
    """Follows the nodes of a program on one axis; `findings` has what did not match.

    A collective of `tp` ranks moves what data parallelism cuts, and sums none of it.
    """

    def __init__(self, tp: int, axis: Literal["tp", "dp"] = "tp") -> None:
        self.tp, self.axis = tp, axis
        self.findings: list[Finding] = []
        self._kinds: dict[Ref, Kind] = {}
        self._views: dict[int, list[Ref]] = {}  # of a storage
        self._moved: dict[Ref, tuple[Ref, Call]] = {}  # from which view an operator moved it
        self._expanded: dict[int, Kind] = {}  # what a node expanded
        self._own_part: dict[Ref, tuple[Ref, int]] = {}  # of which view, along which dim

    def set(self, ref: Ref, kind: Kind) -> None:
        """Set the kind of a view."""
        if ref not in self._kinds:
            self._views.setdefault(ref.storage, []).append(ref)
        self._kinds[ref] = kind

    def kind(self, ref: Ref) -> Kind:
        """The kind of a view; of one that autograd made behind the dispatcher, its likeness's."""
        if ref in self._kinds:
            return self._kinds[ref]
        for other in self._views.get(ref.storage, ()):
            if prod(other.shape) == prod(ref.shape) and other.offset == ref.offset:
                return self._seen_as(self._kinds[other], other, ref)
        return UNKNOWN

    def follow(self, nodes: Iterable[Node]) -> None:
        """Give every value of the nodes its kind."""
        for index, node in enumerate(nodes):
            if node.op == "expand" and isinstance(node.args[0], Ref):
                self._expanded[index] = self.kind(node.args[0])
            try:
                kinds = self._of(node)
            except Mismatch as error:
                self.findings.append(Finding(node.place, f"{node.op} {error}"))
                kinds = (UNKNOWN,) * len(node.outs)
            except NoRule:
                said = ", ".join(str(o.kind) for o in self._call(node).tensors())
                text = f"{node.op} has no rule for values that are: {said}"
                self.findings.append(Finding(node.place, text, is_error=False))
                kinds = (UNKNOWN,) * len(node.outs)
            except Exception as error:  # a rule that knows too little must not stop a run
                text = f"{node.op} breaks its rule: {error!r}"
                self.findings.append(Finding(node.place, text, is_error=False))
                kinds = (UNKNOWN,) * len(node.outs)
            try:
                self._keep(node, kinds)
            except Mismatch as error:  # a part is written that has no such place in its whole
                self.findings.append(Finding(node.place, f"{node.op} {error}"))
                self._keep(node, (UNKNOWN,) * len(node.outs))

    def _of(self, node: Node) -> tuple[Kind, ...]:
        call = self._call(node)
        operands = call.tensors()
        if node.op in _COLLECTIVES:
            return (self._collective(node, operands[0]),)
        rule = _rule_of(node)
        if rule is not None and rule in _MAKERS:
            return (_one(rule(call)),) * len(node.outs)
        if operands and (node.op == "copy" or node.kwargs.get("beta") == 0):
            operands = operands[1:]  # nothing of what is there stays
        if any(isinstance(o.kind, Unknown | Empty) for o in operands):
            moves = rule in moving.RULES.values() or node.op in ("detach", "alias")
            stays = operands[0].kind == EMPTY and moves
            return (EMPTY if stays else UNKNOWN,) * len(node.outs)
        if any(isinstance(o.kind, Piece) for o in operands):
            return (pieces.of(call, rule),) * len(node.outs)
        if shifted.applies(call):
            return (shifted.of(call),) * len(node.outs)
        # Whatever the operator, of values that all ranks have they make the same.
        plain = all(_is_plain(o.kind) for o in operands) and any(o.kind != ZERO for o in operands)
        if plain and not _has_per_rank(node) and not node.random and rule is not moving.expand:
            return (REPLICATED,) * len(node.outs)
        if rule is None:
            raise NoRule
        if node.op == "sum" and node.of in self._expanded:
            return (reducing.of_expanded(call, self._expanded[node.of]),)
        kinds = rule(call)
        return kinds if isinstance(kinds, tuple) else (kinds,) * len(node.outs)

    def _call(self, node: Node) -> Call:
        def operands(value: Any) -> Any:
            if isinstance(value, Ref):
                return Operand(self.kind(value), value.shape)
            if isinstance(value, tuple) and not isinstance(value, PerRank):
                return tuple(operands(v) for v in value)
            return value

        args = tuple(operands(a) for a in node.args)
        kwargs = {name: operands(v) for name, v in node.kwargs.items()}
        shapes = tuple(o.shape for o in node.outs)
        return Call(node.op, args, kwargs, shapes, self.tp, self.axis)

    def _collective(self, node: Node, x: Operand) -> Kind:
        given, op, is_of_rows = node.args
        if isinstance(x.kind, Unknown | Empty):
            return UNKNOWN
        if is_of_rows:
            return collectives.of_rows(node.op, x, op, self.tp, self.axis)
        if self.axis == "dp":
            kind = collectives.across(node.op, x, self.tp)
        elif node.op == "all_reduce":
            return collectives.all_reduce(x, op)
        elif node.op == "all_gather":
            kind = collectives.all_gather(x, self.tp)
        else:
            kind = collectives.reduce_scatter(x, op, self._home(given), self.tp)
        flat = (prod(node.outs[0].shape),)
        return moved(kind, lambda m: through_view(m, flat, node.outs[0].shape), self.tp)

    def _home(self, given: Ref) -> Mark | None:
        """Where the parts lie, one for each rank, that a flat value has in the dim before all."""
        path, ref = [], given
        ranks: Mark | None = through_view(Mark(0), (prod(given.shape),), given.shape)
        while ref in self._moved and ranks is not None:
            source, call = self._moved[ref]
            back = _inverse(call)
            if back is None:
                break
            path.append((source, call))
            ranks, ref = back(ranks), source
        if ranks is None:
            return None
        home: Mark | None = Mark(ranks.dim, ranks.runs * self.tp)
        for _, call in reversed(path):
            move = moving.move_of(call)
            if move is None or home is None:
                return None
            home = move(home)
        if home is None:
            return None
        return through_view(home, given.shape, (prod(given.shape),))

    def _keep(self, node: Node, kinds: tuple[Kind, ...]) -> None:
        if node.written is not None:
            self._write(node.written, kinds[0])
            return
        for ref, kind in zip(node.outs, kinds, strict=True):
            self.set(ref, kind)
        first = node.args[0] if node.args else None
        if not isinstance(first, Ref) or not node.outs:
            return
        call = self._call(node)
        if node.outs[0] != first and moving.move_of(call):
            self._moved[node.outs[0]] = first, call
        if node.op == "slice" and _has_per_rank(node):
            self._own_part[node.outs[0]] = first, call.arg(1, 0) % len(first.shape)

    def _write(self, ref: Ref, kind: Kind) -> None:
        """A view is written: what the other views of its storage show of it changes, too."""
        if ref in self._own_part:
            base, dim = self._own_part[ref]
            before = self.kind(base)
            kind_of_base: Kind = UNKNOWN
            if before == ZERO and not isinstance(kind, Unknown):
                kind_of_base = moving.placed(kind, dim)
            self.set(base, kind_of_base)
            self.set(ref, kind)
            return
        self.set(ref, kind)
        for other in self._views[ref.storage]:
            if other == ref or not _overlap(ref, other):
                continue
            seen = self._seen_as(kind, ref, other)
            if prod(other.shape) > prod(ref.shape):  # the rest stays
                seen = _both(self._kinds[other], seen)
            self._kinds[other] = seen

    def _seen_as(self, kind: Kind, ref: Ref, other: Ref) -> Kind:
        """What another view of a storage shows, where `ref` shows `kind`."""
        if isinstance(kind, Piece):
            dim = kind.of.mark.dim
            same = ref.stride == other.stride and len(ref.shape) == len(other.shape)
            is_at = same and ref.offset - other.offset == kind.start * ref.stride[dim]
            return kind.of if is_at else UNKNOWN
        has_place = isinstance(kind, Cut | Gathered) or (isinstance(kind, Replicated) and kind.free)
        if not has_place or ref.shape == other.shape:
            return kind
        if prod(ref.shape) == prod(other.shape) and _in_order(ref) and _in_order(other):
            return moved(kind, lambda m: through_view(m, ref.shape, other.shape), self.tp)
        if len(ref.shape) == len(other.shape) and ref.stride == other.stride:
            return kind
        return REPLICATED if isinstance(kind, Replicated) else UNKNOWN


_MAKERS: tuple[Rule, ...] = (moving._created, pointwise.draw)


def _one(kinds: Kind | tuple[Kind, ...]) -> Kind:
    return kinds[0] if isinstance(kinds, tuple) else kinds


def _rule_of(node: Node) -> Rule | None:
    rule = RULES.get(node.op)
    if rule is None and node.op.startswith("_scaled_dot_product"):
        return products.attention
    if rule is None and node.pointwise:
        is_backward = node.op.endswith("_backward")
        return pointwise.backward_of_pointwise if is_backward else pointwise.nonlinear
    return rule


def _is_plain(kind: Kind) -> bool:
    return isinstance(kind, Zero) or (isinstance(kind, Replicated) and kind.free is None)


def _has_per_rank(node: Node) -> bool:
    return any(isinstance(a, PerRank) for a in (*node.args, *node.kwargs.values()))


def _in_order(ref: Ref) -> bool:
    stride = 1
    for size, found in zip(reversed(ref.shape), reversed(ref.stride), strict=True):
        if size > 1 and found != stride:
            return False
        stride *= size
    return True


def _overlap(a: Ref, b: Ref) -> bool:
    """Whether views of one storage may share an element."""
    first, second = sorted((a, b), key=lambda ref: ref.offset)
    spans = zip(first.shape, first.stride, strict=True)
    return second.offset <= first.offset + sum((n - 1) * stride for n, stride in spans)


def _both(before: Kind, written: Kind) -> Kind:
    """What a view holds of which a part is written, and the rest as it was."""
    if isinstance(before, Empty | Zero) or before == written:
        return written
    return before if isinstance(written, Zero) else UNKNOWN


def _inverse(call: Call) -> Move | None:
    """How an operator that moves all elements brings a mark back."""
    move = moving.move_of(call)
    if move is None or call.op == "unsqueeze":
        return None
    old, new = call.args[0].shape, call.shapes[0]
    if call.op in ("permute", "transpose", "t"):
        forward = {move(Mark(d)): d for d in range(len(old))}
        return lambda mark: Mark(forward[Mark(mark.dim)], mark.runs)
    return lambda mark: through_view(mark, new, old)
