"""Published runs as settings with a measured step time: a csv table becomes rows (floor 0).

Columns as in published_throughput.csv. Sources report TFLOP/s, MFU, tokens/s or the step's seconds;
each convention is undone, so that all are compared as seconds of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from parallel3d.errors import ConfigError
from parallel3d.hardware import Hardware
from parallel3d.model.spec import Recompute, Shape
from parallel3d.plan.setting import Device, Precision
from parallel3d.published import clusters
from parallel3d.published.architectures import Architecture, known
from parallel3d.published.assumptions import program_of, source_of, supplied
from parallel3d.published.cells import Unusable, cells_of, numbers_of
from parallel3d.published.flops import flops_of_step, peak_of
from parallel3d.published.programs import cuts_sequence
from parallel3d.published.run import PublishedSetting

ROWWISE = "row-wise float8 scaling, which is not modelled: taken as per-tensor scaling"


@dataclass(frozen=True)
class Row:
    """One published run. `seconds`: of a step as measured, None where it ran out of memory.

    `measured`: what the source stated, and by which convention. `memory_gb`: as the source prints
    it. `notes`: what the table left out and this program supplied.
    """

    line: int
    source: str
    group: str
    model: str
    gpu: str
    setting: PublishedSetting
    hardware: Hardware
    seconds: float | None
    measured: str
    memory_gb: float | None
    out_of_memory: bool
    notes: tuple[str, ...]

    @property
    def chip(self) -> str:
        """The chip, by which the constant-efficiency baseline pools rows."""
        return clusters.chip(self.gpu)


class LeftOut(NamedTuple):
    """A row that cannot be used: its line in the file, its source and why."""

    line: int
    source: str
    reason: str


def read(path: Path | str) -> tuple[list[Row], list[LeftOut]]:
    """The rows of a table that can be compared with a prediction, and the others with the reason.

    Raises ConfigError where the file cannot be read or lacks columns.
    """
    rows, left_out = [], []
    for line, cells in cells_of(Path(path)):
        try:
            rows.append(_row(line, cells))
        except (Unusable, ConfigError) as problem:
            left_out.append(LeftOut(line, cells["source_id"], str(problem)))
    return rows, left_out


def _row(line: int, cells: dict[str, str]) -> Row:
    source = cells["source_id"]
    if "ANOMALY" in cells["notes"]:
        raise Unusable("flagged ANOMALY in the table")
    numbers, notes = numbers_of(line, cells), []
    hardware = clusters.at(source, cells["gpu"])
    if hardware is None:
        raise Unusable(f"no hardware is described for {cells['gpu'] or 'a row without a gpu'}")
    for name, value in {**source_of(source).blanks, **_supplied(source, cells)}.items():
        if not cells.get(name, ""):
            numbers[name] = value
            notes.append(f"{name} = {value}")
    model, filled = _model(cells["model_name"], numbers)
    notes += filled
    if source_of(source).note:
        notes.append(source_of(source).note)
    if "rowwise" in cells["precision"]:
        notes.append(ROWWISE)
    setting = _setting(source, cells, numbers, model)
    measured, seconds = _seconds(cells, numbers, setting, hardware, model)
    out = "OOM" in cells["notes"] and seconds is None
    if seconds is None and not out:
        raise Unusable(measured)
    return Row(
        line=line,
        source=source,
        group=source_of(source).group,
        model=cells["model_name"],
        gpu=cells["gpu"],
        setting=setting,
        hardware=hardware,
        seconds=seconds,
        measured=measured,
        memory_gb=numbers.get("measured_memory_gb"),
        out_of_memory=out,
        notes=tuple(notes),
    )


def _supplied(source: str, cells: Mapping[str, str]) -> dict[str, Any]:
    try:
        return supplied(source, cells)
    except (ValueError, IndexError, StopIteration, ZeroDivisionError):
        return {}  # what is missing then is named when the setting is built


def _model(name: str, numbers: dict[str, Any]) -> tuple[Architecture, list[str]]:
    columns = {
        "layers": "n_layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads",
        "ffn": "ffn_hidden", "vocab": "vocab", "seq": "seq_len",
    }  # fmt: skip
    sizes: dict[str, Any] = {field: numbers.get(column) for field, column in columns.items()}
    given = Architecture(**sizes, tied=numbers.get("tied"))
    model = given.filled(known(name))
    if model.missing:
        raise Unusable(f"no {', '.join(model.missing)}: the architecture of {name} is not known")
    assert model.hidden and model.heads
    if model.hidden % model.heads or model.heads % (model.kv_heads or 1):
        raise Unusable(
            f"heads = {model.heads} does not divide hidden = {model.hidden}, or kv_heads = "
            f"{model.kv_heads} does not divide heads; correct the cell"
        )
    fields = [f for f in columns if getattr(given, f) is None and getattr(model, f) is not None]
    notes = [f"{', '.join(fields)} from the model's published config"] if fields else []
    dropout = numbers.get("dropout", 0.0)
    return replace(model, kv_heads=model.kv_heads or model.heads, dropout=dropout), notes


def _setting(
    source: str, cells: dict[str, str], numbers: dict[str, Any], model: Architecture
) -> PublishedSetting:
    devices, tp, pp, cp = (numbers.get(name) for name in ("n_gpus", "tp", "pp", "cp"))
    if devices is None:
        raise Unusable("the number of devices is not stated")
    if (
        tp is None
        and pp is None
        and numbers.get("dp") is None
        and not numbers.get("zero_stage")
        and not cells["zero_stage"]
    ):
        raise Unusable("no mesh is stated")
    tp, pp, cp = tp or 1, pp or 1, cp or 1
    dp = numbers.get("dp") or max(1, devices // (tp * pp * cp))
    if tp * pp * cp * dp != devices:
        raise Unusable(f"tp x pp x cp x dp = {tp * pp * cp * dp}, but there are {devices} devices")
    batch, micro = numbers.get("global_batch_seqs"), numbers.get("micro_batch")
    if batch is None or micro is None:
        blank = "global batch" if batch is None else "microbatch"
        raise Unusable(f"the {blank} is not stated")
    count = round(batch / (micro * dp))
    if count * micro * dp != batch:
        raise Unusable(f"a batch of {batch} is not microbatches of {micro} on dp = {dp}")
    virtual = numbers.get("virtual_pp") or 1
    recompute, share = _recompute(cells["recompute"] or str(numbers.get("recompute", "")))
    zero = _zero(cells["zero_stage"] or str(numbers.get("zero_stage", "0")))
    offload = cells["offload"].lower()
    optimizer, params = _offload(offload)
    assert model.heads and model.hidden and model.seq
    if model.heads % tp:
        raise Unusable(f"tp = {tp} does not divide {model.heads} attention heads")
    program = program_of(source, cells, bool(offload))
    return PublishedSetting(
        layers=model.specs(),
        hidden_size=model.hidden,
        shape=Shape(micro, model.seq),
        num_microbatches=count,
        pp=pp,
        dp=dp,
        tp=tp,
        cp=cp,
        sequence_parallel=tp > 1 and cuts_sequence(program),
        schedule="interleaved" if virtual > 1 and pp > 1 else "one_f_one_b" if pp > 1 else "gpipe",
        stages_per_rank=virtual if pp > 1 else 1,
        recompute=recompute,
        recomputed_share=share,
        precision=_precision(cells["precision"] or str(numbers.get("precision", ""))),
        zero_stage=zero,
        reduces_once=zero < 2,
        offload_optimizer=optimizer,
        offload_param=params,
        software=program,
    )


def _recompute(text: str) -> tuple[Recompute, float]:
    """The mode, and how much of what the mode recomputes is recomputed."""
    if "per-op SAC" in text or "every other layer" in text:
        # torchtitan: every second product is computed again; every second layer is.
        return "full", 0.5
    modes: tuple[Recompute, ...] = get_args(Recompute)
    return next((mode for mode in modes if text.startswith(mode)), "none"), 1.0


def _zero(text: str) -> int:
    return int(text[0]) if text[:1] in {"0", "1", "2", "3"} else 3 if "FSDP" in text else 0


def _offload(text: str) -> tuple[Device, Device]:
    full = "full cpu offload" in text or "params" in text
    optimizer: Device = "cpu" if full or "optimizer" in text else "none"
    return optimizer, "cpu" if full else "none"


def _precision(text: str) -> Precision:
    lower = text.lower()
    if "fp8" in lower or "float8" in lower:
        return "fp8"
    return "fp16" if "fp16" in lower else "fp32" if "fp32" in lower else "bf16"


def _seconds(
    cells: Mapping[str, str],
    numbers: Mapping[str, float],
    setting: PublishedSetting,
    hardware: Hardware,
    model: Architecture,
) -> tuple[str, float | None]:
    """What was measured, and the seconds of a step that follow; without them, the reason."""
    per_device = setting.tokens_per_step / setting.devices
    if seconds := numbers.get("measured_iter_time_s"):
        return "seconds of a step", seconds
    if rate := numbers.get("measured_tokens_per_s_per_gpu"):
        return "tokens/s of a device", per_device / rate
    tflops, mfu = numbers.get("measured_tflops_per_gpu"), numbers.get("measured_mfu")
    if tflops is None and mfu is None:
        return "no speed was measured", None
    flops = flops_of_step(setting, cells["tflops_convention"], cells["attn_flops_convention"])
    if flops is None:
        return "whether its TFLOP/s count recomputation is not stated", None
    name, each = flops
    if tflops is not None:
        return f"TFLOP/s, {name}", each / setting.devices / (tflops * 1e12)
    assert mfu is not None
    peak = peak_of(hardware, setting.precision)
    return f"MFU of {peak / 1e12:.0f} TFLOP/s, {name}", each / setting.devices / (mfu / 100 * peak)
