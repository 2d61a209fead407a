"""The cost of a norm on one tensor-parallel rank (floor 0, no torch)."""

from dataclasses import dataclass

from parallel3d.model.recompute import parts_of
from parallel3d.model.spec import KeptMemory, LayerCost, Recompute, Work
from parallel3d.model.stream import Stream

_FP32 = 4  # bytes of a statistic


@dataclass(frozen=True)
class NormCost:
    """The cost of a norm; the defaults are LayerNorm's."""

    statistics: int = 2
    """Numbers per vector that the norm keeps for its backward: 2 for LayerNorm, 1 for RMSNorm."""
    composite: bool = False
    """torch has no fused CPU kernel for the norm."""

    def __call__(
        self, stream: Stream, shares_input: bool = False, recompute: Recompute = "none"
    ) -> LayerCost:
        """Return the cost of the norm of a module's input.

        The norm reads its input and writes its output, and both are kept: the input for its own
        backward, the output for the module's. An input that it shares with another norm is counted
        there. "layernorm" recomputes the output, when less is left of what later parts saved.
        """
        kept, again = KeptMemory(0 if shares_input else stream.part), Work()
        work = Work(traffic=2 * stream.part)
        if "layernorm" in parts_of(recompute):
            again = work
        else:
            kept += self.kept(stream.part, stream.hidden)
        return LayerCost(0, work, again, saved=kept)

    def kept(self, elements: int, size: int) -> KeptMemory:
        """Return the memory of one tensor and the statistics of its vectors of `size` elements."""
        statistics = self.statistics * (elements // size)
        return KeptMemory(elements, _FP32 * statistics, unfused=elements if self.composite else 0)


LAYER_NORM = NormCost()
RMS_NORM = NormCost(statistics=1, composite=True)
