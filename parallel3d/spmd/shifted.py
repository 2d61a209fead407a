"""Rules of a softmax whose ranks begin with a maximum of their own, and mend it (floor 4).

With m a rank's own maximum of its logits x, and M that of all: x - m, exp(x - m) and its sums are
Shifted; m - M and exp(m - M) are a Shift, which makes x - M and exp(x - M) of them.
"""

from dataclasses import replace
from typing import Any

from parallel3d.spmd import indexing, moving, reducing
from parallel3d.spmd.call import Call, Operand
from parallel3d.spmd.kinds import (
    Cut,
    Kind,
    Mismatch,
    Partial,
    Picked,
    Replicated,
    Shift,
    Shifted,
)


def applies(call: Call) -> bool:
    """Whether a call is one of a softmax over shifted logits."""
    operands = call.tensors()
    if any(isinstance(o.kind, Shifted | Shift) for o in operands):
        return True
    if call.op != "sub" or len(operands) != 2:
        return False
    x, own = operands
    if isinstance(x.kind, Cut):
        dim = x.kind.mark.dim - len(x.shape)
        return _is_max(own.kind) and len(own.shape) == len(x.shape) and own.shape[dim] == 1
    return _is_max(x.kind) and isinstance(own.kind, Replicated)


def of(call: Call) -> Kind:
    """The kind that a call of a softmax over shifted logits gives."""
    kinds = [o.kind for o in call.tensors()]
    match call.op, kinds:
        case "sub", [Cut() as kind, Partial()]:
            return Shifted(kind)
        case "sub", [Partial(), Replicated()]:
            return Shift()
        case "exp", [Shifted(Cut(), False) | Shift(False)]:
            return replace(kinds[0], exp=True)  # type: ignore[type-var]
        case "add", [Shifted(Cut() | Picked() as kind, False), Shift(False)]:
            return kind
        case "mul", [Shifted(kind, True), Shift(True)]:
            return kind
        case "div", [Shift(True) as scale, Replicated()]:
            return scale
        case "copy", [_, kind]:
            return kind
        case "gather", [Shifted(Cut(), False), _]:
            return _within(call, indexing.gather)
        case "sum", [Shifted(_, True)]:
            return _within(call, reducing.reduce)
        case op, [Shifted() | Shift()] if op in moving.RULES:
            return _within(call, moving.RULES[op])
    found = next(k for k in kinds if isinstance(k, Shifted | Shift))
    raise Mismatch(f"takes a value that is {found}")


def _within(call: Call, rule: Any) -> Kind:
    """What the rule says of that which is shifted."""
    first = call.args[0]
    if isinstance(first.kind, Shift):
        return first.kind
    inner = Operand(first.kind.of, first.shape)
    kind = rule(replace(call, args=(inner, *call.args[1:])))
    return Shifted(kind[0] if isinstance(kind, tuple) else kind, first.kind.exp)


def _is_max(kind: Kind) -> bool:
    return isinstance(kind, Partial) and kind.op == "max"
