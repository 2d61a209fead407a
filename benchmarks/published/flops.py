"""FLOPs that a source counts in a step, by its convention."""

from functools import lru_cache

from parallel3d.base.errors import ConfigError
from parallel3d.config.hardware import Hardware
from parallel3d.model.recompute import FULL
from parallel3d.model.spec import Shape
from parallel3d.plan.layers.placement import LayerKinds, cost_of, model_of
from parallel3d.plan.setting import Precision, Setting


def model_flops(setting: Setting) -> float:
    """FLOPs of a step's forward and backward, attention in full: 3 x forward (arXiv:2001.08361)."""
    return 3 * sum(_forward_flops(setting))


def hardware_flops(setting: Setting) -> float:
    """FLOPs of a step with the second forward of full recomputation.

    arXiv:2104.04473, equation 3: 96 Bslh^2 (1 + s/6h + V/16lh); the head is not computed again.
    """
    blocks, head = _forward_flops(setting)
    again = setting.recomputed_share if setting.flow.recompute == FULL else 0.0
    return (3 + again) * blocks + 3 * head


def flops_of_step(setting: Setting, convention: str, attention: str) -> tuple[str, float] | None:
    """The source's convention in words, and its FLOPs of a step; None for unknown words.

    "hardware" counts recomputation, "model" does not. Attention counts in full (12Lhs a token),
    but for sources of "none", which count 2 x factor x parameters a token; blank: in full.
    """
    factor = 4 if convention.startswith("hardware") else 3
    if not convention.startswith(("hardware", "model")):
        return None
    if attention and not attention.startswith(("full", "none")):
        return None
    if attention.startswith("none"):
        flops = 2 * factor * num_params(setting) * setting.tokens_per_step
        return f"2 x {factor} x parameters x tokens", flops
    if factor == 4:
        # Who counts recomputation counts all of it, whatever the row's own mode is said to be.
        blocks, head = _forward_flops(setting)
        return "hardware FLOPs, full attention", 4 * blocks + 3 * head
    return "model FLOPs, full attention", model_flops(setting)


def num_params(setting: Setting) -> int:
    """Parameters that a token uses, added up once for all settings of one model."""
    return _num_params(model_of(setting.workload.layers))


@lru_cache(maxsize=4096)
def _num_params(model: LayerKinds) -> int:
    return sum(layer.num_active_params for layer in model.layers)


def peak_of(hardware: Hardware, precision: Precision) -> float:
    """The peak FLOP/s that an MFU refers to; raises ConfigError where none is known."""
    for dtype in {"bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16")}.get(precision, (precision,)):
        if (peak := hardware.peak(dtype)) is not None:
            return peak
    raise ConfigError(f"hardware {hardware.name}: no peak FLOP/s is known for {precision}")


def _forward_flops(setting: Setting) -> tuple[float, float]:
    """(blocks, embedding and head) of a step, over all devices."""
    model = model_of(setting.workload.layers)
    shape = Shape(1, setting.workload.seq)
    each = [float(cost_of(model, k, shape).forward_flops) for k in range(len(model.kinds))]
    head = each[model.kind_of[-1]] * setting.global_batch_size
    return sum(each[k] for k in model.kind_of) * setting.global_batch_size - head, head
