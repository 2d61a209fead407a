"""Rules between the settings of a model and those of mesh, data and pipeline.

Every family has the sizes compared here; those with grouped queries have num_key_value_heads, too.
"""

import json
from collections.abc import Callable, Iterator
from math import gcd, isqrt

from parallel3d.base.section import Problem
from parallel3d.config import arithmetic
from parallel3d.config.data import DataConfig
from parallel3d.config.parallel3d_block import MeshConfig, PipelineConfig
from parallel3d.model.config import ModelConfig
from parallel3d.model.parametrization import parametrization_of
from parallel3d.model.recompute import SUBLAYERS
from parallel3d.models.common import pretrained_of

_MOST_TRIED = 20_000  # lengths of samples, for one that a mesh divides


def _check_heads(mesh: MeshConfig, model: ModelConfig) -> Iterator[Problem]:
    heads = model.num_attention_heads
    if heads % mesh.tp:
        yield Problem(
            "parallel3d.mesh.tp",
            mesh.tp,
            f"does not divide num_attention_heads={heads}",
            f"use tp = {join_with_or(divisors_of(heads))}",
        )


def _check_inner_size(mesh: MeshConfig, model: ModelConfig) -> Iterator[Problem]:
    sizes = getattr(model, "inner_sizes", {"intermediate_size": model.inner_size})
    # A tp that does not divide the heads is reported by another check.
    divides_heads = model.num_attention_heads % mesh.tp == 0
    for name, size in sizes.items():
        if divides_heads and size % mesh.tp:
            yield Problem(
                f"parallel3d.model.{name}",
                size,
                f"is not a multiple of tp={mesh.tp}",
                f"use {size // mesh.tp * mesh.tp + mesh.tp}, or another mesh.tp",
            )


def _check_key_value_heads(mesh: MeshConfig, model: ModelConfig) -> Iterator[Problem]:
    heads = getattr(model, "num_key_value_heads", None) or mesh.tp
    usable = [n for n in divisors_of(model.num_attention_heads) if not (heads % n and n % heads)]
    if heads % mesh.tp and mesh.tp % heads:
        yield Problem(
            "parallel3d.mesh.tp",
            mesh.tp,
            f"neither divides num_key_value_heads={heads} nor is a multiple of it",
            f"use tp = {join_with_or(usable)}",
        )


def _check_activations(pipeline: PipelineConfig, model: ModelConfig) -> Iterator[Problem]:
    """Check that a model's activations can leave the device, or be computed again."""
    moves = pipeline.offload_activations
    has_experts = bool(getattr(model, "num_experts", False))
    if moves != "none" and has_experts:
        yield Problem(
            "parallel3d.pipeline.offload_activations",
            moves,
            "does not move what experts save",
            'use "none", or recomputation',
        )
    can_recompute = getattr(model, "can_recompute", SUBLAYERS)
    chosen = pipeline.activation_checkpointing
    if chosen.parts.difference(can_recompute):
        yield Problem(
            "parallel3d.pipeline.activation_checkpointing",
            str(chosen),
            f"has parts that a model of family {model.family} cannot recompute alone",
            f'use "none", "full" or "{"+".join(can_recompute)}"',
        )


def _other_lengths(mesh: MeshConfig, data: DataConfig, model: ModelConfig) -> str:
    """Return the nearest lengths of samples that cp and tp divide, as far as the model has them."""
    length = data.sequence_length
    parts = mesh.tp if mesh.sequence_parallel else 1

    def fits(tokens: int) -> bool:
        is_dealt = (
            mesh.cp == 1 or tokens % (mesh.cp * arithmetic.block_tokens(tokens, mesh.cp)) == 0
        )
        return is_dealt and tokens // mesh.cp % parts == 0

    shorter = range(length - 1, max(0, length - _MOST_TRIED), -1)
    longer = range(length + 1, min(model.max_position_embeddings, length + _MOST_TRIED) + 1)
    nearest = [next(filter(fits, lengths), None) for lengths in (shorter, longer)]
    words = " or ".join(str(tokens) for tokens in nearest if tokens is not None)
    return f"{words}, or " if words else ""


def _check_sequence_parallel(
    mesh: MeshConfig, data: DataConfig, model: ModelConfig
) -> Iterator[Problem]:
    length = data.sequence_length
    if mesh.sequence_parallel and length % mesh.tp:
        yield Problem(
            "parallel3d.data.sequence_length",
            length,
            f"is not a multiple of tp={mesh.tp}, over which sequence_parallel splits it",
            f"use {_other_lengths(mesh, data, model)}sequence_parallel = false",
        )


def _check_context(mesh: MeshConfig, data: DataConfig, model: ModelConfig) -> Iterator[Problem]:
    """Check that each cp rank gets as many blocks of tokens, and each of its tp ranks a part."""
    length = data.sequence_length
    parts = mesh.tp if mesh.sequence_parallel else 1
    block = arithmetic.block_tokens(length, mesh.cp)
    share = mesh.cp * block
    own = length // mesh.cp
    is_dealt = length % share == 0
    if mesh.cp > 1 and not is_dealt:
        yield Problem(
            "parallel3d.data.sequence_length",
            length,
            f"cannot be dealt to cp={mesh.cp} ranks in blocks of {block} tokens",
            f"use {_other_lengths(mesh, data, model)}another mesh.cp",
        )
    if mesh.cp > 1 and is_dealt and own % parts and length % parts == 0:
        yield Problem(
            "parallel3d.mesh.cp",
            mesh.cp,
            f"leaves {own} tokens a rank, not a multiple of tp={mesh.tp}",
            "use sequence_parallel = false",
        )


def _check_experts(mesh: MeshConfig, model: ModelConfig) -> Iterator[Problem]:
    """Check that the ranks of an ep group get as many experts each."""
    experts = getattr(model, "num_experts", 0)
    dp = 0 if mesh.dp == "auto" else mesh.dp
    both = f"num_experts={experts}" + (f" and mesh.dp={dp}" if dp else "")
    if mesh.ep > 1 and not experts:
        yield Problem(
            "parallel3d.mesh.ep",
            mesh.ep,
            f"divides experts, and model.family={json.dumps(model.family)} has none",
            "use 1",
        )
    if experts and (experts % mesh.ep or dp % mesh.ep):
        yield Problem(
            "parallel3d.mesh.ep",
            mesh.ep,
            f"does not divide {both}",
            f"use {join_with_or(divisors_of(gcd(experts, dp) or 1))}",
        )


def _check_pooled_loss(
    mesh: MeshConfig, pipeline: PipelineConfig, model: ModelConfig
) -> Iterator[Problem]:
    """Check that all layers whose loads a balance loss pools are in one stage."""
    is_pooled = getattr(model, "router_aux_loss", None) == "pooled"
    stages = mesh.pp * pipeline.stages_per_rank
    if is_pooled and getattr(model, "router_aux_loss_coef", 0) and stages > 1:
        yield Problem(
            "parallel3d.model.router_aux_loss",
            "pooled",
            f"multiplies loads of all layers, which are in {stages} stages",
            'use "microbatch" or "sequence", or one stage (mesh.pp = 1)',
        )


def _check_shared_samples(mesh: MeshConfig, model: ModelConfig) -> Iterator[Problem]:
    """Check that nothing depends on an order of tokens that cp ranks do not see."""
    name = "attn_pdrop"
    if hasattr(model, "attention_dropout"):
        name = "config.attention_dropout"
    dropout = getattr(model, name.removeprefix("config."), 0)
    capacity = getattr(model, "capacity_factor", None)
    shared = f"whole samples, which cp={mesh.cp} ranks share"
    if mesh.cp > 1 and dropout:
        yield Problem(
            f"parallel3d.model.{name}",
            dropout,
            f"draws its masks inside a kernel that needs {shared}",
            "use 0, or mesh.cp = 1",
        )
    if mesh.cp > 1 and capacity:
        yield Problem(
            "parallel3d.model.capacity_factor",
            capacity,
            f"drops the last tokens of {shared}",
            "use null, or mesh.cp = 1",
        )


def _check_token_mixing(
    mesh: MeshConfig, data: DataConfig, model: ModelConfig
) -> Iterator[Problem]:
    """Check that only attention that the library computes mixes tokens, where it must know them."""
    places: list[tuple[str, int, str]] = []
    if data.isolate_documents:
        places.append(("parallel3d.data.isolate_documents", True, "false"))
    if mesh.cp > 1:
        places.append(("parallel3d.mesh.cp", mesh.cp, "1"))
    if not places or getattr(model, "isolates", True):
        return
    for place, value, remedy in places:
        yield Problem(
            place,
            value,
            "needs a model in which only attention mixes tokens, through transformers' attention "
            "interface, and a token's rotation follows from its own position (not so with "
            "longrope); model.config has another",
            f"use {remedy}, or another model",
        )


def _check_sequence(data: DataConfig, model: ModelConfig) -> Iterator[Problem]:
    length = data.sequence_length
    limit = model.max_position_embeddings
    if length > limit:
        yield Problem(
            "parallel3d.data.sequence_length",
            length,
            f"is longer than the model's max_position_embeddings={limit}",
            f"use at most {limit}, or raise max_position_embeddings",
        )


def _check_parametrization(model: ModelConfig) -> Iterator[Problem]:
    kind = parametrization_of(model).type
    if kind != "standard" and pretrained_of(model) is not None:
        yield Problem(
            "parallel3d.model.parametrization.type",
            kind,
            "applies multipliers that the weights of from_pretrained were not trained with",
            'use "standard"',
        )


def _check_share_cut(mesh: MeshConfig, model: ModelConfig) -> Iterator[Problem]:
    share = getattr(model, "share_cut", 1.0)
    if mesh.tp > 1 and share < 0.5:
        yield Problem(
            "parallel3d.mesh.tp",
            mesh.tp,
            f"would cut {share:.0%} of the parameters of this architecture's layers, less than "
            "half: the ranks would repeat most of the work",
            "use tp = 1",
        )


def _check_tp_of_vocabulary(mesh: MeshConfig, model: ModelConfig) -> Iterator[Problem]:
    size = model.vocab_size
    if size != "auto" and size < mesh.tp:
        yield Problem(
            "parallel3d.model.vocab_size",
            size,
            f"is less than tp={mesh.tp}, so some ranks would have no token",
            f"use {mesh.tp} or more",
        )


def _check_trained_vocabulary(data: DataConfig, model: ModelConfig) -> Iterator[Problem]:
    if data.has_own_size:
        yield from _check_vocabulary(data.vocab_size, model)


def _check_vocabulary(tokenizer_size: int, model: ModelConfig) -> Iterator[Problem]:
    size = model.vocab_size
    if size != "auto" and size < tokenizer_size:
        yield Problem(
            "parallel3d.model.vocab_size",
            size,
            f"is smaller than the tokenizer's {tokenizer_size} tokens",
            (
                "set data.tokenizer to the tokenizer that the model was trained with"
                if pretrained_of(model)
                else f'use {tokenizer_size} or more, or "auto"'
            ),
        )


def divisors_of(number: int) -> list[int]:
    """Return the divisors of a number, sorted; of one above 10^12 not all."""
    small = [n for n in range(1, min(isqrt(number), 10**6) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def join_with_or(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


MODEL_CHECKS: tuple[Callable[..., Iterator[Problem]], ...] = (
    _check_heads,
    _check_key_value_heads,
    _check_inner_size,
    _check_activations,
    _check_sequence,
    _check_sequence_parallel,
    _check_context,
    _check_experts,
    _check_shared_samples,
    _check_token_mixing,
    _check_pooled_loss,
    _check_parametrization,
    _check_share_cut,
    _check_tp_of_vocabulary,
    _check_trained_vocabulary,
    _check_vocabulary,
)
