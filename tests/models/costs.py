"""What torch keeps, computes and communicates in one layer of a model.

All of it in one process: as the last rank, which has the largest part of all, of groups of the
"fake" backend, whose collectives send nothing and hold no memory.
"""

import itertools
from collections import Counter
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from parallel3d.model.recompute import FULL, NONE
from parallel3d.model.spec import Collective
from parallel3d.pipeline.stages import Stages
from tests.contexts import layer_context
from tests.models.cost_cases import SHAPE, cases_of

KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allgather_into_tensor_coalesced_": "all_gather",  # one operation for each sample, as one call
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
}
# Products, the attention, collectives, and what moves nothing.
NO_TRAFFIC = (
    "mm",
    "bmm",
    "addmm",
    "_grouped_mm",
    "_scaled_dot",
    "empty",
    "new_empty",
    "detach",
    *KINDS,
)


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


def measure(rank, family, full):
    """Each case of the family and what torch did of it."""
    return measure_cases(rank, cases_of(family, full))


def measure_cases(rank, cases):
    """Each case and what torch did of it."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    groups = {tp: dist.new_group(list(range(4 - tp, 4))) for tp in (1, 2, 4)}
    return [(case, measured(case, groups)) for case in cases]


def measured(case, groups):
    layer = Layer(case, groups[case.tp])
    with kernels(fused=True):
        peak, collectives, products = layer.peak()
        saved = {
            "fp32": layer.saved(),
            "bf16": Layer(case, groups[case.tp], torch.bfloat16).saved(),
        }
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
        self.known = {t.untyped_storage().data_ptr() for t in tensors}
        with Alive(self.known) as first:
            self.run()  # allocates the tensors that stay from then on
            first.tick()
        self.resident = sum(size for _, size, _, _ in first.living.values())
        self.known |= {pointer for *_, pointer in first.living.values()}

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
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _ = self.run()
        return sum(size for pointer, size in seen.items() if pointer not in self.known)

    def peak(self):
        """The most bytes alive, weights and their gradients left out.

        Besides, the collectives of forward and backward, and the products of the forward.
        """
        with Alive(self.known) as alive:
            with Operators(self.known) as forward:
                y = self.run()
            result = StorageWeakRef(y.untyped_storage()).cdata
            middle = alive.time + 1
            with Operators(self.known) as backward:
                self.backward(y)
            alive.tick()
            gradients = {
                StorageWeakRef(p.grad.untyped_storage()).cdata
                for p in self.module.parameters()
                if p.grad is not None  # a bias that balances loads moves by counts
            }
            most = alive.most(0, middle, gradients)
            most = max(most, alive.most(middle, alive.time, gradients | {result}))
        return most, (forward.collectives, backward.collectives), forward.products

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
            with Operators(self.known) as forward:
                y = self.run()
            with Operators(self.known) as backward:
                self.backward(y)
        made = 0 if self.place == "first" else 2 * self.x.numel()  # the input, in `run`
        return forward.traffic - made, backward.traffic


class Operators(TorchDispatchMode):
    """The collectives (of whole tensors) and products that run, and what other operators move."""

    def __init__(self, known):
        super().__init__()
        self.known = known
        self.collectives = []
        self.products = []
        self.traffic = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        read = tensors_in((args, kwargs))
        written = tensors_in(out)
        if name in KINDS:
            elements = max(sum(t.numel() for t in tensors_in(arg)) for arg in args)
            self.collectives.append(Collective(KINDS[name], elements))
        if name in ("mm", "addmm"):
            x, weight = tensors_in(args)[-2:]
            self.products.append((*x.shape, weight.shape[1]))
        if name == "_grouped_mm":
            x, weights = args[:2]
            self.products.append((len(x) // len(weights), *weights.shape[1:]))
        storages = {t.untyped_storage()._cdata for t in read}
        moved = func._schema.is_mutable or any(
            t.untyped_storage()._cdata not in storages for t in written
        )
        if moved and not name.startswith(NO_TRAFFIC):
            read = [t for t in read if t.untyped_storage().data_ptr() not in self.known]
            self.traffic += sum(t.numel() for t in (*read, *written))
        return out


def tensors_in(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


class Alive(TorchDispatchMode):
    """The bytes of the storages that are alive at each operator, what they were born as."""

    def __init__(self, known):
        super().__init__()
        self.known = known
        self.time = 0
        self.lives = []
        self.living = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.tick()
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.known:
                reference = StorageWeakRef(storage)
                born = reference, storage.nbytes(), self.time, storage.data_ptr()
                self.living.setdefault(reference.cdata, born)
        return out

    def tick(self):
        for key, (reference, size, born, _) in list(self.living.items()):
            if reference.expired():
                self.lives.append((size, born, self.time))
                del self.living[key]
        self.time += 1

    def most(self, start, stop, without):
        """The most bytes alive at one of the operators [start, stop)."""
        self.tick()
        change = Counter()
        for size, born, died in self.lives:
            change[born] += size
            change[died + 1] -= size
        for key, (_, size, born, _) in self.living.items():
            change[born] += size if key not in without else 0
        return max([*itertools.accumulate(change[time] for time in range(stop))][start:])
