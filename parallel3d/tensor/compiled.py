"""Apply torch.compile to pointwise functions or to whole blocks.

Shapes do not change during a run (`dynamic=False`), so nothing is compiled after the first step and
the first evaluation.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

Mode = Literal["none", "pointwise", "block"]
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

BACKEND: Any = "inductor"
"""The backend of torch.compile; tests have another."""
_excluded: list[list[object]] = []  # functions left out of blocks, each with its reason


class Pointwise(Generic[Arguments, Returned]):
    """A function of tensors that can be compiled by itself; compiled blocks inline it.

    It must get parameters as arguments: ZeRO-3 gathers weights only while their module runs.
    """

    def __init__(self, function: Callable[Arguments, Returned]) -> None:
        self.function = function

    def __call__(self, *args: Arguments.args, **options: Arguments.kwargs) -> Returned:
        """Call the function as it is."""
        return self.function(*args, **options)

    def compiled_if(self, chosen: bool) -> Callable[Arguments, Returned]:
        """Return the function that compiles itself on its first call, or the function as it is.

        Not before: while a model is built, DeepSpeed replaces functions that a graph may have.
        """
        return self.compiled if chosen else self.function

    def compiled(self, *args: Arguments.args, **options: Arguments.kwargs) -> Returned:
        """Call the compiled function."""
        return self._graph(*args, **options)

    @cached_property
    def _graph(self) -> Callable[Arguments, Returned]:
        return torch.compile(self.function, fullgraph=True, dynamic=False, backend=BACKEND)


def graph_break(
    reason: str,
) -> Callable[[Callable[Arguments, Returned]], Callable[Arguments, Returned]]:
    """Leave the decorated function out of compiled blocks: a graph break with this reason."""

    def decorate(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        entry: list[Any] = [function, reason]
        if "torch._dynamo" in sys.modules:  # blocks may have been compiled
            entry[0] = torch.compiler.disable(function, reason=reason)
        else:  # to import torch's compiler takes a second
            _excluded.append(entry)

        @wraps(function)
        def run(*args: Arguments.args, **options: Arguments.kwargs) -> Returned:
            return entry[0](*args, **options)

        return run

    return decorate


def compile_block(block: nn.Module) -> None:
    """Compile a block's calls; graph breaks are counted."""
    from torch._inductor import config  # it takes a second

    # Draw dropout masks by torch's operators, so that they depend on their place, compiled or not.
    config.fallback_random = True
    for function in _excluded:
        function[0] = torch.compiler.disable(function[0], reason=function[1])
    _excluded.clear()
    block.compile(dynamic=False, backend=BACKEND)


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
    match = re.search(r"\(reason: (.*)\)", text)
    if match:
        return match[1]
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else "unknown"


def describe(mode: Mode) -> str:
    """Return the log lines about compilation after the first step; "" in mode "none"."""
    if mode == "none":
        return ""
    graphs, breaks = counts()
    lines = [f"compile {mode}: {graphs} graphs, {sum(breaks.values())} graph breaks"]
    return "\n".join([*lines, *(f"  {times} x {reason}" for reason, times in breaks.items())])
