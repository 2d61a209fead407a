"""Kinds of recomputation in the backward: the values of pipeline.activation_checkpointing.

A value is a text: "none", "selective" (core_attn), "mlp", "full", "core_attn+mlp_act" for a list of
sub-layers, or "full:3" for {"full": 3}.
"""

import re
from functools import lru_cache

MODES = ("none", "selective", "mlp", "full")
SUBLAYERS = ("layernorm", "core_attn", "mlp_act", "mlp")
"""Parts of a layer that may be recomputed alone, under the names of Megatron's recompute-modules:
the norms, the attention's kernel, the activation function, and the MLP up to its last product."""
WAITS = "waits"  # weight gradients wait for the inputs of their products


def text_of(value: object) -> str:
    """Return the text of a value in a config. Raises ValueError for a value without a meaning."""
    if isinstance(value, dict) and value.keys() == {"full"}:
        value = f"full:{value['full']}"
    parts = value.split("+") if isinstance(value, str) else value
    if isinstance(parts, (list, tuple)) and parts:
        if len(parts) == 1 and re.fullmatch(r"none|selective|full(:[1-9]\d*)?", str(parts[0])):
            return str(parts[0])
        if all(part in SUBLAYERS for part in parts):
            text = "+".join(name for name in SUBLAYERS if name in parts)
            return "selective" if text == "core_attn" else text
    raise ValueError(
        f'is no kind of recomputation; use {", ".join(MODES)}, {{"full": K}} for the first K '
        f"layers of each stage (as text full:K), or a list of {', '.join(SUBLAYERS)}"
    )


@lru_cache(maxsize=256)
def parts_of(recompute: str) -> frozenset[str]:
    """Return the sub-layers that are recomputed by themselves, in every layer."""
    return frozenset(recompute.replace("selective", "core_attn").split("+")) & {*SUBLAYERS, WAITS}


def num_full(recompute: str, num_layers: int) -> int:
    """Return how many of a stage's layers, its first ones, are recomputed in full."""
    mode, _, most = recompute.partition(":")
    return min(num_layers, int(most or num_layers)) if mode == "full" else 0


def strength(recompute: str) -> int:
    """Return how much of a layer runs again, as an index of MODES; a list counts as "mlp"."""
    mode = recompute.partition(":")[0]
    return MODES.index(mode if mode in MODES else "mlp")


def while_weights_wait(recompute: str) -> str:
    """Return what frees memory if weight gradients wait: the inputs of all products stay."""
    return "none" if recompute.startswith("full") else f"{recompute}+{WAITS}"
