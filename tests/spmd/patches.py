"""What stands in a layer's, a collective's or the engine's place where a mistake is planted."""

import torch
import torch.nn.functional as F

from parallel3d.mesh.single import all_gather_single
from parallel3d.tensor import collectives, loss, product, vocab
from parallel3d.tensor.cut import cut_of
from parallel3d.tensor.dropout import Dropout


def bias_before_the_sum(self, x):
    y = product.linear(x, self.weight)
    y = y if self.bias is None else y + self.bias
    return collectives.reduce_from_group(y, self.group, self.sequence_parallel)


def reduced_twice(x, group, sequence_parallel=False):
    return collectives.reduce_from_group(
        collectives.reduce_from_group(x, group), group, sequence_parallel
    )


def sum_in_backward_of_g(ctx, grad):
    return collectives.all_reduce(grad, ctx.group), None


_G = collectives._G  # a patch replaces it there


class SummedBackward(_G):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _G.forward(ctx, x, group)

    backward = staticmethod(sum_in_backward_of_g)


def part_without_the_sum(x, group):
    return collectives.sequence_part(x, group, -2).contiguous()


def part_without_the_sum_later(x, group, later=True):
    return collectives.Pending(part_without_the_sum(x, group))


def gathered_in_the_order_of_ranks(x, group):
    parts = x.new_empty((group.size(), *x.shape))
    all_gather_single(parts.view(-1), x.contiguous().view(-1), group=group)
    return parts.view(*x.shape[:-2], -1, x.shape[-1])


def no_reduction_but(kept):
    def all_reduce(x, group, op=torch.distributed.ReduceOp.SUM):
        return collectives.all_reduce(x, group, op) if op == kept else x

    return all_reduce


def unmasked(self, tokens):
    cut = cut_of(self.weight)
    local, _ = vocab.local_ids(tokens, cut.start, cut.stop)
    vectors = F.embedding(local, self.weight)
    return collectives.reduce_from_group(vectors, self.group, self.sequence_parallel)


def first_positions(x, group, dim):
    return x.narrow(dim, 0, x.shape[dim] // group.size())


def gate_and_up_interleaved(self, x):
    gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
    return self.down(F.silu(gate) * up)


def dropout_over(choose):
    def make(p, place, key, split_over=None):
        return Dropout(p, place, key, choose(split_over))

    return make


def loss_summed(x, weight, labels, **options):
    losses = loss.vocab_parallel_loss(x, weight, labels, **options)
    return collectives.all_reduce(losses, options["group"])


def norm_of_all_heads(self, x):
    return F.rms_norm(x.flatten(-2), (x.shape[-1] * x.shape[-2],)).view_as(x) * self.weight


def is_partial_but(skip):
    def is_partial(self, tp, sequence_parallel):
        if tp == 1 or self.cut_dim(tp) is not None:
            return False
        return bool(
            (sequence_parallel and skip != "sequence")
            or (self.partial and skip != "heads")
            or (self.tp_dim is not None and skip != "units")
        )

    return is_partial


def sums_nothing(self, held):
    return None


def mlp_with_f_of_its_own(self, x):
    return self.down(F.gelu(self.up(collectives.copy_to_group(x, self.up.group))))


def no_f(x, weights, group, sequence_parallel=False, rows=None):
    return tuple(product.linear(x, w) for w in weights)


def bias_of_one_rank(self, x):
    y = product.linear(x, self.weight)
    if self.bias is not None and self.group.rank() == 0:
        y = y + self.bias
    return collectives.reduce_from_group(y, self.group, self.sequence_parallel)


def residual_before_the_sum(self, x, segments=None):
    attended = self.attention.core(
        *self.attention.qkv(self.norm1(x))
        .unflatten(-1, (3, -1, self.attention.head_size))
        .permute(2, 0, 3, 1, 4),
        segments,
    )
    output = self.attention.output
    partial = product.linear(attended, output.weight) + x
    x = collectives.reduce_from_group(partial, output.group)
    return x + self.mlp(self.norm2(x))
