"""The layers of any decoder of transformers: its own modules, cut over tensor-parallel ranks."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from parallel3d.models.transformers import attention
from parallel3d.models.transformers.anatomy import skeleton_of
from parallel3d.models.transformers.modules import Copied, LayerBuilder, copied
from parallel3d.models.transformers.regions import LayerPlan
from parallel3d.models.transformers.routed import Routed
from parallel3d.models.transformers.skeleton import Skeleton
from parallel3d.models.transformers.spec import Config
from parallel3d.models.transformers.stand_ins import Port
from parallel3d.tensor.collectives import own_tokens, reduce_from_group
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import cut_of, cut_parameter
from parallel3d.tensor.loss import local_ids
from parallel3d.tensor.segments import Segments
from parallel3d.tensor.side_loss import LayerOutput
from parallel3d.tensor.vocab import VocabParallelOutput


class _Around(nn.Module):
    """A layer that calls the architecture's own forward around what it has."""

    def __init__(self, skeleton: Skeleton, context: LayerContext) -> None:
        super().__init__()
        self.skeleton = skeleton
        self.context = context

    @staticmethod
    def prepare(config: Config) -> None:
        """Build the skeleton of the model, which has no weights to shard."""
        skeleton_of(config).forget()

    def open(self, shell: nn.Module, port: Port) -> None:
        """Set the model to call, and its port for this layer."""
        # Not as modules, whose parameters they would count as.
        object.__setattr__(self, "shell", shell)
        object.__setattr__(self, "port", port)

    def called(
        self, x: Tensor, segments: Segments | None, given: Tensor | None, **inputs: Tensor
    ) -> tuple[Any, Tensor]:
        """Return the model's output, and what the layer at the port returned.

        - `x`: the layer's input; its first two dims are those of the tokens here.
        - `given`: what the port's layer gets; None: what the model gives it.
        """
        self.skeleton.move_buffers(x.device)
        shell: Any = self.shell
        port: Any = self.port
        batch, seq = x.shape[:2]
        # Without a layer no attention asks for the other positions.
        has_layer = port.layer is not None
        if has_layer and x.dim() == 3 and self.context.sequence_parallel:
            seq *= self.context.group.size()
        own: dict[str, Any] = self.skeleton.inputs_of(batch, seq, x)
        if segments is not None:
            own["position_ids"] = segments.positions
        if inputs:
            own.pop("inputs_embeds")
        port.given = given
        port.is_open = True
        try:
            with attention.within(segments):
                output = shell(**own, **inputs)
            return output, port.heard
        finally:
            port.is_open = False
            port.given = port.heard = None


class Table(nn.Module):
    """The table of tokens with its rows cut over the group, in the architecture's own class."""

    def __init__(self, like: nn.Embedding, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        weight = cut_parameter(tuple(like.weight.shape), tensor=(0, context.group))
        table: Any = Copied(like, {"weight": weight})
        table.__class__ = type(like)
        table.padding_idx = None  # in pretraining every token counts
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, seq] -> [batch, seq, size], or this rank's part of the sequence."""
        local, outside = local_ids(tokens, *cut_of(self.table.weight).bounds[0])
        vectors = self.table(local).masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_from_group(vectors, self.context)


class Embedding(_Around):
    """The part of the model before its layers: the table of tokens, and what follows it."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        skeleton = skeleton_of(config)
        super().__init__(skeleton, context)
        for child in skeleton.watched.before:
            like = getattr(skeleton.base, child)
            own = copied(like, _whole(context), f"{name}.{child}", skeleton.rms_norms)
            if child == skeleton.token:
                own = Table(like, context if skeleton.has_plain_table else _whole(context))
            self.add_module(child, own)
        replaced = dict(self.named_children()) | _dropouts(skeleton, name, _whole(context))
        self.open(*skeleton.around(0, None, replaced))

    def forward(self, tokens: Tensor, segments: Segments | None = None) -> Tensor:
        """tokens [batch, seq] -> [batch, seq, hidden], or this rank's part of the sequence."""
        if self.skeleton.has_plain_table:
            table: Tensor = self._modules[self.skeleton.token](tokens)  # type: ignore[misc]
            return table
        _, x = self.called(tokens, segments, None, input_ids=tokens)
        return own_tokens(x, self.context)


class Block(_Around):
    """One layer of the model."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        skeleton = skeleton_of(config)
        super().__init__(skeleton, context)
        number = int(name.rpartition(".")[2])
        plan = LayerPlan(skeleton, number)
        self.layer = LayerBuilder(plan, name, context).build()
        self.routed: Routed | None = None
        if plan.experts is not None:
            self.routed = Routed(self.layer, plan, skeleton, config, name, context)
        self.open(*skeleton.around(number, self.layer, {}))

    def forward(self, x: Tensor, segments: Segments | None = None) -> LayerOutput:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape.

        With experts, side losses come beside it.
        """
        y = self.called(x, segments, x)[1]
        if self.routed is None:
            return y
        return y, self.routed.side_losses(len(x), self.training)


class _Caught(nn.Module):
    """Stands in the place of the output projection, and keeps its input."""

    x: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, hidden] -> a logit of 0 for each token."""
        self.x = x
        return x[..., :1] * 0


class Head(_Around):
    """The part of the model after its layers, and the loss."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        skeleton = skeleton_of(config)
        super().__init__(skeleton, context)
        self.tail = nn.ModuleDict()
        for child in skeleton.watched.after:
            like = getattr(skeleton.base, child)
            self.tail[child] = copied(like, context, f"{name}.{child}", skeleton.rms_norms)
        projection = skeleton.model.get_output_embeddings()
        vocab, size = projection.weight.shape
        self.output = VocabParallelOutput(
            vocab,
            size,
            context=context,
            softcap=skeleton.logits.softcap,
            bias=projection.bias is not None,
        )
        self.scale = skeleton.logits.scale
        caught = _Caught()
        # Not as its parameter: some models ask the projection for its dtype.
        object.__setattr__(caught, "weight", self.output.weight)
        object.__setattr__(self, "caught", caught)  # not as a module
        base, port = skeleton.around(len(skeleton.layers) - 1, None, dict(self.tail.items()))
        self.open(skeleton.whole(base, caught), port)

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """x [batch, seq, hidden], or its part; labels [batch, seq] -> the mean loss in nats, [].

        With `weights` [batch, seq] the losses' weighted sum; in evaluation each token's loss.
        """
        self.called(x, None, x)
        caught: Any = self.caught
        x = caught.x
        caught.x = None
        return self.output(x * self.scale if self.scale != 1 else x, labels, weights)


def _whole(context: LayerContext) -> LayerContext:
    """Return the context of modules that each rank runs with all tokens."""
    return replace(context, sequence_parallel=False)


def _dropouts(skeleton: Skeleton, name: str, context: LayerContext) -> dict[str, nn.Module]:
    """Return dropouts in place of those of the base model itself, by name."""
    return {
        child: copied(module, context, f"{name}.{child}", {})
        for child, module in skeleton.base.named_children()
        if isinstance(module, nn.Dropout)
    }
