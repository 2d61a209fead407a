"""Apply torch.compile to pointwise functions or to whole blocks.

Shapes do not change during a run (`dynamic=False`), so nothing is compiled after the first step and
the first evaluation. What changes, as documents do, stays outside the graphs (`graph_break`).
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cached_property, wraps
from importlib import import_module
from shutil import which
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

Mode = Literal["none", "pointwise", "block"]
Setting = Literal["auto", "none", "pointwise", "block"]
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

BACKEND: Any = "inductor"
"""The backend of torch.compile; tests have another."""
GRAPHS = 64
"""The most graphs of one function: norms of several widths, in training and in evaluations."""
WITHOUT_TRITON = (
    "compile WARNING: nothing is compiled, because Triton or a C compiler for it is missing here, "
    "or it does not know this device; the step is 5 to 8 % slower (train.compile)"
)
_LIMIT = "Dynamo recompile limit"  # how torch's note on a function with more graphs begins
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
        _allow_graphs()
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


def _allow_graphs() -> None:
    """Raise torch's limit of graphs; beyond it a pointwise function fails, and a block is slow."""
    from torch._dynamo import config  # it takes a second

    config.recompile_limit = max(config.recompile_limit, GRAPHS)


def mode_on(device: torch.device, setting: Setting) -> Mode:
    """Return what is compiled; "auto" is "pointwise" on CUDA devices for which Triton compiles."""
    if setting != "auto":
        return setting
    return "pointwise" if device.type == "cuda" and _has_triton(device) else "none"


def _has_triton(device: torch.device) -> bool:
    """Return True if Triton imports, has a C compiler, and knows the device."""
    try:
        import_module("triton")  # comes with torch on CUDA
    except Exception:  # a broken installation raises more than ImportError
        return False
    has_compiler = any(map(which, (os.environ.get("CC", "cc"), "gcc", "clang")))
    return has_compiler and torch.cuda.get_device_capability(device) >= (7, 0)


def compile_block(block: nn.Module) -> None:
    """Compile a block's calls; graph breaks are counted."""
    from torch._functorch import config as functorch  # both take a second
    from torch._inductor import config

    # Draw dropout masks by torch's operators, so that they depend on their place, compiled or not.
    config.fallback_random = True
    for function in _excluded:
        function[0] = torch.compiler.disable(function[0], reason=function[1])
    _excluded.clear()
    _allow_graphs()
    # Views that a graph returns before a break, as q, k and v of a fused product: torch 2.13 makes
    # them again by sizes that it has freed ("invalid shape dimension").
    functorch.view_replay_for_aliased_outputs = False
    block.compile(dynamic=False, backend=BACKEND)


class CompiledCounts(NamedTuple):
    """Graphs that were compiled, graph breaks for each reason, and limits that were reached."""

    graphs: int
    breaks: dict[str, int]
    limits: int
    """How often a function had more graphs than torch allows: it runs uncompiled since."""


def counts() -> CompiledCounts:
    """Return what this process has compiled so far."""
    from torch._dynamo.utils import counters

    texts = Counter(counters["graph_break"]).elements()
    reasons = dict(Counter(map(_reason, texts)))
    notes = counters["unimplemented"].items()
    limits = sum(times for text, times in notes if text.startswith(_LIMIT))
    return CompiledCounts(counters["stats"]["unique_graphs"], reasons, limits)


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
    graphs, breaks, limits = counts()
    lines = [f"compile {mode}: {graphs} graphs, {sum(breaks.values())} graph breaks"]
    lines += [f"  {times} x {reason}" for reason, times in breaks.items()]
    if limits:
        lines.append(describe_limits(limits))
    return "\n".join(lines)


def describe_limits(limits: int) -> str:
    """Return the warning that functions run uncompiled."""
    return (
        f"compile WARNING: {limits} x a function got more than {GRAPHS} graphs and runs uncompiled "
        "from now on, slowly; TORCH_LOGS=recompiles names it and its changing input"
    )
