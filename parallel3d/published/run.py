"""A published run as the planner's time and memory take it (floor 0)."""

from dataclasses import KW_ONLY, dataclass

from parallel3d.plan.setting import Setting


@dataclass(frozen=True)
class PublishedSetting(Setting):
    """One way in which another program ran one model, with what this engine does not have.

    `cp`: context-parallel ranks. `recomputed_share`: the part that is recomputed of what
    `recompute` recomputes.
    """

    _: KW_ONLY
    cp: int = 1
    recomputed_share: float = 1.0
