"""What must hold between settings, and the arithmetic of mesh and batch.

A check names, as its parameters, the settings that it compares; it runs where all of them are sound
by themselves. Every model family has the sizes that are compared here: num_attention_heads,
num_hidden_layers, inner_size, max_position_embeddings and vocab_size.
"""

from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

from parallel3d.config.section import Problem, Problems
from parallel3d.config.settings import DataConfig, MeshConfig


def find_problems(settings: Mapping[str, Any]) -> list[Problem]:
    """All that is wrong between the settings given."""
    problems: list[Problem] = []
    for check in CHECKS:
        names = signature(check).parameters
        if settings.keys() >= names.keys():
            problems += check(**{name: settings[name] for name in names})
    return problems


def data_parallel_size(mesh: MeshConfig, world_size: int) -> int:
    """The dp that makes `mesh` one of `world_size` ranks; raises ConfigError if none does."""
    others = mesh.pp * mesh.tp
    if world_size % others:
        rule = f"pp={mesh.pp} x tp={mesh.tp} = {others} does not divide {world_size} processes"
        fitting = max(1, world_size // others) * others
        remedy = f"start {fitting} processes, or choose a pp x tp that divides {world_size}"
        raise Problems([Problem("parallel3d.mesh", mesh.model_dump(), rule, remedy)])
    if mesh.dp not in ("auto", world_size // others):
        size = others * int(mesh.dp)
        rule = f"{mesh} is {size} ranks, but there are {world_size} processes"
        remedy = f'start {size} processes, or set dp to {world_size // others} or "auto"'
        raise Problems([Problem("parallel3d.mesh.dp", mesh.dp, rule, remedy)])
    return world_size // others


def _check_heads(mesh: MeshConfig, model: Any) -> Iterator[Problem]:
    heads = model.num_attention_heads
    if heads % mesh.tp:
        rule = f"does not divide num_attention_heads={heads}"
        yield Problem("parallel3d.mesh.tp", mesh.tp, rule, f"use tp = {_divisors(heads)}")


def _check_inner_size(mesh: MeshConfig, model: Any) -> Iterator[Problem]:
    size = model.inner_size
    # A tp that does not divide the heads is already a problem.
    if size % mesh.tp and model.num_attention_heads % mesh.tp == 0:
        rule = f"is not a multiple of tp={mesh.tp}"
        remedy = f"use {size // mesh.tp * mesh.tp + mesh.tp}, or another mesh.tp"
        yield Problem("parallel3d.model.intermediate_size", size, rule, remedy)


def _check_layers(mesh: MeshConfig, model: Any) -> Iterator[Problem]:
    num_layers = model.num_hidden_layers + 2
    if mesh.pp > num_layers:
        rule = f"is more stages than the {num_layers} layers (blocks, embedding and head)"
        yield Problem("parallel3d.mesh.pp", mesh.pp, rule, f"use pp = {num_layers} or less")


def _check_sequence(data: DataConfig, model: Any) -> Iterator[Problem]:
    length, limit = data.sequence_length, model.max_position_embeddings
    if length > limit:
        rule = f"is longer than the model's max_position_embeddings={limit}"
        remedy = f"use at most {limit}, or raise max_position_embeddings"
        yield Problem("parallel3d.data.sequence_length", length, rule, remedy)


def _check_tp_of_vocabulary(mesh: MeshConfig, model: Any) -> Iterator[Problem]:
    size = model.vocab_size
    if size != "auto" and size < mesh.tp:
        rule = f"leaves some of tp={mesh.tp} ranks without a token"
        yield Problem("parallel3d.model.vocab_size", size, rule, f"use {mesh.tp} or more")


def _check_trained_vocabulary(data: DataConfig, model: Any) -> Iterator[Problem]:
    if data.tokenizer == "train":
        yield from _check_vocabulary(data.vocab_size, model)


def _check_vocabulary(tokenizer_size: int, model: Any) -> Iterator[Problem]:
    size = model.vocab_size
    if size != "auto" and size < tokenizer_size:
        rule = f"is smaller than the tokenizer's {tokenizer_size} tokens"
        remedy = f'use {tokenizer_size} or more, or "auto"'
        yield Problem("parallel3d.model.vocab_size", size, rule, remedy)


def _check_batch(
    train_batch_size: int | str,
    train_micro_batch_size_per_gpu: int,
    gradient_accumulation_steps: int,
    mesh: MeshConfig,
) -> Iterator[Problem]:
    if train_batch_size == "auto" or mesh.dp == "auto":
        return
    micro, steps = train_micro_batch_size_per_gpu, gradient_accumulation_steps
    batch = micro * steps * int(mesh.dp)
    if train_batch_size != batch:
        rule = (
            f"is not train_micro_batch_size_per_gpu={micro} x gradient_accumulation_steps={steps}"
            f" x dp={mesh.dp} = {batch}"
        )
        remedy = f'use {batch} or "auto"'
        per_pass = micro * int(mesh.dp)
        if int(train_batch_size) % per_pass == 0:
            remedy += f", or gradient_accumulation_steps = {int(train_batch_size) // per_pass}"
        yield Problem("train_batch_size", train_batch_size, rule, remedy)


def _divisors(number: int) -> str:
    *sizes, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(sizes)} or {last}" if sizes else last


CHECKS: tuple[Callable[..., Iterator[Problem]], ...] = (
    _check_heads,
    _check_inner_size,
    _check_layers,
    _check_sequence,
    _check_tp_of_vocabulary,
    _check_trained_vocabulary,
    _check_vocabulary,
    _check_batch,
)
