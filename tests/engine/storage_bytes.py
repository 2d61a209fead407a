"""Bytes that a rank holds of parameters, gradients and optimizer states, storage by storage."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from parallel3d.engine import Engine


def held_bytes(engine: Any, parameters: Iterable[nn.Parameter]) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer and buffers that this rank holds now, by kind.

    "parameters": in the training type, ZeRO-3's shards or the whole; "gradients": the accumulated
    ones, whole or shards; "optimizer": fp32 masters and moments; "buckets": the buffers that
    gradients are reduced in, whose size is a setting; "swap": the page-locked buffers for what lies
    on NVMe, whose size is a setting, too. Each storage counts once, in the first of
    these that names it (in fp32 the masters may be the parameters themselves).
    """
    optimizer = engine.optimizer
    parameters = list(parameters)
    weights = [getattr(p, "ds_tensor", p.data) for p in parameters]
    buckets: list[Tensor] = []
    for bucket in optimizer.ipg_buckets.values():
        buckets += bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
    masters = _masters(optimizer)
    states = [s for state in optimizer.optimizer.state.values() for s in state.values()]
    kinds = {
        "swap": _swap_buffers(optimizer, parameters),
        "parameters": weights,
        "buckets": buckets,
        "gradients": [*_gradients(optimizer, parameters), *(m.grad for m in masters)],
        # Adam's third state, the step, is a single number.
        "optimizer": [*masters, *(s for s in states if isinstance(s, Tensor) and s.numel() > 1)],
    }
    seen: set[int] = set()
    return {kind: _bytes(tensors, seen) for kind, tensors in kinds.items()}


def memory_bytes(engine: Engine) -> dict[str, int]:
    """`held_bytes` of our engine."""
    return held_bytes(engine.deepspeed, [held.parameter for held in engine.held])


def _masters(optimizer: Any) -> list[Tensor]:
    if hasattr(optimizer, "fp16_groups"):  # ZeRO-3
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def _swap_buffers(optimizer: Any, parameters: list[nn.Parameter]) -> list[Tensor | None]:
    buffers: list[Tensor | None] = []
    if swapper := getattr(optimizer, "optimizer_swapper", None):
        buffers += swapper.swap_buffer_manager.all_buffers
    if swapper := getattr(parameters[0], "nvme_swapper", None):
        buffers += [swapper.buffers, swapper.partitioned_swap_buffer]
    return buffers


def _gradients(optimizer: Any, parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Gradients of whole parameters, and the shards that were reduced."""
    gradients = [g for p in parameters for g in (p.grad, getattr(p, "grad_accum", None))]
    if hasattr(optimizer, "fp16_groups"):
        shards = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        return [*gradients, *shards.values()]
    for groups in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        gradients += [g for group in groups.values() for g in group or ()]
    return [*gradients, *getattr(optimizer, "accumulated_grads_in_cpu", {}).values()]


def _bytes(tensors: Iterable[Tensor | None], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if tensor is None or (storage := tensor.untyped_storage()).nbytes() == 0:
            continue
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


@dataclass
class Peaks:
    """The most elements and bytes that ZeRO-3 held at once while `watching`.

    `gathered_elements`: of parameters that DeepSpeed says it has gathered. `gathered_bytes`: of
    all storages that held a gathered parameter and are still alive, released or not: what an
    autograd graph holds on to is seen here. `gradient_bytes`: as in `held_bytes`.
    """

    gathered_elements: int = 0
    gathered_bytes: int = 0
    gradient_bytes: int = 0


@contextmanager
def watching(engine: Any, parameters: Iterable[nn.Parameter]) -> Iterator[Peaks]:
    """Measure ZeRO-3's peaks: a sample at each gathering and each releasing of a module."""
    peaks = Peaks()
    parameters = list(parameters)
    alive: dict[int, tuple[StorageWeakRef, int]] = {}
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()

    def sample() -> None:
        """Take what is gathered, alive and held now into the peaks."""
        gathered = [p for p in parameters if p.ds_status is not ZeroParamStatus.NOT_AVAILABLE]  # type: ignore[attr-defined]
        shards = {p.ds_tensor.untyped_storage().data_ptr() for p in parameters}  # type: ignore[attr-defined]
        for key in [k for k, (reference, _) in alive.items() if reference.expired()]:
            del alive[key]
        for p in gathered:
            storage = p.data.untyped_storage()
            if storage.data_ptr() not in shards:  # one rank alone gathers nothing
                reference = StorageWeakRef(storage)
                alive.setdefault(reference.cdata, (reference, storage.nbytes()))
        elements = sum(p.ds_numel for p in gathered)  # type: ignore[attr-defined]
        held = held_bytes(engine, parameters)
        peaks.gathered_elements = max(peaks.gathered_elements, elements)
        peaks.gathered_bytes = max(peaks.gathered_bytes, sum(n for _, n in alive.values()))
        peaks.gradient_bytes = max(peaks.gradient_bytes, held["gradients"])

    def sampled(method: Callable[..., None], before: bool) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            if before:
                sample()
            method(*args, **kwargs)
            if not before:
                sample()

        return run

    fetch = coordinator.fetch_sub_module
    release = coordinator.release_sub_module
    coordinator.fetch_sub_module = sampled(fetch, before=False)
    coordinator.release_sub_module = sampled(release, before=True)
    try:
        yield peaks
    finally:
        del coordinator.fetch_sub_module, coordinator.release_sub_module
