"""Views of this rank's fp32 masters and optimizer state, for every ZeRO stage and offload.

A checkpoint reads and writes them in place, without copies.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor

from parallel3d.model import optimizers
from parallel3d.tensor.cut import HeldParameter

_EXCHANGED = 2**20  # elements that are exchanged at a time
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class ParameterPiece:
    """Elements [start, start + numel) of a parameter's flattened part on this tp rank."""

    held: HeldParameter
    start: int
    numel: int


@dataclass(frozen=True)
class Place:
    """The place of a piece: it begins at element `offset` of an optimizer group's flat tensor."""

    group: int
    offset: int
    piece: ParameterPiece


class Update(NamedTuple):
    """A group's flat master, which an optimizer updates at once; its pieces, options and state."""

    places: Sequence[Place]
    options: Mapping[str, Any]
    master: Tensor
    state: Mapping[str, Any]


class OptimizerStates:
    """Masters and optimizer state of the held parameters, and the counters beside them.

    `kinds` names them: "master", the states that the optimizer's file declares, and "ema" if
    averages are kept. `kinds_of` returns those of a parameter.
    `blocks` groups the pieces whose tensors are in memory together; they stay the same for the
    engine's lifetime. No piece covers ZeRO's padding or the placeholders.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        held: Iterable[HeldParameter],
        optimizer: str,
        has_ema: bool = False,
    ) -> None:
        self._zero: ZeROOptimizer = engine.optimizer
        self._name = optimizer
        self._file = optimizers.load(optimizer)
        self._has_ema = has_ema
        self.kinds = optimizers.kinds(optimizer, has_ema=has_ema)
        self._zero3 = hasattr(self._zero, "fp16_groups")
        self.masters = masters_of(self._zero)
        """The flat fp32 masters of this rank, one for each optimizer group."""
        places = places_of(self._zero, held)
        by_group = groupby(places, attrgetter("group"))
        self._blocks = [list(block) for _, block in by_group]
        self.blocks = tuple(tuple(place.piece for place in block) for block in self._blocks)

    def kinds_of(self, held: HeldParameter) -> tuple[str, ...]:
        """Return the kinds that are kept for a parameter."""
        return optimizers.kinds(self._name, held.spec.role, self._has_ema)

    @contextmanager
    def opened(self, block_index: int, write: bool = False) -> Iterator[list[dict[str, Tensor]]]:
        """Yield each piece's flat fp32 tensors [numel] by kind: views of the live memory.

        States are zeros before the first step. Pass `write` to keep what is written into the
        tensors. Open one block at a time, between steps. Tensors that are read from NVMe are not
        valid afterwards.
        """
        block = self._blocks[block_index]
        with self._in_memory(block[0].group, write) as flat:
            yield [
                {k: tensor.narrow(0, place.offset, place.piece.numel) for k, tensor in flat.items()}
                for place in block
            ]

    def begin(self, master: Tensor) -> None:
        """Create the state of a flat master that has none; its average starts at its values."""
        states = self._zero.optimizer.state
        if not states.get(master):  # DeepSpeed may have made an empty one
            states[master] = self._file.new_state(self._zero.optimizer, master)
            if self._has_ema:
                states[master][optimizers.EMA] = master.detach().clone()

    @contextmanager
    def averaging(self, decay: float) -> Iterator[None]:
        """Move the averages in the step inside, unless it is skipped; 1 leaves them as they are.

        Each follows its master in fp32 as soon as that is updated, on the master's device.
        """

        def begin(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for master in masters_in(optimizer):
                self.begin(master)

        def move(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for master in masters_in(optimizer):
                optimizer.state[master][optimizers.EMA].lerp_(master.detach(), 1 - decay)

        optimizer = self._zero.optimizer
        with (
            optimizer.register_step_pre_hook(begin),
            optimizer.register_step_post_hook(move) if decay < 1 else nullcontext(),
        ):
            yield

    @torch.no_grad()
    def exchange_averages(self) -> None:
        """Exchange masters and averages, and update the training weights; collective over dp."""
        for index in range(len(self.blocks)):
            with self.opened(index, write=True) as pieces:
                for kinds in pieces:
                    masters = kinds["master"].split(_EXCHANGED)
                    averages = kinds[optimizers.EMA].split(_EXCHANGED)
                    for master, average in zip(masters, averages, strict=True):
                        kept = master.clone()
                        master.copy_(average)
                        average.copy_(kept)
        self.finish_loading()

    def gradients(self) -> Iterator[tuple[ParameterPiece, Tensor]]:
        """Yield each piece and its averaged gradient, before the update. Not with offload.

        Biases that balance loads have none.
        """
        for block in self._blocks:
            parts = self._zero.averaged_gradients[block[0].group]
            starts = accumulate((part.numel() for part in parts), initial=0)
            by_start = dict(zip(starts, parts, strict=False))
            for place in block:
                if place.piece.held.spec.role != "balance":
                    part = by_start[place.offset]
                    yield place.piece, part.flatten().narrow(0, 0, place.piece.numel)

    def gradient_norms(self) -> dict[str, Tensor]:
        """Return the norm of this rank's piece of each averaged gradient, before the update.

        They are times the loss scale. With offload DeepSpeed has computed them already.
        """
        known = getattr(self._zero, "norm_for_param_grads", None)
        if known is None:
            names = []
            gradients = []
            for piece, gradient in self.gradients():
                names.append(piece.held.name)
                gradients.append(gradient)
            return dict(zip(names, torch._foreach_norm(gradients), strict=True))
        norms = {}
        for place in chain.from_iterable(self._blocks):
            held = place.piece.held
            if held.spec.role != "balance":
                norms[held.name] = known[self._zero.get_param_id(held.parameter)]
        return norms

    @contextmanager
    def watching_update(
        self, before: Callable[[Update], None], after: Callable[[Update], None]
    ) -> Iterator[None]:
        """Call `before` and `after` the update of each group in a step. Not with offload."""
        optimizer = self._zero.optimizer
        by_master = {self.masters[block[0].group]: block for block in self._blocks}

        def call(function: Callable[[Update], None], *_: object) -> None:
            for group in optimizer.param_groups:
                for master in group["params"]:
                    places = by_master.get(master, [])
                    state = optimizer.state.get(master)
                    state = state or self._file.new_state(optimizer, master)
                    options = {key: value for key, value in group.items() if key != "params"}
                    function(Update(places, options, master, state))

        with (
            optimizer.register_step_pre_hook(partial(call, before)),
            optimizer.register_step_post_hook(partial(call, after)),
        ):
            yield

    @torch.no_grad()
    def finish_loading(self) -> None:
        """Update the training weights from the written masters; collective over dp."""
        if not self._zero3:
            self._zero.update_lp_params()
            return
        # Weights gathered from the old shards are stale.
        self._zero._partition_all_parameters()
        for group in range(len(self.masters)):
            if not self._is_swapped(group):  # `_put_back` has done it for those on NVMe
                self._zero._reassign_or_swap_out_partitioned_parameters(group)

    def counters(self) -> dict[str, object]:
        """Return the counters for `set_counters`, as JSON.

        "optimizer_steps" is the optimizer's own count, 0 if it keeps none. "loss_scale" is the
        state of the dynamic loss scaler, None without one.
        """
        states = self._zero.optimizer.state
        steps = {int(states[m].get("step", 0)) if m in states else 0 for m in self.masters}
        assert len(steps) == 1, steps
        scaler = self._zero.loss_scaler
        scale = {name: getattr(scaler, name) for name in _SCALER} if scaler.dynamic else None
        return {"optimizer_steps": steps.pop(), "loss_scale": scale}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore `counters`; a loss scaler that is fixed or has no saved state is not changed."""
        steps = int(counters["optimizer_steps"])
        states = self._zero.optimizer.state
        for group, master in enumerate(self.masters):
            if master not in states:
                with self._in_memory(group, write=True):
                    pass
            step = states[master].get("step")
            if isinstance(step, Tensor):
                step.fill_(steps)
            elif step is not None:
                states[master]["step"] = steps
        scaler = self._zero.loss_scaler
        if scaler.dynamic and counters["loss_scale"] is not None:
            for name in _SCALER:
                setattr(scaler, name, counters["loss_scale"][name])

    def _is_swapped(self, group: int) -> bool:
        return self._zero3 and bool(self._zero._swappable_optimizer_subgroup(group))

    @contextmanager
    def _in_memory(self, group: int, write: bool) -> Iterator[dict[str, Tensor]]:
        """Yield an optimizer group's flat tensors by kind."""
        master = self.masters[group]
        states = self._zero.optimizer.state
        swapped = self._is_swapped(group)
        if swapped:
            # DeepSpeed's own swap-in of a group would also start to read the next one.
            self._zero.optimizer_swapper.swap_in_optimizer_state(
                parameter=master, async_parameter=None
            )
        new = master not in states
        if new:
            self.begin(master)
        state = states[master]
        flat = {"master": master.detach()}
        flat |= {kind: state[kind] for kind in self.kinds[1:] if kind in state}
        try:
            yield flat
        except BaseException:
            write = False
            raise
        finally:
            if swapped:
                self._put_back(group, master, write, new)

    def _put_back(self, group: int, master: Tensor, write: bool, new: bool) -> None:
        """Write a group to NVMe, or only release its buffers."""
        swapper = self._zero.optimizer_swapper
        if write:
            with torch.no_grad():
                # Otherwise a shard in a swap buffer would be written only there.
                self._zero._partition_all_parameters()
                self._zero._reassign_or_swap_out_partitioned_parameters(group)
            swapper.swap_out_optimizer_state(parameter=master, async_swap=False)
        else:
            if new:  # these states have no files yet
                del self._zero.optimizer.state[master]
            swapper.release_swap_buffers(parameter=master)
        master.grad = None


def masters_in(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the flat masters that a step updates: at ZeRO-3 those of one group at a time."""
    for group in optimizer.param_groups:
        yield from group["params"]


def places_of(zero: ZeROOptimizer, held: Iterable[HeldParameter]) -> list[Place]:
    """Return where the optimizer groups hold this rank's pieces, in the order of the groups."""
    is_zero3 = hasattr(zero, "fp16_groups")
    places = _zero3_places(zero, held) if is_zero3 else _zero12_places(zero, held)
    return sorted(places, key=attrgetter("group", "offset"))


def masters_of(zero: ZeROOptimizer) -> list[Tensor]:
    """Return each optimizer group's flat master; empty while it is on NVMe."""
    is_zero3 = hasattr(zero, "fp16_groups")
    name = "fp32_partitioned_groups_flat" if is_zero3 else "single_partition_of_fp32_groups"
    masters: list[Tensor] = getattr(zero, name)
    return masters


def _zero3_places(zero: ZeROOptimizer, held: Iterable[HeldParameter]) -> Iterator[Place]:
    """Yield this rank's places under ZeRO-3: equal shards of each parameter, the last padded."""
    for h in held:
        group, offset, size = zero.grad_position[zero.get_param_id(h.parameter)]
        start = size * zero._get_param_partition_rank(h.parameter)
        numel = min(size, h.parameter.ds_numel - start)  # type: ignore[attr-defined]
        if numel > 0:
            yield Place(group, offset, ParameterPiece(h, start, numel))


def _zero12_places(zero: ZeROOptimizer, held: Iterable[HeldParameter]) -> Iterator[Place]:
    """Yield this rank's places under ZeRO-1 and 2, which cut a whole group's flat tensor."""
    by_id = {id(h.parameter): h for h in held}
    for group, parameters in enumerate(zero.round_robin_bit16_groups):
        size = zero.partition_size[group]
        begin = size * zero.real_dp_process_group[group].rank()
        for parameter, at in zip(parameters, zero.round_robin_bit16_offsets[group], strict=True):
            h = by_id.get(id(parameter))  # None for the placeholders
            start = max(begin - at, 0)
            numel = min(begin + size - at, parameter.numel()) - start
            if h is not None and numel > 0:
                yield Place(group, at + start - begin, ParameterPiece(h, start, numel))
