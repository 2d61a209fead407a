"""Compute a microbatch of each rank again on another rank, and name the rank that was wrong.

A step's own forward and backward of one microbatch leave a digest of each value that a layer
computes. Before the update, the ranks of the next place of the mesh get its inputs, build the same
layers with the weights of the masters, and compute the microbatch again, layer by layer. All ranks
do so at once, each for another one, so a check takes as long as one microbatch more.
"""

import json
import math
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from parallel3d.config import CompleteConfig
from parallel3d.engine import Update, moments, plain_building
from parallel3d.extras.guard.recorder import Recorder
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.device import name_of_device
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.model import optimizers
from parallel3d.pipeline.stages import build_layer
from parallel3d.schedule.schedule import Op
from parallel3d.tensor.collectives import all_reduce
from parallel3d.tensor.compiled import mode_on
from parallel3d.tensor.context import LayerContext, SumListener
from parallel3d.tensor.random_key import RandomKey
from parallel3d.tensor.segments import Segments
from parallel3d.tensor.side_loss import alias, sum_side_losses
from parallel3d.train.assembly import Assembly
from parallel3d.train.check_bits import REMEDY, Row, WrongBits, digest, read_digests
from parallel3d.train.digests import BOUNDS, is_close

_Known = dict[str, tuple[int, float]]
"""The bits and the norm of each place of another rank's digests."""


class _Difference(NamedTuple):
    """The first value of a rank that another computation does not confirm."""

    order: int
    """How many values were computed before it."""
    wrong: list[int]
    """The ranks that may be wrong."""
    text: str


class Recomputation:
    """Records a microbatch of each rank in a step, and compares it with another rank's.

    To create one is collective.
    """

    def __init__(self, config: CompleteConfig, mesh: Mesh, parts: Assembly) -> None:
        self._config = config
        self._mesh = mesh
        self._parts = parts
        names = gather_json(mesh, name_of_device(mesh.device))
        is_exact = mesh.device.type == "cpu" or config.train.deterministic
        self._bound = 0.0 if is_exact and len(set(names)) == 1 else BOUNDS[config.precision]
        layers = parts.stages.module.layers
        uses: Counter[nn.Parameter] = Counter()
        for layer in chain.from_iterable(layers.values()):
            uses.update(layer.parameters())
        self._shared = {parameter for parameter, count in uses.items() if count > 1}
        self._held = {id(h.parameter): h for h in parts.engine.held}
        settings = parts.engine.settings
        self._settings = settings
        self._file = optimizers.load(settings.optimizer.type)
        self._kinds = optimizers.kinds(settings.optimizer.type)[1:]
        on_device = settings.zero.offload_optimizer.device == "none"
        self._checks_update = on_device and not self._file.WHOLE_MATRICES
        self._segments: dict[str, list[tuple[int, int]]] = {}
        if on_device and settings.reduces_once:
            self._segments = self._find_segments()

    def _find_segments(self) -> dict[str, list[tuple[int, int]]]:
        """Return the pieces of each parameter's gradient that ranks hold after the reduction."""
        engine = self._parts.engine
        mesh = self._mesh
        own = [(p.held.name, p.start, p.numel) for block in engine.states.blocks for p in block]
        rows = gather_json(mesh, own)
        segments = dict[str, set[tuple[int, int]]]()
        for rank in mesh.shards.ranks if self._settings.zero.stage else [mesh.rank]:
            for name, start, numel in rows[rank]:
                segments.setdefault(name, set()).add((start, numel))
        return {name: sorted(parts) for name, parts in segments.items()}

    @contextmanager
    def recording(self, step: int, num_microbatches: int) -> Iterator[None]:
        """Record the microbatch whose backward is the first of a stage, in the step inside.

        Its gradients are its own: those of later ones are added to them.
        """
        parts = self._parts
        mesh = self._mesh
        module = parts.stages.module
        key = parts.stages.key
        self._step = step
        self._stage = list(module.layers)[step % len(module.layers)]
        program = parts.executor.schedule_for(num_microbatches).programs[mesh.pipeline.coord]
        self._microbatch = next(
            a.microbatch for a in program if a.stage == self._stage and a.op in (Op.B, Op.I)
        )
        self._recorder = Recorder(key, self._microbatch)
        self._inputs: dict[str, Tensor] = {}
        own = self._stage, self._microbatch

        def note_inputs(_: nn.Module, args: tuple[Any, ...]) -> None:
            if (args[0], key.microbatch) != own:
                return
            names = ("x", "labels", "segments", "weights")
            inputs = dict(zip(names, args[1:], strict=False))
            segments = inputs.pop("segments", None)
            if segments is not None:
                inputs |= {"positions": segments.positions, "bounds": segments.bounds}
            for name, tensor in inputs.items():
                if tensor is not None:
                    self._inputs[name] = tensor.detach()

        def note_gradients(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if (args[0], key.microbatch) != own:
                return
            x, side = output if isinstance(output, tuple) else (output, None)
            x.register_hook(partial(self._inputs.__setitem__, "gradient"))
            if side is not None and side.total.requires_grad:
                side.total.register_hook(partial(self._inputs.__setitem__, "side_gradient"))

        with ExitStack() as until:
            until.enter_context(parts.stages.listener.heard_by(self._recorder.note_part))
            self._moments = until.enter_context(parts.engine.measuring(self._segments))
            until.enter_context(module.register_forward_pre_hook(note_inputs))
            until.enter_context(module.register_forward_hook(note_gradients))
            numbers = parts.stages.layers_of_stage[self._stage]
            for number, layer in zip(numbers, module.layers[self._stage], strict=True):
                self._recorder.watch(number, layer, until, self._shared)
            yield

    def compare(self) -> None:
        """Raise WrongBits on all ranks if one of them was wrong. Collective, before the update.

        If two ranks differ, a third computation decides: on another place of the mesh or, where
        there are only two, on each of the two once more.
        """
        pulse.doing(f"computing a microbatch of step {self._step + 1} again")
        self._number = self._parts.executor.batch[self._microbatch].number
        first, third = self._distances()
        others = self._recompute(first)
        own = [
            row
            for row in self._recorder.read()
            # Sums that are heard from other stages are none of the other computation's.
            if row.place in others or not row.place.startswith("partial")
        ]
        row = self._first_difference(own, others)
        again = others
        repeated = others
        if any(flag for (flag,) in self._mesh.messages.gather_floats([row is not None])):
            again = self._recompute(third)
            repeated = self._recompute(first) if third == 0 else others
        difference = None
        if row is not None:
            kind, number, path = row.place.partition("#")[0].split(" ")
            layer = self._parts.layers[int(number)].name
            module = f"{layer}.{path}".rstrip(".")
            text = (
                f"computed wrong bits in stage {self._stage}, layer {layer}, microbatch "
                f"{self._number}: the {kind.replace('-', ' ')} of {module}"
            )
            difference = self._decide(own.index(row), text, row, others, again, repeated)
        self._raise_any(difference)
        self._raise_any(self._reduction_difference())

    def _distances(self) -> tuple[int, int]:
        """Return how many places on the first and the third computation of this step run."""
        count = len(self._mesh.places)
        if count == 1:
            return 0, 0
        first = 1 + self._step % (count - 1)
        third = 1 + first % (count - 1) if count > 2 else 0
        return first, third

    def _first_difference(self, own: Sequence[Row], others: _Known) -> Row | None:
        return next((row for row in own if not self._is_same(row, others)), None)

    def _decide(
        self, order: int, text: str, row: Row, others: _Known, again: _Known, repeated: _Known
    ) -> _Difference:
        """Return which ranks may be wrong: this one, or the one that computed `others`."""
        other_bits, other_norm = others[row.place]
        first, third = self._distances()
        places = self._mesh.places
        rank = self._mesh.rank
        checker = places[(places.index(rank) + first) % len(places)]
        wrong = sorted({rank, checker})
        if self._is_same(Row(row.place, other_bits, other_norm), again):
            wrong = [rank]
        elif self._is_same(row, again if third else repeated):
            wrong = [checker]
        norms = f"has norm {row.norm:.9g}, computed again {other_norm:.9g}"
        return _Difference(order, wrong, f"{text} {norms}")

    def _reduction_difference(self) -> _Difference | None:
        """Return the first piece of a gradient that is not the mean of the replicas' gradients.

        Its sum must be theirs, within 8 roundings of the gradients' norm. Collective.
        """
        replicas = self._mesh.replicas
        names = sorted(self._moments)
        if not names:
            return None
        flat = all_reduce(torch.cat([self._moments[name] for name in names]), replicas.group)
        keys = [(name, *segment) for name in names for segment in self._segments[name]]
        expected = dict(zip(keys, flat.tolist(), strict=True))
        for order, (piece, gradient) in enumerate(self._parts.engine.states.gradients()):
            total, squares = expected[piece.held.name, piece.start, piece.numel]
            dtypes = self._settings.dtype, self._settings.reduction_dtype
            eps = max(torch.finfo(dtype).eps for dtype in dtypes)
            own = float(moments(gradient)[0])
            mean = total / replicas.size
            is_near = abs(own - mean) <= 8 * eps * squares**0.5
            if math.isfinite(total) and not is_near:  # fp16 overflows
                text = (
                    f"has a wrong averaged gradient of {piece.held.name}: its sum is {own:.9g}, "
                    f"the replicas' mean is {mean:.9g}"
                )
                return _Difference(order, [self._mesh.rank], text)
        return None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Compute the update inside again elsewhere; raise WrongBits on all ranks if it differs.

        The state is sent before it is updated. Only optimizers that update each element by itself
        are checked, and only without offload.
        """
        if not self._checks_update:
            yield
            return
        results: list[tuple[list[Row], _Known, _Known]] = []
        answers: list[_Known] = []

        def before(update: Update) -> None:
            answers[:] = [self._update_elsewhere(update, by) for by in self._distances()]

        def after(update: Update) -> None:
            tensors = [update.master, *(update.state[kind] for kind in self._kinds)]
            spans = [(p.piece.held.name, p.offset, p.piece.numel) for p in update.places]
            results.append((self._digest_pieces(tensors, spans), answers[0], answers[1]))

        with self._parts.engine.states.watching_update(before, after):
            yield
        difference = None
        for order, (own, others, again) in enumerate(results):
            row = self._first_difference(own, others)
            if row is not None and difference is None:
                text = f"updated wrongly: {row.place}"
                difference = self._decide(order, text, row, others, again, others)
        self._raise_any(difference)

    def _digest_pieces(
        self, tensors: Sequence[Tensor], spans: Sequence[tuple[str, int, int]]
    ) -> list[Row]:
        """Return digests of pieces (parameter, offset, length) of the flat master and state."""
        places = []
        digests = []
        for name, offset, length in spans:
            for kind, tensor in zip(("master", *self._kinds), tensors, strict=True):
                places.append(f"the {kind} of {name}")
                digests.append(digest(tensor.narrow(0, offset, length)))
        return read_digests(places, digests)

    def _update_elsewhere(self, update: Update, by: int) -> _Known:
        """Return the digests of an update that the rank `by` places on computes."""
        mesh = self._mesh
        kinds = self._kinds
        gradient = update.master.grad
        assert gradient is not None
        spans = [(p.piece.held.name, p.offset, p.piece.numel) for p in update.places]
        count = float(update.state.get("step", 0))
        about = json.dumps([update.options, count, len(gradient), spans])
        options, count, length, spans = json.loads(mesh.messages.exchange_text(about, by))
        tensors = [update.master.detach(), gradient, *(update.state[kind] for kind in kinds)]
        received = [tensor.new_empty(length) for tensor in tensors]
        mesh.messages.exchange(tensors, received, by)
        master = nn.Parameter(received[0])
        optimizer = self._file.make(
            [{"params": [master]}],
            self._settings.optimizer.params,
            device=mesh.device,
            cpu_adam=False,
        )
        optimizer.param_groups[0].update(options)
        state = self._file.new_state(optimizer, master)
        if "step" in state:
            state["step"] += count
        state.update(zip(kinds, received[2:], strict=True))
        optimizer.state[master] = state
        master.grad = received[1]
        optimizer.step()
        rows = self._digest_pieces([master, *(state[kind] for kind in kinds)], spans)
        return self._returned(rows, by)

    def _returned(self, rows: Sequence[Row], by: int) -> _Known:
        """Send rows back to the rank that asked; return those of the rank that was asked."""
        text = json.dumps({place: numbers for place, *numbers in rows})
        answer: _Known = json.loads(self._mesh.messages.exchange_text(text, -by))
        return answer

    def _is_same(self, row: Row, others: _Known) -> bool:
        """Return True if another computation has the same bits, or if rounding explains it."""
        other_bits, other_norm = others[row.place]
        if row.bits == other_bits:
            return True
        return self._bound > 0 and is_close(row.norm, other_norm, self._bound)

    def _raise_any(self, difference: _Difference | None) -> None:
        """Raise WrongBits on all ranks if one has a difference; collective.

        Tensor-parallel ranks pass a wrong value on, so the earliest difference among them counts.
        """
        if not any(flag for (flag,) in self._mesh.messages.gather_floats([difference is not None])):
            return
        own = [self._mesh.places, socket.gethostname(), difference]
        rows = gather_json(self._mesh, own)
        by_place: dict[int, list[_Difference]] = {}
        for rank, (places, _, other) in enumerate(rows):
            if other is not None:
                by_place.setdefault(places.index(rank), []).append(_Difference(*other))
        texts = []
        for differences in by_place.values():
            first = min(other.order for other in differences)
            earliest = [other for other in differences if other.order == first]
            ranks = sorted({rank for other in earliest for rank in other.wrong})
            named = " and ".join(f"rank {rank} on {rows[rank][1]}" for rank in ranks)
            one_of = "one of " if len(ranks) > 1 else ""
            texts.append(f"{one_of}{named} {earliest[0].text}")
        raise WrongBits(f"{'; '.join(texts)}. {REMEDY}")

    def _recompute(self, by: int) -> _Known:
        """Return the digests that the rank `by` places on computes from this rank's inputs."""
        mesh = self._mesh
        shapes = {}
        for name, tensor in self._inputs.items():
            shapes[name] = [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
        about = self._stage, self._microbatch, mesh.samples.coord, shapes
        stage, microbatch, dp_coord, shapes = json.loads(
            mesh.messages.exchange_text(json.dumps(about), by)
        )
        inputs = {}
        for name, (dtype, *shape) in shapes.items():
            inputs[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device)
        mesh.messages.exchange(list(self._inputs.values()), list(inputs.values()), by)
        key = RandomKey(self._config.train.seed, dp_coord, self._step, microbatch)
        return self._returned(self._run(stage, inputs, key, by), by)

    def _run(self, stage: int, inputs: dict[str, Tensor], key: RandomKey, by: int) -> list[Row]:
        """Return the digests of another rank's stage, with the weights of one layer in memory.

        Each layer runs twice, like a recomputed one: first for the next layer's input.
        """
        recorder = Recorder(key, key.microbatch)
        listener = SumListener(recorder.note_part)
        of_stage = self._parts.stages.layers_of_stage
        numbers = of_stage[stage]
        most = max(map(len, of_stage))
        xs = [inputs["x"]]
        gradient = inputs.get("gradient")
        for place in range(most):
            layer = self._layer(numbers, place, key, by, SumListener())
            if layer is not None and place + 1 < len(numbers):
                xs.append(_forward(layer, xs[place], inputs, False)[0].detach())
        for place in reversed(range(most)):
            layer = self._layer(numbers, place, key, by, listener)
            if layer is None:
                continue
            x = xs.pop().detach()
            x.requires_grad_(x.is_floating_point())
            with ExitStack() as until:
                recorder.watch(numbers[place], layer, until, set())
                output, side = _forward(layer, x, inputs, place + 1 == len(numbers))
                roots = [output]
                gradients = [gradient]
                if side is not None and "side_gradient" in inputs:
                    roots = [output, side]
                    gradients = [gradient, inputs["side_gradient"]]
                torch.autograd.backward(roots, gradients)
            gradient = x.grad
        return recorder.read()

    def _layer(
        self,
        numbers: Sequence[int],
        place: int,
        key: RandomKey,
        by: int,
        listener: SumListener,
    ) -> nn.Module | None:
        """Return a layer of another rank's stage, and send the weights of this rank's own one."""
        parts = self._parts
        mesh = self._mesh
        config = self._config
        own = parts.stages.module.layers[self._stage]
        engine = parts.engine
        weights = []
        if place < len(own):
            for parameter in _by_name(own[place]):
                weight = engine.full_parameter(self._held[id(parameter)])
                weights.append(weight.to(engine.settings.dtype))
        layer: nn.Module | None = None
        into: list[Tensor] = []
        if place < len(numbers):
            context = LayerContext(
                mesh.tensor.group,
                key,
                sequence_parallel=config.mesh.sequence_parallel,
                recompute=config.pipeline.activation_checkpointing,
                overlap=config.train.overlap,
                pointwise=mode_on(mesh.device, config.train.compile) == "pointwise",
                listener=listener,
            )
            with plain_building(engine.settings.dtype, mesh.device):
                layer = build_layer(parts.layers[numbers[place]], context)
            if engine.settings.shards_parameters and not engine.settings.holds_weights:
                _pass_aliases(layer)
            for parameter in _by_name(layer):
                into.append(parameter.data)
                if engine.settings.precision != "fp32":
                    parameter.grad_dtype = torch.float32
        mesh.messages.exchange(weights, into, by)
        return layer


def _pass_aliases(layer: nn.Module) -> None:
    """Let each module take and return aliases of tensors, as under DeepSpeed's hooks for ZeRO-3.

    Otherwise autograd would add three gradients of one tensor in another order.
    """
    aliased = partial(tree_map, lambda v: alias(v) if isinstance(v, Tensor) else v)
    for module in layer.modules():
        module.register_forward_pre_hook(lambda _, args: aliased(args))
        module.register_forward_hook(lambda _, __, output: aliased(output))


def _by_name(layer: nn.Module) -> list[nn.Parameter]:
    """Return a layer's parameters; a tied one stands elsewhere among the others."""
    return [parameter for _, parameter in sorted(layer.named_parameters())]


def _forward(
    layer: nn.Module, x: Tensor, inputs: dict[str, Tensor], is_last: bool
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's output, and the sum of its side losses if it has any."""
    if is_last and "labels" in inputs:
        output = layer(x, inputs["labels"], *(inputs[k] for k in ("weights",) if k in inputs))
    else:
        segments = None
        if "bounds" in inputs:
            lengths = tuple(inputs["bounds"].diff().tolist())
            segments = Segments(inputs["positions"], inputs["bounds"], lengths)
        output = layer(x, segments)
    if isinstance(output, Tensor):
        return output, None
    return output[0], sum_side_losses(list(output[1].items())).total
