"""Count what torch does and keeps in passes over meta tensors: operations, traffic, memory."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from parallel3d.model.spec import Attention, Collective, KeptMemory, MatMul
from parallel3d.tensor import documents, experts
from parallel3d.tensor.attention import CausalAttention
from parallel3d.tensor.collectives import Context

_KINDS: Any = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allgather_into_tensor_coalesced_": "all_gather",  # one operation for each sample, as one call
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
}
_PRODUCTS = ("mm", "addmm")
_BATCHED_PRODUCTS = ("bmm", "baddbmm")
# Operators whose memory traffic is not counted: products, collectives, and what moves nothing.
_NO_TRAFFIC = (
    *_PRODUCTS,
    *_BATCHED_PRODUCTS,
    "_grouped_mm",
    "_scaled_dot",
    "empty",
    "new_empty",
    "detach",
    *_KINDS,
)


@dataclass
class Operations:
    """The operations of one pass."""

    products: list[MatMul] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    traffic: int = 0
    """Elements that other operators read and write."""
    has_dropout: bool = False
    """Dropout on attention weights."""


@dataclass(frozen=True)
class Held:
    """Memory: bytes of tensors of the training type, and of all other types."""

    own: int = 0
    other: int = 0
    unfused: int = 0
    """Elements of the inputs of norms."""

    @property
    def total(self) -> int:
        """Bytes of all types."""
        return self.own + self.other

    def kept_as(self, single: "Held") -> KeptMemory:
        """Return this memory in bf16, together with the same in fp32 (`single`), for any type."""
        elements = self.own // 2
        other = single.total - 4 * elements
        copies = (self.other - other) // 4
        return KeptMemory(elements, other, copies=copies, unfused=self.unfused)


class _Life:
    """The time from the first to the last operator that a storage is alive at."""

    def __init__(self, reference: Any, held: Held, born: int) -> None:
        self.reference = reference
        self.held = held
        self.born = born
        self.died: int | None = None


class Tally(TorchDispatchMode):
    """Counts operators into `operations`, and notes at which of them each storage is alive.

    - `known`: keys of storages that are not counted (`key_of`): weights and inputs.
    - `dtype`: the training type.
    """

    def __init__(self, known: set[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.known = known
        self.dtype = dtype
        self.time = 0
        self.operations = Operations()
        self._living: dict[int, _Life] = {}
        self._lives: list[_Life] = []
        self._last = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.tick()
        read = tensors_in((args, kwargs))
        if len({tensor.is_meta for tensor in read if tensor.dim()}) > 1:
            # A buffer that was computed has values; their place in memory is all that counts here.
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        written = tensors_in(out)
        sources = {key_of(tensor) for tensor in read}
        results = {key_of(tensor): tensor for tensor in written}
        self._count(name, args)
        if not name.startswith(_NO_TRAFFIC) and (
            func._schema.is_mutable or not results.keys() <= sources
        ):
            if name == "embedding":  # it reads as many elements of its table as it writes
                self.operations.traffic += written[0].numel()
            moved = [tensor for tensor in read if key_of(tensor) not in self.known]
            self.operations.traffic += sum(tensor.numel() for tensor in (*moved, *written))
        for key, tensor in results.items():
            if key not in self.known and key not in self._living:
                life = _Life(_reference(tensor), self.held_by(tensor), self.time)
                self._living[key] = life
        self._last = name
        return out

    def _count(self, name: str, args: Any) -> None:
        if name in _KINDS:
            elements = max(sum(t.numel() for t in tensors_in(arg)) for arg in args)
            collective = Collective(_KINDS[name], elements)
            # On the meta device each sample is gathered alone; otherwise all at once.
            if name == self._last != "allreduce_":
                before = self.operations.collectives.pop()
                collective = collective._replace(elements=before.elements + elements)
            self.operations.collectives.append(collective)
        elif name in _PRODUCTS:
            x, weight = tensors_in(args)[-2:]
            self.operations.products.append(MatMul(len(x), x.shape[1], weight.shape[1]))
        elif name in _BATCHED_PRODUCTS:
            x, y = tensors_in(args)[-2:]
            # Without a batch, because those are the products of experts.
            self.operations.products.append(MatMul(len(x) * x.shape[1], x.shape[2], y.shape[2]))
        elif name == "_grouped_mm":
            x, weights = args[:2]
            if weights.dim() == 3:  # else it is the gradient of weights
                self.count_groups(x, weights)

    def count_groups(self, x: Tensor, weights: Tensor) -> None:
        """Count a product of even groups: x [rows, n], weights [groups, n, m]."""
        groups, n, m = weights.shape
        self.operations.products.append(MatMul(len(x) // groups, n, m, groups))

    def held_by(self, tensor: Tensor) -> Held:
        """Return the memory of a tensor's storage."""
        size = tensor.untyped_storage().nbytes()
        return Held(own=size) if tensor.dtype == self.dtype else Held(other=size)

    def tick(self) -> None:
        """Note which storages are gone."""
        for key, life in list(self._living.items()):
            if life.reference.expired():
                life.died = self.time
                self._lives.append(life)
                del self._living[key]
        self.time += 1

    def start_pass(self) -> Operations:
        """Return the operations until now, and count those from now on."""
        before = self.operations
        self.operations = Operations()
        self._last = ""
        return before

    def living(self) -> dict[int, Held]:
        """Return the memory of the storages that are alive, by key."""
        self.tick()
        return {key: life.held for key, life in self._living.items()}

    def most(self, start: int, stop: int, without: set[int]) -> Held:
        """Return the most memory that is alive at one of the operators [start, stop).

        - `without`: keys of living storages that are left out.
        """
        self.tick()
        own: Counter[int] = Counter()
        other: Counter[int] = Counter()
        kept = [life for key, life in self._living.items() if key not in without]
        for life in (*self._lives, *kept):
            for change, size in ((own, life.held.own), (other, life.held.other)):
                change[life.born] += size
                if life.died is not None:
                    change[life.died + 1] -= size
        alive = zip(
            itertools.accumulate(own[time] for time in range(stop)),
            itertools.accumulate(other[time] for time in range(stop)),
            strict=True,
        )
        return max((Held(*sizes) for sizes in [*alive][start:]), key=lambda held: held.total)


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _on_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) else value


def key_of(tensor: Tensor) -> int:
    """Return what identifies a tensor's storage while it is alive."""
    return int(tensor.untyped_storage()._cdata)


def _reference(tensor: Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())


class _Attention(torch.autograd.Function):
    """A fused attention's memory: it keeps its arguments, its result and the logsumexp."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [batch, heads, seq, size] -> [batch, heads, seq, size of v]."""
        batch, heads, seq, _ = q.shape
        y = q.new_empty(batch, seq, heads, v.shape[-1]).transpose(1, 2)
        logsumexp = q.new_empty(batch, heads, seq, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, y, logsumexp)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _RmsNorm(torch.autograd.Function):
    """A fused RMSNorm's memory and traffic: it keeps its input and a statistic per vector."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        """x [..., size], weight [size] -> [..., size]; `note` is called with the statistics."""
        y, _, scale = torch.native_layer_norm(x, weight.shape, weight, None, 1e-5)
        note(scale)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, scale, scale, weight, None, [True, True, False]
        )
        return grad_x, grad_weight, None


class _FusedKernels:
    """Stand-ins for attention, RMSNorm and experts that keep what a GPU's fused kernels keep."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.norms: dict[int, int] = {}
        self._statistics: list[StorageWeakRef] = []

    def scaled_dot_product_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **_: object,
    ) -> Tensor:
        """Count an attention in place of torch's function."""
        return self.attend(q, k, v, dropout_p, None)

    def rms_norm(
        self, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        """Count a norm in place of torch's function."""

        def note(statistics: Tensor) -> None:
            self.norms[key_of(statistics)] = x.numel()
            # As long as it exists, no other storage has the same key.
            self._statistics.append(StorageWeakRef(statistics.untyped_storage()))

        y: Tensor = _RmsNorm.apply(x, x.new_empty(shape) if weight is None else weight, note)
        return y

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, window: int | None) -> Tensor:
        """Count an attention: q, k, v [batch, heads, seq, size] -> [batch, heads, seq, size]."""
        batch, heads, seq, size = q.shape
        # Scores are products of the size of queries, weighted sums of that of values.
        size = (size + v.shape[-1]) // 2
        operations = self.tally.operations
        operations.attentions.append(Attention(batch, heads, k.shape[1], seq, size, window))
        operations.has_dropout |= dropout > 0
        y: Tensor = _Attention.apply(q, k, v)
        return y

    def attend_as(
        self, core: CausalAttention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Count an attention of the library, in place of the kernel that it would choose.

        q, k, v [batch, heads, seq, size] -> [batch, seq, heads, size of v].
        """
        value_size = v.shape[-1]
        size = max(q.shape[-1], value_size)
        q, k, v = (documents._widened(t, size) for t in (q, k, v))
        first = 0
        window = core.window or core.chunk  # a window has up to twice the keys of chunks
        if sinks is not None:
            first = 1
            window = None if window is None else window + 1
            q, k, v = documents._with_sink(q, k, v, sinks)
        y = self.attend(q, k, v, core.dropout.active_p, window)
        return y[:, :, first:, :value_size].transpose(1, 2)

    def grouped_product(self, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        """Count a product of even groups in place of `tensor.experts`, which has to know loads."""
        if b.dim() == 2:
            return a.new_empty(len(ends), a.shape[0], b.shape[1])
        self.tally.count_groups(a, b)
        return a.new_empty(len(a), b.shape[2])


@contextmanager
def fused_kernels(tally: Tally) -> Iterator[dict[int, int]]:
    """Run attention, RMSNorm and experts as kernels that are counted by their shapes.

    Yields the number of elements of each norm's input, by the key of its statistics.
    """
    kernels = _FusedKernels(tally)

    def attend(core: CausalAttention, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        _, sinks = rest  # the segments are None
        return kernels.attend_as(core, q, k, v, sinks)

    with (
        patch.object(F, "scaled_dot_product_attention", kernels.scaled_dot_product_attention),
        patch.object(F, "rms_norm", kernels.rms_norm),
        patch.object(CausalAttention, "_attend", attend),
        patch.object(experts, "grouped_product", kernels.grouped_product),
    ):
        yield kernels.norms


def without(operations: Iterable[Any], plain: Iterable[Any]) -> list[Any]:
    """Return the first of `operations` that are left without those of `plain`, each once."""
    left = Counter(plain)
    rest = []
    for operation in reversed([*operations]):
        if left[operation]:
            left[operation] -= 1
        else:
            rest.append(operation)
    return rest[::-1]
