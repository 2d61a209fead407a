"""torch's compiler stays unloaded in a run that compiles nothing.

It is 900 modules, sympy with it: 0.6 to 0.8 CPU seconds of every rank's start. Three things load
it, though nothing is compiled: functions marked as not to be compiled, where they are first called
(of torch's optimizers, of DeepSpeed) or marked (ZeRO-3's hooks); and a backward that is given a
gradient, whose shape torch compares symbolically. Where one of this module's ways no longer fits
torch, the compiler is loaded as ever, and nothing else changes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._compile
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
from torch import Tensor

_MARKED = (torch.optim.Optimizer, coordinator, coordinator.PartitionedParameterCoordinator)


def is_loaded() -> bool:
    """Whether this process has loaded torch's compiler."""
    return "torch._dynamo" in sys.modules


def call_directly() -> None:
    """Have functions that torch exempts from compiling at their first call run as they are."""
    for holder in _MARKED if not is_loaded() else ():
        for function in vars(holder).values():
            code = getattr(function, "__code__", None)
            exempt = getattr(function, "__wrapped__", None)
            if exempt and code and code.co_filename == torch._compile.__file__:
                exempt.__dynamo_disable = exempt


@contextmanager
def unloaded() -> Iterator[None]:
    """Have DeepSpeed build an engine without loading the compiler, if it is not loaded."""
    disable = torch.compiler.disable
    if not is_loaded():
        torch.compiler.disable = _as_it_is
    try:
        yield
    finally:
        torch.compiler.disable = disable


def _as_it_is(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """What stands for torch.compiler.disable: nothing is compiled from which it would exempt."""

    def same(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    return same if fn is None else fn


class _Seed(torch.autograd.Function):
    """A loss of 0 whose gradient by `output` is the one that is given."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad: Tensor) -> Tensor:
        if output.shape != grad.shape:
            shapes = f"{tuple(grad.shape)} for {tuple(output.shape)}"
            raise RuntimeError(f"a gradient's shape is not its output's: {shapes}")
        ctx.save_for_backward(grad)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad, None


def backward(output: Tensor, grad: Tensor | None) -> None:
    """`output.backward(grad)`, of any shape; None: output is a loss."""
    (output if grad is None else _Seed.apply(output, grad)).backward()  # type: ignore[no-untyped-call]
