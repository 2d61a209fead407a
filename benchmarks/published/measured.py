"""Speed that a row of a published table measured, as seconds of a step."""

from collections.abc import Mapping

from benchmarks.published.cells import UnusableRow
from benchmarks.published.flops import flops_of_step, model_flops, num_params, peak_of
from benchmarks.published.run import PublishedSetting
from parallel3d.config.hardware import Hardware

SLOWEST = 1e-4  # a share of the peak: a hundredth of the slowest published run
LONGEST = 86_400.0  # seconds of a step: a day, a hundred times the longest published

_STATE = 'write "hardware" where its FLOP/s count recomputation, "model" where they do not'


def seconds_of(
    cells: Mapping[str, str],
    numbers: Mapping[str, float],
    setting: PublishedSetting,
    hardware: Hardware,
) -> tuple[str, float | None]:
    """The measured figure, and the seconds of a step that follow; None where no speed is stated.

    Raises UnusableRow where the convention is not known, or where no chip is so fast or so slow.
    """
    measured, seconds = _stated(cells, numbers, setting, hardware)
    if seconds is None:
        return measured, None
    # Two FLOPs a parameter and token forward, four backward; attention, half of it masked, is more.
    least = max(6.0 * num_params(setting) * setting.tokens_per_step, model_flops(setting) / 2)
    share = least / setting.mesh.ranks / (peak_of(hardware, setting.workload.precision) * seconds)
    remedy = "correct what was measured, or the sizes"
    if not SLOWEST <= share <= 1:
        raise UnusableRow(
            f"{measured}: {seconds:.3g} s a step is {share:.3g} of the peak of {hardware.name}, "
            f"which is not between {SLOWEST} and 1; {remedy}",
            "its speed is more than the chip's peak, or next to nothing of it",
        )
    if seconds > LONGEST:
        rule = "a step would take more than a day"
        raise UnusableRow(f"{measured}: {rule} ({seconds:.3g} s); {remedy}", rule)
    return measured, seconds


def _stated(
    cells: Mapping[str, str],
    numbers: Mapping[str, float],
    setting: PublishedSetting,
    hardware: Hardware,
) -> tuple[str, float | None]:
    per_device = setting.tokens_per_step / setting.mesh.ranks
    if seconds := numbers.get("measured_iter_time_s"):
        return "seconds of a step", seconds
    if rate := numbers.get("measured_tokens_per_s_per_gpu"):
        return "tokens/s of a device", per_device / rate
    tflops = numbers.get("measured_tflops_per_gpu")
    mfu = numbers.get("measured_mfu")
    if tflops is None and mfu is None:
        return "no speed was measured", None
    convention = cells["tflops_convention"]
    attention = cells["attn_flops_convention"]
    if not convention:
        rule = "whether its TFLOP/s count recomputation is not stated"
        raise UnusableRow(f"{rule}; {_STATE} in tflops_convention", rule, ["tflops_convention"])
    flops = flops_of_step(setting, convention, attention)
    if flops is None:
        raise UnusableRow(
            f'tflops_convention = "{convention}", attn_flops_convention = "{attention}" are not '
            f'known; {_STATE}, and "full" or "none" for attention',
            "its way to count FLOPs is not known",
        )
    name, each = flops
    if tflops is not None:
        return f"TFLOP/s, {name}", each / setting.mesh.ranks / (tflops * 1e12)
    assert mfu is not None
    if mfu <= 1:
        rule = "measured_mfu is below one per cent, or a fraction"
        raise UnusableRow(f"{rule}: {mfu}; write it per cent", rule)
    peak = peak_of(hardware, setting.workload.precision)
    per_device = each / setting.mesh.ranks
    return f"MFU of {peak / 1e12:.0f} TFLOP/s, {name}", per_device / (mfu / 100 * peak)
