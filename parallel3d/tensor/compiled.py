"""Apply torch.compile to pointwise functions or to whole blocks, by a mode of the process.

Shapes do not change during a run (`dynamic=False`), so nothing is compiled after the first step and
the first evaluation.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

Mode = Literal["none", "pointwise", "block"]
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_mode: Mode = "none"
_backend = "inductor"
_excluded: list[list[object]] = []  # functions left out of blocks, each with its reason


def set_mode(mode: Mode, backend: str = "inductor") -> None:
    """Set what torch.compile compiles from now on, and its backend."""
    global _mode, _backend
    _mode, _backend = mode, backend
    if mode == "none":
        return
    from torch._inductor import config  # it takes a second

    # Draw dropout masks by torch's operators, so that they depend on their place, compiled or not.
    config.fallback_random = True
    for function in _excluded if mode == "block" else ():
        function[0] = torch.compiler.disable(function[0], reason=function[1])
    _excluded.clear()


def compiles_pointwise() -> bool:
    """Return True if functions marked `pointwise` are compiled one by one."""
    return _mode == "pointwise" and not torch.compiler.is_compiling()


def pointwise(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Compile a function of tensors by itself in mode "pointwise"; compiled blocks inline it.

    It must get parameters as arguments: ZeRO-3 gathers weights only while their module runs.
    """

    @cache  # on first use: importing torch's compiler takes a second
    def compiled() -> Callable[Arguments, Returned]:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=_backend)

    @wraps(function)
    def run(*args: Arguments.args, **options: Arguments.kwargs) -> Returned:
        return (compiled() if compiles_pointwise() else function)(*args, **options)

    return run


def graph_break(
    reason: str,
) -> Callable[[Callable[Arguments, Returned]], Callable[Arguments, Returned]]:
    """Leave the decorated function out of compiled blocks: a graph break with this reason."""

    def decorate(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        entry: list[Any] = [function, reason]
        if _mode == "block":  # its file is imported after `set_mode`
            entry[0] = torch.compiler.disable(function, reason=reason)
        else:
            _excluded.append(entry)

        @wraps(function)
        def run(*args: Arguments.args, **options: Arguments.kwargs) -> Returned:
            return entry[0](*args, **options)

        return run

    return decorate


def compile_block(block: nn.Module) -> None:
    """Compile a block's calls in mode "block"; graph breaks are counted."""
    if _mode == "block":
        block.compile(dynamic=False, backend=_backend)


class CompiledCounts(NamedTuple):
    """The number of compiled graphs, and of graph breaks for each reason."""

    graphs: int
    breaks: dict[str, int]


def counts() -> CompiledCounts:
    """Return what this process has compiled so far."""
    from torch._dynamo.utils import counters

    texts = Counter(counters["graph_break"]).elements()
    return CompiledCounts(counters["stats"]["unique_graphs"], dict(Counter(map(_reason, texts))))


def _reason(text: str) -> str:
    """Return our reason of a `graph_break`, else the first line of torch's explanation."""
    if match := re.search(r"\(reason: (.*)\)", text):
        return match[1]
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown")


def describe() -> str:
    """Return the log lines about compilation after the first step; "" in mode "none"."""
    if _mode == "none":
        return ""
    graphs, breaks = counts()
    lines = [f"compile {_mode}: {graphs} graphs, {sum(breaks.values())} graph breaks"]
    return "\n".join([*lines, *(f"  {times} x {reason}" for reason, times in breaks.items())])
