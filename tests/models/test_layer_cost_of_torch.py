"""What a layer says that it costs one tp rank, against what torch does and keeps.

Saved bytes by autograd's own hooks; collectives and the matrix products' FLOPs as they run on gloo
ranks; the most that is alive at once on the "fake" backend, whose collectives hold no memory.
"""

import importlib
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import models
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Collective, Shape
from parallel3d.pipeline.stages import Stages
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.dropout import RandomKey
from parallel3d.verify.local_ranks import run_locally
from tests.models.families import small

pytestmark = pytest.mark.gloo

SHAPE = Shape(2, 64)
SIZES = {"hidden_size": 64, "num_attention_heads": 8, "vocab_size": 1021}
CONFIGS = {
    "gpt": small("gpt", **SIZES),
    "gpt, dropout": small("gpt", **SIZES, resid_pdrop=0.1, embd_pdrop=0.1),
    "llama, grouped": small("llama", **SIZES, intermediate_size=160, num_key_value_heads=2),
    "llama, all": small(
        "llama", **SIZES, intermediate_size=160, qk_norm=True, attention_bias=True
    ),
}  # fmt: skip
KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
}
MODES = [(False, "none"), (False, "selective"), (False, "full"), (True, "none"), (True, "full")]
PLACES = {"Embedding": 0, "Block": 1, "Head": -1}


def cases():
    """Layer, and whether and how it splits the sequence and recomputes."""
    for layer in PLACES:
        for sequence_parallel, recompute in MODES:
            if layer == "Block" or recompute == "none":
                yield layer, sequence_parallel, recompute


class Layer:
    """One layer on a tp group, ready to run."""

    def __init__(self, config, kind, group, sequence_parallel, recompute, dtype=torch.float32):
        selective = recompute == "selective"
        context = LayerContext(group, RandomKey(0), sequence_parallel, selective)
        blocks = importlib.import_module(f"models.{config.family}.blocks")
        torch.manual_seed(0)
        self.module = getattr(blocks, kind)(config, "blocks.0", context).to(dtype)
        for parameter in self.module.parameters():
            parameter.data.normal_(0, 0.02)
        seq = SHAPE.seq // group.size() if sequence_parallel else SHAPE.seq
        self.x = torch.randn(SHAPE.batch, seq, config.hidden_size, dtype=dtype, requires_grad=True)
        self.tokens = torch.randint(config.vocab_size, (SHAPE.batch, SHAPE.seq))
        self.kind = kind
        self.stages = Stages({0: [self.module]}, {self.module} if recompute == "full" else set())
        self.run()  # tables that stay are made
        self.cost = models.layers(config)[PLACES[kind]].cost(
            SHAPE, group.size(), sequence_parallel, recompute
        )

    def run(self):
        """The forward pass; the layer's input is made inside, and so it is counted."""
        if self.kind == "Embedding":
            return self.module(self.tokens)
        if self.kind == "Head":
            return self.module(self.x * 1, self.tokens)
        return self.stages(0, self.x * 1)


def outside(layer):
    """Storages of what is no activation: parameters, what is fed in, tables of angles."""
    tensors = [*layer.module.parameters(), layer.x, layer.tokens]
    rotary = getattr(getattr(layer.module, "attention", None), "rotary", None)
    tensors += [] if rotary is None else rotary._tables
    return {t.untyped_storage().data_ptr() for t in tensors}


class Collectives(TorchDispatchMode):
    """The collectives that run, and the elements of the whole tensor of each."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = KINDS.get(func.__name__.split(".")[0])
        if kind:
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.ran.append(Collective(kind, max(prod(t.shape) for t in tensors)))
        return func(*args, **(kwargs or {}))


def saved_bytes(layer):
    """Bytes of the unique storages that autograd is given to keep."""
    seen, known = {}, outside(layer)

    def pack(tensor):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer.run()
    found = sum(size for pointer, size in seen.items() if pointer not in known)
    y.sum().backward()  # no rank waits for a collective that another leaves out
    return found


def measured(rank, tp):
    """For each config and case: saved bytes, collectives and FLOPs of forward and backward."""
    group, found = Mesh(1, 1, tp).group("tp"), {}
    for name, config in CONFIGS.items():
        for case in cases():
            layer = Layer(config, case[0], group, *case[1:])
            with Collectives() as forward:
                y = layer.run()
            with Collectives() as backward:
                y.sum().backward()
            # Torch counts no FLOPs in its fused attention for the CPU.
            with sdpa_kernel(SDPBackend.MATH):
                with FlopCounterMode(display=False) as flops:
                    y = layer.run()
                with FlopCounterMode(display=False) as more:
                    y.sum().backward()
            counted = flops.get_total_flops(), more.get_total_flops()
            bytes_of = {torch.float32: saved_bytes(layer)}
            bytes_of[torch.bfloat16] = saved_bytes(
                Layer(config, case[0], group, *case[1:], torch.bfloat16)
            )
            found[name, case] = layer.cost, forward.ran, backward.ran, counted, bytes_of
    return found


@pytest.fixture(scope="module", params=[1, 2])
def ran(request):
    return run_locally(measured, request.param, request.param)[-1]  # the largest part of all


def test_saved_bytes_are_those_that_autograd_keeps(ran):
    for place, (cost, *_, bytes_of) in ran.items():
        for dtype, held in bytes_of.items():
            said = cost.saved.bytes(dtype.itemsize, fused_norms=False)
            assert said == pytest.approx(held, rel=0.01), (place, dtype)


def test_collectives_are_those_that_run(ran):
    for place, (cost, forward, backward, *_) in ran.items():
        assert list(cost.forward.collectives) == forward, place
        again = [*cost.recomputed.collectives, *cost.backward_collectives]
        assert sorted(again) == sorted(backward), place


def test_flops_of_a_rank_are_those_that_torch_counts(ran):
    def flops(work):
        inner = work.attention.flops if work.attention else 0
        return inner + sum(product.flops for product in work.matmuls)

    for place, (cost, *_, (forward, backward), _) in ran.items():
        assert flops(cost.forward) == forward, place
        again = flops(cost.recomputed)
        # Of an attention in parts the last product is not computed again: nobody keeps its result.
        again //= 2 if place[1][2] == "selective" else 1
        assert 2 * flops(cost.forward) + again == backward, place


class Alive(TorchDispatchMode):
    """The bytes of the storages that are alive at each operator, what they were born as."""

    def __init__(self, known):
        super().__init__()
        self.known, self.time, self.lives, self.living = known, 0, [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.tick()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                if tensor.untyped_storage().data_ptr() not in self.known:
                    born = reference, tensor.untyped_storage().nbytes(), self.time
                    self.living.setdefault(reference.cdata, born)
        return out

    def tick(self):
        for key, (reference, size, born) in list(self.living.items()):
            if reference.expired():
                self.lives.append((size, born, self.time))
                del self.living[key]
        self.time += 1

    def most(self, start, stop, without):
        """The most bytes alive at one of the operators [start, stop)."""
        self.tick()
        lives = [*self.lives]
        lives += [
            (n, born, stop) for key, (_, n, born) in self.living.items() if key not in without
        ]
        return max(
            sum(size for size, born, died in lives if born <= time <= died)
            for time in range(start, stop)
        )


def peak(layer):
    """The most bytes alive in a forward and a backward, weights and their gradients left out."""
    with Alive(outside(layer)) as alive:
        y = layer.run()
        result, middle = StorageWeakRef(y.untyped_storage()).cdata, alive.time + 1
        y.backward(None if y.dim() == 0 else torch.ones_like(y))
        alive.tick()
        gradients = {
            StorageWeakRef(p.grad.untyped_storage()).cdata for p in layer.module.parameters()
        }
        end = alive.time
        forward = alive.most(0, middle, gradients)
        return max(forward, alive.most(middle, end, gradients | {result}))


def peaks(rank):
    """Peak and what was said of it, for each config, tp and case; groups that send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    found = {}
    for tp in (1, 2, 4):
        group = dist.new_group(list(range(tp)))
        for name, config in CONFIGS.items():
            for case in cases():
                layer = Layer(config, case[0], group, *case[1:])
                said = (layer.cost.saved + layer.cost.working).bytes(4, fused_norms=False)
                found[name, tp, case] = peak(layer), said
    return found


def test_saved_and_working_are_the_peak():
    for place, (most, said) in run_locally(peaks, 1)[0].items():
        assert said == pytest.approx(most, rel=0.02), place
