"""Build and initialise the layers of this rank's stages (floor 4)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.base.section import Problem, Problems
from parallel3d.engine import EngineSettings, HeldParameter, building, writing
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.recompute import NONE, Recompute
from parallel3d.model.spec import LayerSpec, Shape, named_params, tied_names
from parallel3d.schedule.partition import partition
from parallel3d.schedule.schedule import Schedule
from parallel3d.tensor.attention import CausalAttention
from parallel3d.tensor.compiled import Mode, compile_block
from parallel3d.tensor.context import LayerContext, SumListener
from parallel3d.tensor.cut import held_parameters
from parallel3d.tensor.host_activations import HostActivations
from parallel3d.tensor.initialise import fill
from parallel3d.tensor.random_key import RandomKey
from parallel3d.tensor.recompute import run_again
from parallel3d.tensor.segments import Segments
from parallel3d.tensor.side_loss import LayerOutput, SideLoss, StageOutput, alias, sum_side_losses


class Stages(nn.Module):
    """The stages of one rank; `forward(stage, ...)` runs one of them.

    - `layers`: each stage's layers.
    - `recompute`: the layers whose activations are recomputed in the backward (activation
      checkpointing "full": all except embedding and head, or the first of each stage).
    - `side_losses`: the names of the side losses that each layer returns, where it returns any.
    - `on_host`: keeps the activations of all layers but the model's ends on the host.
    """

    def __init__(
        self,
        layers: dict[int, list[nn.Module]],
        recompute: set[nn.Module],
        side_losses: Mapping[nn.Module, tuple[str, ...]] | None = None,
        on_host: HostActivations | None = None,
    ) -> None:
        super().__init__()
        self._side_losses = side_losses or {}
        self._on_host = on_host
        self.stages = nn.ModuleDict({str(s): nn.ModuleList(ls) for s, ls in layers.items()})
        self.layers = layers
        self._recompute = recompute
        self.on_output: Callable[[nn.Module, Tensor], None] = _ignore
        """Called in each forward with a layer and its output, which may be the loss."""

    def forward(
        self,
        stage: int,
        x: Tensor,
        labels: Tensor | None = None,
        segments: Segments | None = None,
        weights: Tensor | None = None,
        on_input_grad: Callable[[int, int, Tensor], None] | None = None,
    ) -> StageOutput:
        """Run a stage: token ids [batch, seq] or activations -> activations, or the loss.

        In training the side losses of its layers stand beside it, if there are any.

        - `labels` [batch, seq]: given to the last stage, which then returns the mean loss [], or in
          evaluation each token's loss [batch, seq].
        - `segments`: the documents to keep apart in attention.
        - `weights` [batch, seq]: return the sum of the losses times these instead of the mean.
        - `on_input_grad`: called in the backward with the stage, the index of a layer whose input
          has its gradient, and that; the gradients of all later layers are then complete.
        """
        layers = list(self.layers[stage])
        last = layers.pop() if labels is not None else None
        side_losses: list[tuple[str, SideLoss]] = []
        hooks = self._on_host.hooks() if self._on_host else nullcontext()
        for index, layer in enumerate(layers):
            if index and on_input_grad and x.requires_grad:
                x.register_hook(partial(on_input_grad, stage, index))
            with hooks if x.requires_grad else nullcontext():  # the embedding saves only token ids
                if layer in self._recompute and torch.is_grad_enabled():
                    output = run_again(layer, x, segments)
                else:
                    output = layer(x, segments)
            x = self._collect(layer, output, side_losses)
        if last is not None:
            loss = last(x, labels) if weights is None else last(x, labels, weights)
            x = self._collect(last, loss, side_losses)
        if not side_losses or not self.training:
            return x
        # The executor frees the data of an output, which a side loss may need in its backward.
        return alias(x), sum_side_losses(side_losses)

    def _collect(
        self, layer: nn.Module, output: LayerOutput, side_losses: list[tuple[str, SideLoss]]
    ) -> Tensor:
        """Return the activation of a layer's output, and append its side losses."""
        x, own = (output, {}) if isinstance(output, Tensor) else output
        declared = self._side_losses.get(layer, ())
        assert own.keys() == set(declared), (
            f"{type(layer).__name__} returns the side losses {sorted(own)}, but its LayerSpec "
            f"declares {sorted(declared)}"
        )
        side_losses.extend(own.items())
        self.on_output(layer, x)
        return x


def _ignore(layer: nn.Module, output: Tensor) -> None:
    """Take an output that nobody has asked for."""


@dataclass(frozen=True)
class BuiltStages:
    """A rank's stages, their parameters, and what their layers share."""

    module: Stages
    held: tuple[HeldParameter, ...]
    key: RandomKey
    """The key of their dropout masks."""
    listener: SumListener
    """Hears their sums over the tensor-parallel group."""
    layers_of_stage: tuple[range, ...]
    """The indices of the layers of every stage of the model."""


def build_stages(
    layers: Sequence[LayerSpec],
    schedule: Schedule,
    settings: EngineSettings,
    *,
    mesh: Mesh,
    shape: Shape,
    seed: int | None = 0,
    activation_checkpointing: Recompute = NONE,
    offload_activations: bool = False,
    sequence_parallel: bool = False,
    overlap: bool = True,
    compiles: Mode = "none",
) -> BuiltStages:
    """Build this rank's stages and initialise their weights.

    Initial weights depend only on `seed`, the weight's global name and the element's place, so they
    have the same bits on every mesh. If `seed` is None, weights are left uninitialised. Under
    ZeRO-3 no rank ever holds a whole stage. Raises ConfigError for layers that cannot share the
    tokens of a sample, if a cp group would.
    """
    key = RandomKey(seed or 0, mesh.samples.coord)
    context = LayerContext(
        mesh.tensor.group,
        key,
        sequence_parallel=sequence_parallel,
        recompute=activation_checkpointing,
        overlap=overlap,
        expert_group=mesh.experts.group,
        sample_group=mesh.context.group,
        pointwise=compiles == "pointwise",
    )
    costs = [layer.cost(shape).forward_flops for layer in layers]
    placement = partition(costs, schedule.num_stages)
    own_stages = [
        s for s, coord in enumerate(schedule.pp_coord_of_stage) if coord == mesh.pipeline.coord
    ]
    modules: dict[str, nn.Module] = {}
    for s in own_stages:
        for i in placement[s]:
            prepare = getattr(_class_of(layers[i]), "prepare", None)
            if prepare is not None:  # outside, where ZeRO-3 does not shard what modules make
                prepare(layers[i].config)
    with building(settings, mesh):
        for s in own_stages:
            for i in placement[s]:
                modules[layers[i].name] = build_layer(layers[i], context)
    own_layers = [layer for layer in layers if layer.name in modules]
    if mesh.context.size > 1:
        _refuse_whole_samples(own_layers, modules, mesh.context.size)
    held: list[HeldParameter] = []
    for layer in own_layers:
        held += held_parameters(
            modules[layer.name],
            layer.params,
            mesh,
            prefix=f"{layer.name}.",
            sequence_parallel=sequence_parallel,
        )
    held = _tie(layers, modules, held)
    if seed is not None:
        _initialise(held, tied_names(layers), seed)
    by_stage = {s: [modules[layers[i].name] for i in placement[s]] for s in own_stages}
    inner = {layer.name for layer in layers[1:-1]}
    if compiles == "block":
        for name in inner & modules.keys():
            compile_block(modules[name])
    recompute: set[nn.Module] = set()
    for s in own_stages:
        blocks = [modules[layers[i].name] for i in placement[s] if layers[i].name in inner]
        recompute |= {*blocks[: activation_checkpointing.num_full(len(blocks))]}
    side_losses: dict[nn.Module, tuple[str, ...]] = {}
    for layer in own_layers:
        loads = (layer.loads,) if layer.num_experts else ()
        side_losses[modules[layer.name]] = layer.side_losses + loads
    on_host = HostActivations(mesh.device) if offload_activations else None
    module = Stages(by_stage, recompute, side_losses, on_host)
    return BuiltStages(module, tuple(held), key, context.listener, placement)


def _initialise(held: Iterable[HeldParameter], originals: Mapping[str, str], seed: int) -> None:
    """Write this rank's part of the initial weights.

    The second copy of a tied weight starts as the first, whose name seeds it.
    """
    for h in held:
        with writing(h.parameter) as (shard, start), torch.no_grad():
            fill(shard, start, h.spec, originals.get(h.name, h.name), h.cut, seed)


def _refuse_whole_samples(
    layers: Sequence[LayerSpec], modules: Mapping[str, nn.Module], cp: int
) -> None:
    """Raise Problems for layers that need all tokens of a sample, which cp ranks share."""
    for layer in layers:
        rule = ""
        if layer.side_losses and not layer.shares_samples:
            rule = f"{layer.name} has side losses, which are of whole samples"
        elif layer.cost(Shape(1, 8)).forward.attention is not None and not any(
            isinstance(module, CausalAttention) for module in modules[layer.name].modules()
        ):
            rule = f"{layer.name} computes attention without tensor.attention.CausalAttention"
        if rule:
            raise Problems([Problem("parallel3d.mesh.cp", cp, rule, "use mesh.cp = 1")])


def build_layer(layer: LayerSpec, context: LayerContext) -> nn.Module:
    """Return a layer's module; its parameters have no values yet."""
    module: nn.Module = _class_of(layer)(layer.config, layer.name, context)
    return module


def _class_of(layer: LayerSpec) -> Any:
    module_name, _, class_name = layer.build.partition(":")
    return getattr(import_module(module_name), class_name)


def _tie(
    layers: Sequence[LayerSpec], modules: dict[str, nn.Module], held: list[HeldParameter]
) -> list[HeldParameter]:
    """Make tied weights one parameter if both copies are on this rank; otherwise mark them."""
    by_name = {h.name: h for h in held}
    originals = named_params(layers)
    for layer in layers:
        for copy_name, original in layer.tied:
            copy = f"{layer.name}.{copy_name}"
            if copy in by_name:
                # Ranks at equal places of their stages sum the gradients of the two copies.
                is_alike = by_name[copy].spec.cut_over == originals[original].cut_over
                assert is_alike, f"{copy} and {original} are cut differently"
            if copy in by_name and original in by_name:
                path, _, attribute = copy_name.rpartition(".")
                owner: object = modules[layer.name].get_submodule(path)
                delattr(owner, attribute)
                setattr(owner, attribute, by_name[original].parameter)
                del by_name[copy]
            elif copy in by_name:
                by_name[copy] = replace(by_name[copy], tied_across=True, copy=True)
            elif original in by_name:
                by_name[original] = replace(by_name[original], tied_across=True)
    return list(by_name.values())
