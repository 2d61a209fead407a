"""Torch's compiler, left unloaded where nothing is compiled: 1.6 s of a CPU in each process.

Torch and DeepSpeed mark functions that no compiled code may take in, optimizers' among them; to
mark one, or to call it for the first time, loads the compiler. As long as nobody else has loaded
it, nothing is compiled, so a marked function may be called as it is. (Activation checkpointing
loads it in any case: torch 2.13 reads a setting of the compiler's in each call.)
"""

import gc
import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch


def leave_unloaded() -> None:
    """Have no function load the compiler because it is marked; who compiles loads it still."""
    if _is_loaded():
        return
    marked = torch._compile._disable_dynamo(lambda: None).__code__
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__ is marked:
            _keep(function)
    torch.compiler.disable = partial(_mark, torch.compiler.disable)


def _is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def _keep(function: Callable[..., Any]) -> None:
    """Let one of torch's marked functions ask for its mark when the compiler is there."""
    plain = inspect.unwrap(function)

    @wraps(plain)
    def run(*args: Any, **options: Any) -> Any:
        if not _is_loaded():
            return plain(*args, **options)
        vars(plain).pop("__dynamo_disable", None)
        return function(*args, **options)

    vars(plain).setdefault("__dynamo_disable", run)  # where torch 2.11 to 2.13 look for the mark


def _mark(
    disable: Callable[..., Any],
    function: Any = None,
    recursive: bool = True,
    *,
    reason: str | None = None,
) -> Any:
    """torch.compiler.disable, which marks when the function is called and the compiler is there."""
    if function is None:
        return partial(_mark, disable, recursive=recursive, reason=reason)
    if _is_loaded() or not inspect.isfunction(function):
        return disable(function, recursive=recursive, reason=reason)
    found: list[Callable[..., Any]] = []

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if not _is_loaded():
            return function(*args, **options)
        if not found:
            found.append(disable(function, recursive=recursive, reason=reason))
        return found[0](*args, **options)

    return run
