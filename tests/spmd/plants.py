"""Mistakes of tensor parallelism, each as a patch of the library, and what finds it there."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from parallel3d.engine.reduction import Reduction
from parallel3d.model.spec import ParamSpec
from parallel3d.models.gpt import blocks as gpt
from parallel3d.models.llama import blocks as llama
from parallel3d.tensor import collectives, linear, vocab
from parallel3d.tensor.cut import cut_of
from parallel3d.tensor.dropout import Dropout, RandomKey

SEQUENCE_PARALLEL = {"sequence_parallel": True}


class Plant(NamedTuple):
    """A mistake, the config that can hold it, and parts of a line that names it."""

    patch: Callable[[], AbstractContextManager[Any]]
    config: dict[str, Any]
    says: tuple[str, ...]


def _replace(owner, name, value):
    return lambda: mock.patch.object(owner, name, value)


def _bias_before_the_sum(self, x):
    y = linear.linear(x, self.weight)
    y = y if self.bias is None else y + self.bias
    return collectives.reduce_from_group(y, self.group, self.sequence_parallel)


def _reduced_twice(x, group, sequence_parallel=False):
    return collectives.reduce_from_group(
        collectives.reduce_from_group(x, group), group, sequence_parallel
    )


def _sum_in_backward_of_g(ctx, grad):
    return collectives.all_reduce(grad, ctx.group), None


class _G(collectives._G):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return collectives.all_reduce(x, group).view_as(x)

    backward = staticmethod(_sum_in_backward_of_g)


def _part_without_the_sum(x, group):
    return collectives.sequence_part(x, group, -2).contiguous()


def _gathered_in_the_order_of_ranks(x, group):
    parts = x.new_empty((group.size(), *x.shape))
    torch.distributed.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1), group=group)
    return parts.view(*x.shape[:-2], -1, x.shape[-1])


def _no_reduction_but(kept):
    def all_reduce(x, group, op=torch.distributed.ReduceOp.SUM):
        return collectives.all_reduce(x, group, op) if op == kept else x

    return all_reduce


def _unmasked(self, tokens):
    cut = cut_of(self.weight)
    local, _ = vocab._local(tokens, cut.start, cut.stop)
    vectors = F.embedding(local, self.weight)
    return collectives.reduce_from_group(vectors, self.group, self.sequence_parallel)


def _first_positions(x, group, dim):
    return x.narrow(dim, 0, x.shape[dim] // group.size())


def _gate_and_up_interleaved(self, x):
    gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
    return self.down(F.silu(gate) * up)


def _dropout_over(choose):
    def make(p, place, key, split_over=None):
        return Dropout(p, place, key, choose(split_over))

    return make


def _loss_summed(self, logits, labels):
    losses = vocab.vocab_parallel_cross_entropy(logits, labels, self.vocab_size, self.group)
    return collectives.all_reduce(losses.mean(), self.group)


def _norm_of_all_heads(self, x):
    return F.rms_norm(x.flatten(-2), (x.shape[-1] * x.shape[-2],)).view_as(x) * self.weight


def _is_partial_but(skip):
    def is_partial(self, tp, sequence_parallel):
        if tp == 1 or self.cut_dim(tp) is not None:
            return False
        return bool(
            (sequence_parallel and skip != "sequence")
            or (self.partial and skip != "heads")
            or (self.tp_dim is not None and skip != "units")
        )

    return is_partial


def _sums_nothing(self, held):
    return None


def _mlp_with_f_of_its_own(self, x):
    return self.down(F.gelu(self.up(collectives.copy_to_group(x, self.up.group))))


def _no_f(x, weights, group, sequence_parallel=False, rows=None):
    return tuple(linear.linear(x, w) for w in weights)


def _bias_of_one_rank(self, x):
    y = linear.linear(x, self.weight)
    if self.bias is not None and self.group.rank() == 0:
        y = y + self.bias
    return collectives.reduce_from_group(y, self.group, self.sequence_parallel)


def _residual_before_the_sum(self, x, segments=None):
    attended = self.attention.core(
        *self.attention.qkv(self.norm1(x))
        .unflatten(-1, (3, -1, self.attention.head_size))
        .permute(2, 0, 3, 1, 4),
        segments,
    )
    output = self.attention.output
    partial = linear.linear(attended, output.weight) + x
    x = collectives.reduce_from_group(partial, output.group)
    return x + self.mlp(self.norm2(x))


_MLP_LINE = "models/gpt/blocks.py"
PLANTS: dict[str, Plant] = {
    "row-parallel without its all-reduce": Plant(
        _replace(linear, "reduce_from_group", lambda x, group, split=False: x),
        {},
        ("blocks.0", "linear.py", "partial"),
    ),
    "bias added before the reduction": Plant(
        _replace(linear.RowParallelLinear, "forward", _bias_before_the_sum),
        {},
        ("blocks.0.attention.output", "adds replicated"),
    ),
    "residual added before the reduction": Plant(
        _replace(gpt.Block, "forward", _residual_before_the_sum), {}, ("adds replicated",)
    ),
    "a bias on one rank alone": Plant(
        _replace(linear.RowParallelLinear, "forward", _bias_of_one_rank),
        {},
        ("blocks.0.attention.output", "all ranks of a tensor-parallel group run the same"),
    ),
    "all-reduce twice": Plant(
        _replace(linear, "reduce_from_group", _reduced_twice),
        {},
        ("blocks.0.attention.output", "tp times as much"),
    ),
    "no f: the backward of a column-parallel layer is not summed": Plant(
        _replace(linear, "column_linear", _no_f), {}, ("blocks.0", "partial")
    ),
    "an f too many": Plant(
        _replace(gpt.MLP, "forward", _mlp_with_f_of_its_own), {}, ("blocks.0.mlp", "tp times")
    ),
    "g sums gradients, too": Plant(
        _replace(collectives, "_G", _G), {}, ("in the backward pass", "tp times as much")
    ),
    "norms of sequence parallelism are not summed": Plant(
        _replace(ParamSpec, "is_partial", _is_partial_but("sequence")),
        SEQUENCE_PARALLEL,
        ("blocks.0.norm1.weight", "norm.py", "nobody sums it"),
    ),
    "shared key and value heads are not summed": Plant(
        _replace(ParamSpec, "is_partial", _is_partial_but("units")),
        {"model": "llama", "tp": 4, "num_key_value_heads": 2},
        ("blocks.0.attention.qkv.k_weight", "nobody sums it"),
    ),
    "norms of query and key are not summed": Plant(
        _replace(ParamSpec, "is_partial", _is_partial_but("heads")),
        {"model": "qwen3"},
        ("blocks.0.attention.q_norm.weight", "nobody sums it"),
    ),
    "replicated gradients are summed": Plant(
        _replace(ParamSpec, "is_partial", lambda self, tp, split: self.cut_dim(tp) is None),
        {},
        ("blocks.0.norm1.weight", "the engine sums it over tp"),
    ),
    "the engine sums nothing": Plant(
        _replace(Reduction, "_sum", _sums_nothing),
        SEQUENCE_PARALLEL,
        ("blocks.0.norm1.weight", "when the engine has summed it"),
    ),
    "a part is taken without the sum": Plant(
        _replace(collectives, "reduce_scatter_sequence", _part_without_the_sum),
        SEQUENCE_PARALLEL,
        ("embedding.token", "its own part of a value that is partial"),
    ),
    "a gradient's part is taken without the sum": Plant(
        _replace(linear, "reduce_scatter_sequence", _part_without_the_sum),
        SEQUENCE_PARALLEL,
        ("blocks.0", "in the backward pass", "its own part of a value that is partial"),
    ),
    "parts gathered in the order of ranks": Plant(
        _replace(linear, "all_gather_sequence", _gathered_in_the_order_of_ranks),
        SEQUENCE_PARALLEL,
        ("blocks.0.attention.qkv", "not yet put in order"),
    ),
    "a softmax over the vocabulary without its maximum": Plant(
        _replace(vocab, "all_reduce", _no_reduction_but(torch.distributed.ReduceOp.SUM)),
        {},
        ("head", "vocab.py", "a max over the ranks is due"),
    ),
    "a softmax over the vocabulary without its sum": Plant(
        _replace(vocab, "all_reduce", _no_reduction_but(torch.distributed.ReduceOp.MAX)),
        {},
        ("head", "vocab.py", "a sum over the ranks is due"),
    ),
    "embedding without its mask": Plant(
        _replace(vocab.VocabParallelEmbedding, "forward", _unmasked),
        {},
        ("embedding.token", "a mask is due"),
    ),
    "ids of other ranks are not kept out": Plant(
        _replace(
            vocab, "_local", lambda tokens, start, stop: (tokens - start, torch.isnan(tokens))
        ),
        {},
        ("embedding.token", "out of bounds"),
    ),
    "positions of the first part on every rank": Plant(
        _replace(gpt, "sequence_part", _first_positions),
        SEQUENCE_PARALLEL,
        ("embedding", _MLP_LINE, "needs its own part"),
    ),
    "gate and up interleaved": Plant(
        _replace(llama.MLP, "forward", _gate_and_up_interleaved),
        {"model": "llama"},
        ("blocks.0.mlp.down", "2 runs"),
    ),
    "equal dropout of unequal parts": Plant(
        _replace(gpt, "Dropout", _dropout_over(lambda group: None)),
        SEQUENCE_PARALLEL | {"resid_pdrop": 0.1},
        ("blocks.0.dropout1", "needs its own part"),
    ),
    "the loss summed over tp": Plant(
        _replace(gpt.VocabParallelOutput, "loss", _loss_summed), {}, ("head", "tp times as much")
    ),
    "a norm over all heads of a rank": Plant(
        _replace(llama.RMSNorm, "forward", _norm_of_all_heads),
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
