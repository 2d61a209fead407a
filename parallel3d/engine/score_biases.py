"""Move the biases of experts' scores towards equal loads (arXiv:2408.15664), in each step."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn

from parallel3d.engine.optimizer_states import Place, masters_of, places_of
from parallel3d.mesh.mesh import Peers
from parallel3d.tensor.collectives import all_reduce
from parallel3d.tensor.cut import HeldParameter


class Router(Protocol):
    """The module that has a parameter of the role "balance", one number per expert.

    - `counts` (int64, [experts]): how often its forwards in training chose each expert. Only
      shares matter, so forwards may be counted twice if all of them are.
    - `bias_rate`: the step of the bias.
    """

    counts: Tensor
    bias_rate: float


class ScoreBiases:
    """The biases of a rank's routers, which have no gradient; the optimizer's rate for them is 0.

    Their masters are the optimizer's, so that biases are sharded, saved and copied to the
    training weights like any parameter. The optimizer's other states of them have no effect. They
    are 0, or what is left in a checkpoint of a release that moved biases by a gradient and Adam
    without memory: those steps were the same, but for Adam's rounding of gradient / |gradient|.

    - `replicas`: the ranks whose tokens are counted together.
    """

    def __init__(
        self,
        zero: ZeROOptimizer,
        stages: nn.Module,
        held: Sequence[HeldParameter],
        replicas: Peers,
    ) -> None:
        self._optimizer = zero.optimizer
        self._replicas = replicas
        owners: dict[nn.Parameter, nn.Module] = {}
        for module in stages.modules():
            owners.update(dict.fromkeys(module.parameters(recurse=False), module))
        biases = [h for h in held if h.spec.role == "balance"]
        self._routers = {h.name: cast(Router, owners[h.parameter]) for h in biases}
        self._places = defaultdict[Tensor, list[Place]](list)  # by the master that has them
        masters = masters_of(zero)
        for place in places_of(zero, biases):
            self._places[masters[place.group]].append(place)

    def forget_counts(self) -> None:
        """Begin to count the tokens of a step."""
        for router in self._routers.values():
            router.counts.zero_()

    @contextmanager
    def moved_after_update(self) -> Iterator[None]:
        """Move the biases in the step inside, unless it is skipped; collective over the replicas.

        A bias grows by `bias_rate` if its expert had less than the mean load, and shrinks by it if
        it had more. This happens right after the optimizer has updated a group's masters, before
        DeepSpeed copies them to the training weights.
        """
        if not self._routers:
            yield
            return
        steps = self._steps()

        def move(optimizer: Any, *_: object) -> None:
            for group in optimizer.param_groups:
                for master in group["params"]:
                    for place in self._places[master]:
                        piece = place.piece
                        step = steps[piece.held.name].narrow(0, piece.start, piece.numel)
                        bias = master.detach().narrow(0, place.offset, piece.numel)
                        bias.add_(step.to(master.device))

        with self._optimizer.register_step_post_hook(move):
            yield

    def _steps(self) -> dict[str, Tensor]:
        """Return the step of each bias, fp32 [experts]."""
        routers = self._routers.values()
        counts = torch.stack([router.counts for router in routers])  # [layers, experts]
        counts = all_reduce(counts, self._replicas.group)
        missing = counts.sum(-1, keepdim=True) - counts * counts.shape[-1]
        return {
            name: own.sign().float() * router.bias_rate
            for (name, router), own in zip(self._routers.items(), missing, strict=True)
        }
