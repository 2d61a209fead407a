"""torch.compile: of what lies between products, or of whole blocks, as this process was told.

Shapes do not change in a run (`dynamic=False`), so nothing is compiled again after the first step
and the first evaluation.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

Mode = Literal["none", "pointwise", "block"]
Given = ParamSpec("Given")
Made = TypeVar("Made")

_mode: Mode = "none"
_backend = "inductor"
_apart: list[list[Any]] = []  # functions that no block takes in, and why, until blocks are compiled


def use(mode: Mode, backend: str = "inductor") -> None:
    """Set what torch.compile compiles from now on, and by which of its backends."""
    global _mode, _backend
    _mode, _backend = mode, backend
    if mode == "none":
        return
    from torch._inductor import config  # it takes a second

    # Dropout masks stay a function of their place: drawn by torch's operators, not inductor's.
    config.fallback_random = True
    for function in _apart if mode == "block" else ():
        function[0] = torch.compiler.disable(function[0], reason=function[1])
    _apart.clear()


def compiles_pointwise() -> bool:
    """Whether functions marked `pointwise` are compiled, each by itself."""
    return _mode == "pointwise" and not torch.compiler.is_compiling()


def pointwise(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Compile a function of tensors by itself under "pointwise"; a compiled block takes it in.

    It may need no parameter but its arguments: ZeRO-3 gathers weights while their module runs.
    """

    @cache  # when it is first needed: to ask torch for it takes a second
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=_backend)

    @wraps(function)
    def run(*args: Given.args, **options: Given.kwargs) -> Made:
        return (compiled() if compiles_pointwise() else function)(*args, **options)

    return run


def apart(reason: str) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """Leave a function out of compiled blocks: a graph break, for the given reason."""

    def decorate(function: Callable[Given, Made]) -> Callable[Given, Made]:
        chosen: list[Any] = [function, reason]
        _apart.append(chosen)

        @wraps(function)
        def run(*args: Given.args, **options: Given.kwargs) -> Made:
            return chosen[0](*args, **options)

        return run

    return decorate


def compile_block(block: nn.Module) -> None:
    """Have a block's calls compiled under "block"; what cannot be compiled is counted."""
    if _mode == "block":
        block.compile(dynamic=False, backend=_backend)


class CompiledCounts(NamedTuple):
    """Graphs that this process has compiled, and how often each reason broke one."""

    graphs: int
    breaks: dict[str, int]


def counts() -> CompiledCounts:
    """Count what this process has compiled since it began."""
    from torch._dynamo.utils import counters

    breaks: Counter[str] = Counter()
    for text, times in counters["graph_break"].items():
        breaks[_reason(text)] += times
    return CompiledCounts(counters["stats"]["unique_graphs"], dict(breaks))


def _reason(text: str) -> str:
    """Ours, of a function that is left out on purpose; else the first line of what torch says."""
    if given := re.search(r"\(reason: (.*)\)", text):
        return given[1]
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown")


def in_words() -> str:
    """What a run's log says of compilation after its first step; "" where nothing is compiled."""
    if _mode == "none":
        return ""
    found = counts()
    said = [f"compile {_mode}: {found.graphs} graphs, {sum(found.breaks.values())} graph breaks"]
    return "\n".join([*said, *(f"  {times} x {reason}" for reason, times in found.breaks.items())])
