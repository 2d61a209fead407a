"""The losses and loads of routers, from what the architecture's own modules compute.

A router is a module whose scores transformers records for its balance loss.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from parallel3d.models.transformers.regions import LayerPlan
from parallel3d.models.transformers.skeleton import Skeleton
from parallel3d.models.transformers.spec import Config
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.router_losses import RouterLosses, loads_of
from parallel3d.tensor.side_loss import SideLoss


def recorder_of(base: nn.Module) -> OutputRecorder | None:
    """Return what says which output of which modules are scores; None if nothing does."""
    recorder = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits")
    return recorder if isinstance(recorder, OutputRecorder) else None


def routers_of(layer: nn.Module, skeleton: Skeleton) -> list[str]:
    """Return the names of a layer's routers."""
    recorder = recorder_of(skeleton.base)
    if recorder is None:
        return []
    found = []
    for name, module in layer.named_modules():
        is_named = f".{recorder.layer_name or name}." in f".{name}."
        if isinstance(module, recorder.target_class) and is_named:
            found.append(name)
    return found


class Routed:
    """The results of the router and the experts of a layer in a forward.

    - `layer`: the layer with its own modules, as `LayerBuilder` makes it.
    """

    def __init__(
        self,
        layer: nn.Module,
        plan: LayerPlan,
        skeleton: Skeleton,
        config: Config,
        name: str,
        context: LayerContext,
    ) -> None:
        assert plan.experts is not None
        self._experts: Any = layer.get_submodule(plan.experts)
        self._name = name
        self._scores: Tensor | None = None
        self._biased: list[Any] = [own for own in layer.modules() if hasattr(own, "bias_rate")]
        for module in self._biased:
            module.bias_rate = config.score_bias_rate
        routers = routers_of(plan.layer, skeleton)
        coefficients = dict.fromkeys(("balance", "z"), 0.0)
        alike = 1
        if len(routers) == 1:
            coefficients = config.side_losses
            router = layer.get_submodule(routers[0])
            for leaf, _ in plan.layer.get_submodule(routers[0]).named_parameters():
                if plan.place(f"{routers[0]}.{leaf}").partial:
                    alike = context.group.size()
        if any(coefficients.values()):
            router.register_forward_hook(self._hear)
        self._index = getattr(recorder_of(skeleton.base), "index", 0)
        self._losses = RouterLosses(
            coefficients, config.router_aux_loss, context.sample_group, alike
        )

    def _hear(self, _: nn.Module, args: object, output: Any) -> None:
        scores: Tensor = output[self._index] if isinstance(output, tuple) else output
        self._scores = scores.flatten(0, -2).float()

    def side_losses(self, batch: int, training: bool) -> dict[str, SideLoss]:
        """Return the losses and loads of the last forward, of `batch` sequences.

        In training the biases of scores count the tokens.
        """
        chosen: Tensor = self._experts.__dict__.pop("parallel3d_chosen")
        logits = self._scores
        self._scores = None
        counts = torch.zeros(self._experts.num_experts, device=chosen.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(counts[:1]).expand(chosen.numel()))
        for module in self._biased:
            if training:
                module.counts += counts.to(torch.int64)
        found = {f"{self._name}.loads": loads_of(counts, chosen.numel())}
        if logits is None:
            return found
        shares = logits.softmax(-1)
        # Those that transformers counts: a bias or groups may have led to others.
        best = shares.detach().topk(chosen.shape[1], -1).indices
        return self._losses.of(logits, shares, best, batch) | found
