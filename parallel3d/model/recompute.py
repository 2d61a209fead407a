"""Recomputation in the backward: the value of pipeline.activation_checkpointing."""

import re
from typing import Literal, NamedTuple

SUBLAYERS = ("layernorm", "core_attn", "mlp_act", "mlp")
"""Parts of a layer that may be recomputed alone, under the names of Megatron's recompute-modules:
the norms, the attention's kernel, the activation function, and the MLP up to its last product."""
ALL: Literal["all"] = "all"


class Recompute(NamedTuple):
    """The parts of a stage's layers that are computed again in the backward, not kept.

    `parse` reads it from a config; `str` returns the text that a config may have for it.

    - `parts`: the sub-layers (SUBLAYERS) that are recomputed by themselves, in every layer.
    - `full_layers`: how many layers of each stage, its first ones, are recomputed as a whole.
    - `weights_wait`: True if weight gradients wait for the inputs of their products. No config says
      so: it follows from the schedule.
    """

    # A tuple, for a search hashes and compares 100,000: a dataclass takes three times as long.
    parts: frozenset[str] = frozenset()
    full_layers: int | Literal["all"] = 0
    weights_wait: bool = False

    def __str__(self) -> str:
        if self.full_layers:
            return "full" if self.full_layers == ALL else f"full:{self.full_layers}"
        if self.parts == SELECTIVE.parts:
            return "selective"
        return "+".join(name for name in SUBLAYERS if name in self.parts) or "none"

    def __lt__(self, other: tuple[object, ...]) -> bool:
        """Return True if this text comes first: an order for choices that are equally good."""
        return str(self) < str(other)

    @property
    def is_uniform(self) -> bool:
        """True if all layers of a stage are recomputed in the same way."""
        return self.full_layers in (0, ALL)

    @property
    def strength(self) -> int:
        """How much of a layer runs again, as an index of MODES; other sub-layers count as MLP."""
        if self.full_layers:
            return MODES.index(FULL)
        return MODES.index(self) if self in MODES else MODES.index(MLP)

    def num_full(self, num_layers: int) -> int:
        """Return how many of a stage's layers, its first ones, are recomputed as a whole."""
        return num_layers if self.full_layers == ALL else min(num_layers, self.full_layers)

    def while_weights_wait(self) -> "Recompute":
        """Return the recomputation that frees memory if the inputs of all products stay."""
        return NONE if self.full_layers else self._replace(weights_wait=True)


NONE = Recompute()
SELECTIVE = Recompute(frozenset({"core_attn"}))
MLP = Recompute(frozenset({"mlp"}))
FULL = Recompute(full_layers=ALL)
MODES = (NONE, SELECTIVE, MLP, FULL)
_MODE_OF_NAME = {str(mode): mode for mode in MODES}


def parse(value: object) -> Recompute:
    """Return the recomputation of a value in a config.

    A value is the name of a mode, {"full": 3}, a list of sub-layers, or the text of either
    ("full:3", "core_attn+mlp_act"). Raises ValueError for a value without a meaning.
    """
    if isinstance(value, Recompute):
        return value
    if isinstance(value, dict) and value.keys() == {"full"}:
        value = f"full:{value['full']}"
    names = value.split("+") if isinstance(value, str) else value
    if isinstance(names, (list, tuple)) and names:
        only = str(names[0]) if len(names) == 1 else ""
        if only in _MODE_OF_NAME:
            return _MODE_OF_NAME[only]
        if first_layers := re.fullmatch(r"full:([1-9][0-9]{0,8})", only):
            return Recompute(full_layers=int(first_layers[1]))
        if all(name in SUBLAYERS for name in names):
            return Recompute(frozenset(names))
    raise ValueError(
        f'is no kind of recomputation; use {", ".join(_MODE_OF_NAME)}, {{"full": K}} for the first '
        f"K layers of each stage (as text full:K), or a list of {', '.join(SUBLAYERS)}"
    )
