"""Mistakes of tensor parallelism, each as a patch of the library, and what finds it there."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from parallel3d.engine.reduction import Reduction
from parallel3d.model.spec import ParamSpec
from parallel3d.models.gpt import blocks as gpt
from parallel3d.models.llama import blocks as llama
from parallel3d.tensor import collectives, linear, loss, output, product, vocab
from parallel3d.tensor.dropout import RandomKey
from tests.spmd import patches

SEQUENCE_PARALLEL = {"sequence_parallel": True}


class Plant(NamedTuple):
    """A mistake, the config that can hold it, and parts of a line that names it."""

    patch: Callable[[], AbstractContextManager[Any]]
    config: dict[str, Any]
    says: tuple[str, ...]


def _replace(owner, name, value):
    return lambda: mock.patch.object(owner, name, value)


_MLP_LINE = "models/gpt/blocks.py"
PLANTS: dict[str, Plant] = {
    "row-parallel without its all-reduce": Plant(
        _replace(linear, "reduce_from_group", lambda x, group, split=False: x),
        {},
        ("blocks.0", "linear.py", "partial"),
    ),
    "bias added before the reduction": Plant(
        _replace(linear.RowParallelLinear, "forward", patches.bias_before_the_sum),
        {},
        ("blocks.0.attention.output", "adds replicated"),
    ),
    "residual added before the reduction": Plant(
        _replace(gpt.Block, "forward", patches.residual_before_the_sum), {}, ("adds replicated",)
    ),
    "a bias on one rank alone": Plant(
        _replace(linear.RowParallelLinear, "forward", patches.bias_of_one_rank),
        {},
        ("blocks.0.attention.output", "all ranks of a tensor-parallel group run the same"),
    ),
    "all-reduce twice": Plant(
        _replace(linear, "reduce_from_group", patches.reduced_twice),
        {},
        ("blocks.0.attention.output", "tp times as much"),
    ),
    "no f: the backward of a column-parallel layer is not summed": Plant(
        _replace(linear, "column_linear", patches.no_f), {}, ("blocks.0", "partial")
    ),
    "an f too many": Plant(
        _replace(gpt.MLP, "forward", patches.mlp_with_f_of_its_own),
        {},
        ("blocks.0.mlp", "tp times"),
    ),
    "g sums gradients, too": Plant(
        _replace(collectives, "_G", patches.SummedBackward),
        {},
        ("in the backward pass", "tp times as much"),
    ),
    "norms of sequence parallelism are not summed": Plant(
        _replace(ParamSpec, "is_partial", patches.is_partial_but("sequence")),
        SEQUENCE_PARALLEL,
        ("blocks.0.norm1.weight", "norm.py", "nobody sums it"),
    ),
    "shared key and value heads are not summed": Plant(
        _replace(ParamSpec, "is_partial", patches.is_partial_but("units")),
        {"model": "llama", "tp": 4, "num_key_value_heads": 2},
        ("blocks.0.attention.qkv.k_weight", "nobody sums it"),
    ),
    "norms of query and key are not summed": Plant(
        _replace(ParamSpec, "is_partial", patches.is_partial_but("heads")),
        {"model": "qwen3"},
        ("blocks.0.attention.q_norm.weight", "nobody sums it"),
    ),
    "replicated gradients are summed": Plant(
        _replace(ParamSpec, "is_partial", lambda self, tp, split: self.cut_dim(tp) is None),
        {},
        ("blocks.0.norm1.weight", "the engine sums it over tp"),
    ),
    "the engine sums nothing": Plant(
        _replace(Reduction, "_sum", patches.sums_nothing),
        SEQUENCE_PARALLEL,
        ("blocks.0.norm1.weight", "when the engine has summed it"),
    ),
    "a part is taken without the sum": Plant(
        _replace(collectives, "reduce_scatter_sequence", patches.part_without_the_sum),
        SEQUENCE_PARALLEL,
        ("embedding.token", "its own part of a value that is partial"),
    ),
    "a gradient's part is taken without the sum": Plant(
        _replace(product, "start_reduce_scatter", patches.part_without_the_sum_later),
        SEQUENCE_PARALLEL,
        ("blocks.0", "in the backward pass", "its own part of a value that is partial"),
    ),
    "parts gathered in the order of ranks": Plant(
        _replace(product, "all_gather_sequence", patches.gathered_in_the_order_of_ranks),
        SEQUENCE_PARALLEL,
        ("blocks.0.attention.qkv", "not yet put in order"),
    ),
    "a softmax over the vocabulary without its maximum": Plant(
        _replace(loss, "all_reduce", patches.no_reduction_but(torch.distributed.ReduceOp.SUM)),
        {},
        ("head", "loss.py", "a max over the ranks is due"),
    ),
    "a softmax over the vocabulary without its sum": Plant(
        _replace(loss, "all_reduce", patches.no_reduction_but(torch.distributed.ReduceOp.MAX)),
        {},
        ("head", "loss.py", "a sum over the ranks is due"),
    ),
    "embedding without its mask": Plant(
        _replace(vocab.VocabParallelEmbedding, "forward", patches.unmasked),
        {},
        ("embedding.token", "a mask is due"),
    ),
    "ids of other ranks are not kept out": Plant(
        _replace(
            vocab, "local_ids", lambda tokens, start, stop: (tokens - start, torch.isnan(tokens))
        ),
        {},
        ("embedding.token", "out of bounds"),
    ),
    "positions of the first part on every rank": Plant(
        _replace(gpt, "sequence_part", patches.first_positions),
        SEQUENCE_PARALLEL,
        ("embedding", _MLP_LINE, "needs its own part"),
    ),
    "gate and up interleaved": Plant(
        _replace(llama.MLP, "forward", patches.gate_and_up_interleaved),
        {"model": "llama"},
        ("blocks.0.mlp.down", "2 runs"),
    ),
    "equal dropout of unequal parts": Plant(
        _replace(gpt, "Dropout", patches.dropout_over(lambda group: None)),
        SEQUENCE_PARALLEL | {"resid_pdrop": 0.1},
        ("blocks.0.dropout1", "needs its own part"),
    ),
    "the loss summed over tp": Plant(
        _replace(output, "vocab_parallel_loss", patches.loss_summed),
        {},
        ("head", "tp times as much"),
    ),
    "a norm over all heads of a rank": Plant(
        _replace(llama.RMSNorm, "forward", patches.norm_of_all_heads),
        {"model": "qwen3"},
        ("blocks.0.attention.q_norm", "each rank's part alone"),
    ),
}


def equal_dropout_on_replicas():
    """Masks of which dp knows nothing."""
    original = RandomKey.seed_generator

    def seed(self, place, tp_rank, device):
        original(replace(self, dp_coord=0), place, tp_rank, device)

    return mock.patch.object(RandomKey, "seed_generator", seed)


PLANTS["equal dropout on all replicas"] = Plant(
    equal_dropout_on_replicas,
    {"resid_pdrop": 0.1, "dp": 2},
    ("blocks.0.dropout1", "over dp", "needs its own part"),
)


def unequal_dropout():
    """Dropout that differs between ranks that hold the same; it needs the group."""
    original = gpt.Block.__init__

    def init(self, config, name, context):
        original(self, config, name, context)
        self.dropout1.split_over = context.group

    return mock.patch.object(gpt.Block, "__init__", init)


PLANTS["unequal dropout of equal values"] = Plant(
    unequal_dropout, {"resid_pdrop": 0.1}, ("blocks.0.dropout1", "draws other numbers")
)
