"""What one rank runs: its operators and collectives in order, on the meta device (floor 4)."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.spmd.group import PlayedGroup
from parallel3d.spmd.kinds import PerRank
from parallel3d.tensor.dropout import RandomKey

_HERE, _ROOT = Path(__file__).parent, Path(__file__).parents[2]
_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(dist.__file__).parents[1]),
    sys.base_prefix,
)
# Who calls them says more.
_CARRIERS = ("parallel3d/tensor/collectives.py", "parallel3d/tensor/compiled.py")


class Ref(NamedTuple):
    """One view of one storage: what a tensor is, whichever object torch makes of it."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class CallSite(NamedTuple):
    """Where in the code an operator was called, or, in a backward, its operator of the forward."""

    layer: str
    line: str
    backward: bool

    def __str__(self) -> str:
        where = f"{self.layer} ({self.line})" if self.line else self.layer
        return f"{where}, in the backward pass" if self.backward else where


@dataclass(frozen=True)
class Node:
    """One operator: Refs in place of its tensors, and what it wrote to, if that was there before.

    `pointwise` and `random` are torch's own tags. A number that differs between ranks is a PerRank.
    `of`: in the backward pass, which node of the forward pass it belongs to.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Ref, ...]
    place: CallSite
    written: Ref | None = None
    pointwise: bool = False
    random: bool = False
    of: int | None = None


@dataclass
class Program:
    """One rank's operators, and the tensors, none of which may go before all are told apart."""

    nodes: list[Node] = field(default_factory=list)
    _storages: dict[int, int] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)

    def ref(self, tensor: Tensor) -> Ref:
        """The view that a tensor is; storages are numbered in the order of their appearance."""
        storage = tensor.untyped_storage()._cdata
        if storage not in self._storages:
            self._storages[storage] = len(self._storages)
            self._alive.append(tensor)
        number = self._storages[storage]
        return Ref(number, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def refs(self, value: Any) -> Any:
        """The arguments `value` with Refs in place of tensors, lists and tuples as tuples."""
        if isinstance(value, Tensor):
            return self.ref(value)
        if isinstance(value, Ref):
            return value
        if isinstance(value, list | tuple):
            return tuple(self.refs(v) for v in value)
        return value


class Differs(Exception):
    """The error that ranks do not run the same operators, with the place."""


def joined(programs: Sequence[Program]) -> list[Node]:
    """The nodes of all ranks as one list; Differs where they do not run the same."""
    nodes = []
    for of_ranks in zip(*(p.nodes for p in programs), strict=False):
        first, *others = of_ranks
        for rank_node in others:
            if first.op != rank_node.op:
                raise Differs(
                    f"{first.place}: one rank runs {first.op}, another {rank_node.op}; all ranks "
                    "of a tensor-parallel group run the same operators"
                )
        args = _join([n.args for n in of_ranks])
        kwargs = {name: _join([n.kwargs.get(name) for n in of_ranks]) for name in first.kwargs}
        nodes.append(replace(first, args=args, kwargs=kwargs))
    if len({len(p.nodes) for p in programs}) > 1:
        raise Differs(f"{nodes[-1].place}: after it the ranks run different operators")
    return nodes


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Ref):
        return first
    if isinstance(first, tuple):
        return tuple(_join(v) for v in zip(*values, strict=False))
    if isinstance(first, int | float) and any(v != first for v in values):
        return PerRank(values)
    return first


class TracedKey(RandomKey):
    """A key of dropout masks that only notes what generators would be seeded with."""

    seeded = 0
    drawn = 0

    def seed_generator(self, place: str, tp_rank: int, device: torch.device) -> None:
        """Seed a CPU's generator, whatever the device; the caller restores it."""
        super().seed_generator(place, tp_rank, torch.device("cpu"))
        self.seeded, self.drawn = torch.initial_seed(), 0


class Tracer(TorchDispatchMode):
    """Notes what this process runs, while active, as rank `rank` of a group of `size`."""

    def __init__(self, rank: int, size: int, dp_coord: int = 0) -> None:
        super().__init__()
        self.program, self.key = Program(), TracedKey(0, dp_coord)
        self.group = PlayedGroup(rank, size, self.note_collective)
        self._layers: list[str] = []
        self._forward: dict[int, tuple[CallSite, int]] = {}  # of an autograd node

    def name_layers(self, module: nn.Module, name: str) -> None:
        """Have places name the submodules of a module, which is called `name`."""
        for path, part in module.named_modules(prefix=name):
            part.register_forward_pre_hook(lambda *_, path=path: self._layers.append(path))
            part.register_forward_hook(lambda *_: self._layers.pop() and None, always_call=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, which computes nothing on the meta device, and note it."""
        kwargs = kwargs or {}
        name, in_place, pointwise, random = _about(func)
        before = self.program.refs(tuple(args))
        written = self.program.ref(args[0]) if in_place else None
        result = func(*args, **kwargs)
        if "out" in kwargs:
            written = self.program.ref(kwargs["out"])
        self._note(
            name,
            before,
            {k: self.program.refs(v) for k, v in kwargs.items() if k != "out"},
            result,
            written=written,
            pointwise=pointwise,
            random=random,
        )
        return result

    def note_collective(
        self, name: str, given: Sequence[Tensor], results: Sequence[Tensor], op: str = ""
    ) -> None:
        """Note a collective of the group, which writes `results`, one of each that is given.

        Rows of one tensor are noted as that, [rows, elements].
        """
        before, after = self._rows(given), self._rows(results)
        is_of_rows = len(given) > 1 and before is not None and after is not None
        pairs = [(before, after)] if is_of_rows else list(zip(given, results, strict=True))
        for x, result in pairs:
            args, ref = (self.program.refs(x), op, is_of_rows), self.program.refs(result)
            self._note(name, args, {}, (ref,), written=ref)

    def _rows(self, tensors: Sequence[Tensor]) -> Ref | None:
        """Flat tensors that lie one behind the other, as one; None of others."""
        first, *others = (self.program.ref(t) for t in tensors)
        size, *more = first.shape
        for i, other in enumerate(others, 1):
            if more or other != first._replace(offset=first.offset + i * size):
                return None
        return Ref(first.storage, first.offset, (len(tensors), size), (size, 1))

    def _note(
        self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any,
        written: Ref | None, pointwise: bool = False, random: bool = False,
    ) -> None:  # fmt: skip
        outs = self.program.refs(result if isinstance(result, list | tuple) else (result,))
        outs = tuple(out for out in outs if isinstance(out, Ref))
        if random:
            kwargs = {**kwargs, "seed": (self.key.seeded, self.key.drawn)}
            self.key.drawn += 1
        place, of = self._place()
        node = Node(op, args, kwargs, outs, place, written, pointwise, random, of)
        self.program.nodes.append(node)

    def _place(self) -> tuple[CallSite, int | None]:
        line, is_carrier = _calling_line()
        node = torch._C._current_autograd_node()
        if node is None:
            place = CallSite(self._layers[-1] if self._layers else "", line, False)
            # torch has made the node of an operator when it comes here.
            number = torch._C._autograd._get_sequence_nr() - 1
            self._forward.setdefault(number, (place, len(self.program.nodes)))
            return place, None
        if self._layers:  # a forward that is run again
            place = CallSite(self._layers[-1], line, True)
            number = torch._C._autograd._get_sequence_nr() - 1
            self._forward.setdefault(number, (place, len(self.program.nodes)))
            return place, None
        of_forward, index = self._forward.get(node._sequence_nr(), (None, None))
        if of_forward is None:
            return CallSite("", line, True), None
        if is_carrier or not line:
            line = of_forward.line
        return CallSite(of_forward.layer, line, True), index


@cache
def _about(func: Any) -> tuple[str, bool, bool, bool]:
    """An operator's name, whether it writes its first argument; is pointwise; draws numbers."""
    name = func._schema.name.removeprefix("aten::")
    in_place = func._schema.is_mutable and name.endswith("_")
    random = torch.Tag.nondeterministic_seeded in func.tags
    pointwise = torch.Tag.pointwise in func.tags
    return name.removesuffix("_") if in_place else name, in_place, pointwise, random


@cache
def _kind_of_file(name: str) -> str:
    if name.startswith(str(_HERE)):
        return "here"
    return "library" if name.startswith((*_LIBRARIES, "<")) else "program"


@cache
def _shown(name: str) -> str:
    """A file's name as findings have it: in this project from its root on."""
    path = Path(name)
    return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else name


def _calling_line() -> tuple[str, bool]:
    """The file and line in the program that called what is running; "" of autograd's own.

    And whether it is that of a collective, for want of one that called it.
    """
    frame, found = sys._getframe(1), ""
    while frame is not None and _kind_of_file(frame.f_code.co_filename) == "here":
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None:
        name = frame.f_code.co_filename
        kind = _kind_of_file(name)
        if kind == "here":
            break
        if kind == "program":
            shown = _shown(name)
            found = found or f"{shown}:{frame.f_lineno}"
            if shown not in _CARRIERS:
                return f"{shown}:{frame.f_lineno}", False
        frame = frame.f_back  # type: ignore[assignment]
    return found, bool(found)
