"""Published runs as settings with a measured step time: rows of a csv table.

Columns as in published_throughput.csv. Sources report TFLOP/s, MFU, tokens/s or the step's seconds;
each convention is undone, so that all are compared as seconds of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from benchmarks.published import clusters
from benchmarks.published.assumptions import source_of
from benchmarks.published.cells import UnusableRow, cells_of, numbers_of
from benchmarks.published.fill import Filled, described
from benchmarks.published.measured import seconds_of
from benchmarks.published.run import PublishedSetting, setting_of
from benchmarks.published.vocabulary import refuse_adapters
from parallel3d.base.errors import ConfigError
from parallel3d.base.section import Problems
from parallel3d.config.hardware import Hardware, names
from parallel3d.plan.setting import Software

ROWWISE = "row-wise float8 scaling, which is not modelled: taken as per-tensor scaling"


@dataclass(frozen=True)
class PublishedRun:
    """One published run, as a setting with its measured seconds of a step.

    `seconds`: None where the run ran out of memory.
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
    assumed: Mapping[str, Any]

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts, on whose speed no curve was fitted."""
        return self.setting.workload.num_active_params < self.setting.workload.num_params

    @property
    def chip(self) -> str:
        """The chip of a row, by which the constant-efficiency baseline pools rows."""
        return clusters.chip(self.gpu)


class LeftOut(NamedTuple):
    """A row that cannot be used: its line in the file, its source and why.

    `rule`: the reason without what is the row's own, by which rows are grouped. `asks`: the columns
    that would make it usable.
    """

    line: int
    source: str
    reason: str
    rule: str = ""
    asks: tuple[str, ...] = ()

    @classmethod
    def of(cls, line: int, source: str, problem: Exception) -> "LeftOut":
        """The left-out row for a problem met on a line of the file."""
        reason = " ".join(str(problem).split())
        rule = getattr(problem, "rule", "") or reason
        return cls(line, source, reason, rule, getattr(problem, "asks", ()))


def read(path: Path | str, program: str | None = None) -> tuple[list[PublishedRun], list[LeftOut]]:
    """The rows of a table that can be compared with a prediction, and the others with the reason.

    `program`: what the rows ran whose table and source do not say. Raises ConfigError where the
    file cannot be read or lacks columns, or the program is not described.
    """
    default = None if program is None else _named(program)
    rows = []
    left_out = []
    for line, cells, wrong in cells_of(Path(path)):
        try:
            if wrong is not None:
                raise wrong
            rows.append(_row(line, cells, default))
        except (UnusableRow, ConfigError) as problem:
            left_out.append(LeftOut.of(line, cells["source_id"], problem))
        except ValidationError as problem:
            left_out.append(LeftOut.of(line, cells["source_id"], _no_model(problem)))
    return rows, left_out


def _no_model(problem: ValidationError) -> UnusableRow:
    """Why a family's own settings refuse a row's sizes."""
    cause = problem.errors()[0].get("ctx", {}).get("error")
    said = cause.problems[0] if isinstance(cause, Problems) else problem.errors()[0]["msg"]
    return UnusableRow(f"the sizes make no model: {said}", "the sizes make no model")


def _named(program: str) -> Software:
    try:
        return described(program, "--program")
    except UnusableRow as problem:
        raise ConfigError(str(problem)) from None


def _row(line: int, cells: dict[str, str], default: Software | None) -> PublishedRun:
    source = cells["source_id"]
    if not source:
        raise UnusableRow(f"line {line}: source_id is empty; name the table that the row is from")
    if "ANOMALY" in cells["notes"]:
        raise UnusableRow("flagged ANOMALY in the table")
    refuse_adapters(cells)
    cells |= source_of(source).cells
    cells["virtual_pp"] = _one_of(cells, "virtual_pp", "virtual_stages")
    filled = Filled(numbers_of(line, cells))
    network, node = (filled.numbers.get(name) for name in ("network_gbps", "devices_per_node"))
    machine = clusters.at(source, cells["gpu"], network, node)
    if machine is None:
        raise UnusableRow(
            f"no hardware is described for {cells['gpu'] or 'a row without a gpu'}; write one of: "
            f"{', '.join(names())}",
            "no hardware is described for the gpu",
            [] if cells["gpu"] else ["gpu"],
        )
    if "SXM" in machine.name and "sxm" not in cells["gpu"].lower():
        filled.assumed["gpu"] = machine.name
    program = filled.program(cells, default)
    filled.by_source(cells)
    model = filled.model(cells)
    if source_of(source).note:
        filled.notes.append(source_of(source).note)
    if "rowwise" in cells["precision"]:
        filled.notes.append(ROWWISE)
    setting = setting_of(cells, filled, model, program, machine)
    if setting.workload.precision == "bf16" and machine.peak("bf16") is None:
        rule = "the chip has no bf16"
        raise UnusableRow(f"{machine.name} has no bf16; write fp16 or fp32 in precision", rule)
    filled.network(setting, machine)
    measured, seconds = seconds_of(cells, filled.numbers, setting, machine)
    out = "OOM" in cells["notes"] and seconds is None
    if seconds is None and not out:
        raise UnusableRow(measured)
    return PublishedRun(
        line=line,
        source=source,
        group=source_of(source).group,
        model=cells["model_name"],
        gpu=cells["gpu"],
        setting=setting,
        hardware=machine,
        seconds=seconds,
        measured=measured,
        memory_gb=filled.numbers.get("measured_memory_gb"),
        out_of_memory=out,
        notes=tuple(filled.notes),
        assumed=filled.assumed,
    )


def _one_of(cells: Mapping[str, str], name: str, other: str) -> str:
    """What two columns of one meaning state."""
    stated = {text for text in (cells[name], cells[other]) if text}
    if len(stated) > 1:
        rule = f"{name} and {other} mean the same"
        raise UnusableRow(f"{rule}, but are {cells[name]} and {cells[other]}; empty one", rule)
    return next(iter(stated), "")
