"""Rules of a dim that is cut, where each rank works through its part piece by piece (floor 4)."""

from dataclasses import replace

from parallel3d.spmd.call import Call, Operand, Rule
from parallel3d.spmd.kinds import Cut, Kind, Mismatch, Piece

_OPERATORS = ("t", "transpose", "permute", "mm", "_to_copy", "copy", "detach", "alias", "add")


def of(call: Call, rule: Rule | None) -> Kind:
    """Rule of operators on pieces: as of the whole parts, giving a piece of the same place."""
    found = [o.kind for o in call.tensors() if isinstance(o.kind, Piece)]
    others = [o.kind for o in call.tensors() if isinstance(o.kind, Cut)]
    if call.op == "copy" and isinstance(call.args[1].kind, Piece):
        piece: Kind = call.args[1].kind
        return piece
    alike = len({(p.start, p.stop) for p in found}) == 1 and not others
    if rule is not None and call.op in _OPERATORS and alike:
        args = tuple(_whole(a) if isinstance(a, Operand) else a for a in call.args)
        kind = rule(replace(call, args=args))
        if isinstance(kind, Cut):
            return Piece(kind, found[0].start, found[0].stop)
    raise Mismatch(f"takes {found[0]}, which are not those of one rank that holds it whole")


def _whole(x: Operand) -> Operand:
    return Operand(x.kind.of, x.shape) if isinstance(x.kind, Piece) else x
