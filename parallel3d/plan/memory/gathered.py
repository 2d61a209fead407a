"""Bytes of gathered weights under ZeRO-3, gathered by DeepSpeed's hooks or by the program."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from parallel3d.plan.layers.windows import Held, Windows
from parallel3d.plan.memory.states import WeightSizes
from parallel3d.plan.setting import Setting

SizesOf = Callable[[Held], WeightSizes]  # of some of a coordinate's stages, by place


class GatheredBytes(NamedTuple):
    """Bytes of gathered weights at the moments of a stage's step.

    `forward` and `backward`: during them; `beginning`: as a forward begins; `reducing`: after the
    stage's last backward, while its gradients are reduced.
    """

    forward: int
    backward: int
    beginning: int
    reducing: int = 0


def gathered(setting: Setting, s: WeightSizes, every: WeightSizes, on_cpu: bool) -> GatheredBytes:
    """Bytes that a stage of sizes `s` gathers in its passes, on a coordinate with `every` weight.

    DeepSpeed fetches ahead along the trace of each pass (engine/quirks/tracing.py): soon all of the
    stage is there, or as much as may be, and it goes again module by module. What is too small to
    be cut stays, of all stages. Full recomputation uses a layer's weights twice in a backward.
    """
    if not _gathers(setting, on_cpu):
        return GatheredBytes(0, 0, 0)
    element, buffers = setting.bytes_per_element, setting.buffers
    small = every.small * element
    one = s.module * element + small
    whole = (s.params + every.small - s.small) * element
    ahead = buffers.stage3_prefetch_bucket_size
    if not ahead:
        again = 0
        if setting.recompute == "full":
            again = min(s.layer, buffers.stage3_max_reuse_distance) * element
        return GatheredBytes(one, min(one + again, whole + s.module * element), one)
    live = max(min(one, whole), min(whole, buffers.stage3_max_live_parameters * element))
    # What is fetched ahead comes in one buffer and is copied out of it.
    copied = min(s.params - s.small, ahead + s.largest) * element
    return GatheredBytes(live, live + copied, live + copied)


def held_of(
    setting: Setting, windows: Windows, sizes_of: SizesOf, on_cpu: bool
) -> list[GatheredBytes]:
    """Bytes of gathered weights during each stage's passes, where the program gathers them."""
    total = _Total(setting, sizes_of, on_cpu)

    def most(those: Iterable[Held]) -> int:
        return max(map(total, those))

    found = []
    for place, (there, back) in enumerate(zip(windows.forward, windows.backward, strict=True)):
        others = {tuple(p for p in places if p != place) for places in back}
        found.append(GatheredBytes(most(there), most(back), most(there), most(others)))
    return found


def arriving(
    setting: Setting, windows: Windows, sizes_of: SizesOf, on_cpu: bool
) -> tuple[int, ...]:
    """Bytes of gathered weights at each arrival of `windows.arrivals`.

    A layer's weights come in one buffer and are copied out of it, but for a single one; its buffer
    goes before the next layer's is copied. What one process has whole is neither.
    """
    total, element = _Total(setting, sizes_of, on_cpu), setting.bytes_per_element
    copies = setting.dp > 1
    return tuple(
        total(arrival.held) + copies * sizes_of((arrival.place,)).copied * element
        for arrival in windows.arrivals
    )


class _Total:
    """Bytes of some stages' gathered weights, with all of the coordinate's uncut small ones."""

    def __init__(self, setting: Setting, sizes_of: SizesOf, on_cpu: bool) -> None:
        self._setting, self._sizes_of = setting, sizes_of
        self._gathers = _gathers(setting, on_cpu)

    def __call__(self, places: Held) -> int:
        if not self._gathers:
            return 0
        every = self._sizes_of(tuple(range(self._setting.stages_per_rank)))
        if not places:
            return every.small * self._setting.bytes_per_element
        own = self._sizes_of(places)
        return (own.params + every.small - own.small) * self._setting.bytes_per_element


def _gathers(setting: Setting, on_cpu: bool) -> bool:
    """Whether weights must be fetched or gathered, being offloaded or cut over several ranks."""
    if setting.zero_stage != 3:
        return False
    return setting.dp > 1 or not (on_cpu or setting.offload_param == "none")
