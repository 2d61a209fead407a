"""What torch keeps, computes and communicates in one layer of a model.

All of it in one process: as the last rank, which has the largest part of all, of groups of the
"fake" backend, whose collectives send nothing and hold no memory.
"""

from contextlib import contextmanager
from pkgutil import resolve_name
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from parallel3d.model.recompute import FULL, NONE
from parallel3d.models.transformers.tally import Tally, key_of
from parallel3d.pipeline.stages import Stages
from tests.contexts import layer_context
from tests.models.cost_cases import SHAPE, cases_of


def flops_of_groups(a, b, *_, **__):
    """Of torch's grouped product, which its counter does not know: of all groups together."""
    return 2 * a[0] * a[1] * b[-1]


GROUPED = {torch.ops.aten._grouped_mm: flops_of_groups}


class Measured(NamedTuple):
    """What torch did of one case; bytes, elements and FLOPs of one rank but for `flops`."""

    saved: dict
    peak: int
    resident: int
    collectives: tuple
    products: list
    flops: int
    rank_flops: tuple
    traffic: tuple


def measure(rank, families, full):
    """Family -> each of its cases and what torch did of it.

    By default bytes in bf16 are those of layers that are not recomputed; test_measured_cost.py has
    the others.
    """
    groups = make_groups()
    by_family = {}
    for family in families:
        by_family[family] = [
            (case, measured(case, groups, full or case.recompute == NONE))
            for case in cases_of(family, full)
        ]
    return by_family


def measure_cases(rank, cases):
    """Each case and what torch did of it."""
    groups = make_groups()
    return [(case, measured(case, groups)) for case in cases]


def make_groups():
    """The tensor-parallel group of each size."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    return {tp: dist.new_group(list(range(4 - tp, 4))) for tp in (1, 2, 4)}


def measured(case, groups, in_bf16=True):
    layer = Layer(case, groups[case.tp])
    with kernels(fused=True):
        peak, collectives, products = layer.peak()
        saved = {"fp32": layer.saved()}
        if in_bf16:
            saved["bf16"] = Layer(case, groups[case.tp], torch.bfloat16).saved()
        traffic = layer.traffic()
        if case.recompute != NONE:
            plain = Layer(case._replace(recompute=NONE), groups[case.tp]).traffic()
            traffic = *traffic, traffic[1] - plain[1]
    with kernels(fused=False):
        saved["classic"] = layer.saved()
        rank_flops = layer.flops()
        one = case._replace(tp=1, sequence_parallel=False, recompute=NONE)
        flops = Layer(one, groups[1]).flops()[0]
    return Measured(saved, peak, layer.resident, collectives, products, flops, rank_flops, traffic)


@contextmanager
def kernels(fused):
    """Fused attention, which the CPU has without dropout alone; or one made of operators.

    Torch counts the FLOPs of those alone.
    """
    attention = F.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(
                F,
                "scaled_dot_product_attention",
                lambda *args, **options: attention(*args, **options | {"dropout_p": 0.0}),
            )
            yield
        else:
            with sdpa_kernel(SDPBackend.MATH):
                yield


class Layer:
    """One layer on a tp group, ready to run."""

    def __init__(self, case, group, dtype=torch.float32):
        spec = case.layer
        split = case.sequence_parallel
        context = layer_context(group, sequence_parallel=split, recompute=case.recompute)
        torch.manual_seed(0)
        self.module = resolve_name(spec.build)(spec.config, spec.name, context).to(dtype)
        for parameter in self.module.parameters():
            parameter.data.normal_(0, 0.02)
        shape = SHAPE.batch, SHAPE.seq // group.size() if split else SHAPE.seq
        self.x = torch.randn(*shape, spec.config.hidden_size, dtype=dtype, requires_grad=True)
        self.tokens = torch.randint(spec.config.vocab_size, (SHAPE.batch, SHAPE.seq))
        self.place = case.place
        full = {self.module} if case.recompute == FULL else set()
        side_losses = *spec.side_losses, *([spec.loads] if spec.num_experts else [])
        self.stages = Stages({0: [self.module]}, full, {self.module: side_losses})
        tensors = [*self.module.parameters(), *self.module.buffers(), self.x, self.tokens]
        self.known = {key_of(t) for t in tensors}
        self.dtype = dtype
        with Tally(self.known, dtype) as first:
            self.run()  # allocates the tensors that stay from then on
        living = first.living()
        self.resident = sum(held.total for held in living.values())
        self.known |= living.keys()

    def run(self):
        """The forward pass; the layer's input is made inside, and so it is counted."""
        if self.place == "first":
            return self.module(self.tokens)
        if self.place == "last":
            return self.module(self.x * 1, self.tokens)
        output = self.stages(0, self.x * 1)
        return output[0] if isinstance(output, tuple) else output

    def backward(self, y):
        y.backward(None if y.dim() == 0 else torch.ones_like(y))

    def saved(self):
        """Bytes of the unique storages that autograd is given to keep."""
        seen = {}

        def pack(tensor):
            seen[key_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _ = self.run()
        return sum(size for pointer, size in seen.items() if pointer not in self.known)

    def peak(self):
        """The most bytes alive, weights and their gradients left out.

        Besides, the collectives of forward and backward, and the products of the forward.
        """
        with Tally(self.known, self.dtype) as tally:
            y = self.run()
            forward = tally.start_pass()
            middle = tally.time + 1
            self.backward(y)
            backward = tally.start_pass()
        gradients = {
            key_of(p.grad)
            for p in self.module.parameters()
            if p.grad is not None  # a bias that balances loads moves by counts
        }
        most = tally.most(0, middle, gradients).total
        most = max(most, tally.most(middle, tally.time, gradients | {key_of(y)}).total)
        products = [product[:3] for product in forward.products]
        return most, (forward.collectives, backward.collectives), products

    def flops(self):
        """Of forward and backward."""
        with FlopCounterMode(display=False, custom_mapping=GROUPED) as forward:
            y = self.run()
        with FlopCounterMode(display=False, custom_mapping=GROUPED) as backward:
            self.backward(y)
        return forward.get_total_flops(), backward.get_total_flops()

    def traffic(self):
        """Elements that memory-bound operators move in forward and backward; norms are fused."""

        def rms_norm(x, shape, weight, eps):
            return F.layer_norm(x, shape, weight, None, eps)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "rms_norm", rms_norm)
            self.module.zero_grad()
            with Tally(self.known, self.dtype) as tally:
                y = self.run()
                forward = tally.start_pass()
                self.backward(y)
                backward = tally.start_pass()
        made = 0 if self.place == "first" else 2 * self.x.numel()  # the input, in `run`
        return forward.traffic - made, backward.traffic
