"""Prediction without physics, as a baseline: the efficiency of the three most similar runs.

The runs are those on which the planner's curves were fitted, in development.csv, which
benchmarks/fit_curves.py writes. The digests in curves.json are of the same rows.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from heapq import nsmallest
from math import dist, exp, log, log2
from pathlib import Path

from benchmarks.published.flops import hardware_flops, model_flops, num_params, peak_of
from benchmarks.published.rows import PublishedRun
from parallel3d.model.recompute import FULL

FILE = Path(__file__).with_name("development.csv")
NEIGHBOURS = 3


@dataclass(frozen=True)
class RunFigures:
    """A run with a measured step, in the few figures that the baselines use.

    `model_flops` and `hardware_flops`: of a device in a step, without and with recomputation.
    `peak_flops`: of a device, in the run's number format. `recomputed`: the part of the forward
    that is computed again.
    """

    source: str
    line: int
    group: str
    chip: str
    precision: str
    seconds: float
    model_flops: float
    hardware_flops: float
    peak_flops: float
    params: int
    hidden: int
    devices: int
    tp: int
    pp: int
    cp: int
    seq: int
    micro_batch: int
    num_microbatches: int
    zero_stage: int
    recomputed: float
    offload: int

    @classmethod
    def of(cls, row: PublishedRun) -> "RunFigures":
        """The run of a row with a measured time."""
        s = row.setting
        assert row.seconds is not None
        return cls(
            source=row.source,
            line=row.line,
            group=row.group,
            chip=row.chip,
            precision=s.workload.precision,
            seconds=row.seconds,
            model_flops=model_flops(s) / s.mesh.ranks,
            hardware_flops=hardware_flops(s) / s.mesh.ranks,
            peak_flops=peak_of(row.hardware, s.workload.precision),
            params=num_params(s),
            hidden=s.workload.hidden_size,
            devices=s.mesh.ranks,
            tp=s.mesh.tp,
            pp=s.mesh.pp,
            cp=s.mesh.cp,
            seq=s.workload.seq,
            micro_batch=s.flow.micro_batch,
            num_microbatches=s.num_microbatches,
            zero_stage=s.state.zero_stage,
            recomputed=s.recomputed_share if s.flow.recompute == FULL else 0.0,
            offload=int(s.state.offload_optimizer != "none") + int(s.state.offload_param != "none"),
        )

    @property
    def efficiency(self) -> float:
        """Model FLOP/s of a run as a fraction of the device's peak."""
        return self.model_flops / (self.peak_flops * self.seconds)

    @property
    def device(self) -> tuple[str, bool]:
        """The chip of a run, and whether it computes in eight bits; each has one efficiency."""
        return self.chip, self.precision == "fp8"

    @cached_property
    def features(self) -> tuple[float, ...]:
        """Coordinates of a run by which similarity is measured.

        A size that doubles counts as much as a ZeRO stage more.
        """
        sizes = (
            self.params,
            self.hidden,
            self.devices,
            self.tp,
            self.pp,
            self.cp,
            self.seq,
            self.micro_batch,
            self.num_microbatches,
            self.peak_flops,
        )
        kinds = (self.precision == "fp8", self.zero_stage, self.recomputed, self.offload)
        return (*map(log2, sizes), *map(float, kinds))


@lru_cache(maxsize=1)
def development() -> tuple[RunFigures, ...]:
    """The runs on which the curves were fitted."""
    # A column holds what its field is declared to hold: int, float or str, by these names.
    kinds = {field.name: _KINDS[str(field.type)] for field in fields(RunFigures)}
    with FILE.open(newline="", encoding="utf-8") as file:
        return tuple(
            RunFigures(**{name: kinds[name](text) for name, text in cells.items()})
            for cells in csv.DictReader(file)
        )


_KINDS = {"str": str, "int": int, "float": float, str(str): str, str(int): int, str(float): float}


def write(rows: Iterable[PublishedRun], path: Path = FILE) -> None:
    """Write the runs of rows with a measured time as development.csv."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, [field.name for field in fields(RunFigures)], lineterminator="\n"
        )
        writer.writeheader()
        for row in rows:
            cells = asdict(RunFigures.of(row)).items()
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in cells})


class Lookup:
    """Step times by the efficiency of the most similar development runs of other groups."""

    def __init__(self, without: str, runs: Sequence[RunFigures] | None = None) -> None:
        runs = development() if runs is None else runs
        self.runs = [run for run in runs if run.group != without]
        self.places = [run.features for run in self.runs]

    def nearest(self, run: RunFigures) -> list[RunFigures]:
        """The development runs most like a run, nearest first."""
        place = run.features
        order = nsmallest(NEIGHBOURS, range(len(self.runs)), lambda i: dist(place, self.places[i]))
        return [self.runs[i] for i in order]

    def seconds(self, run: RunFigures) -> float | None:
        """Seconds of a step at the mean efficiency of its nearest neighbours; None without any.

        The mean is geometric.
        """
        if not self.runs:
            return None
        near = [log(other.efficiency) for other in self.nearest(run)]
        return run.model_flops / (run.peak_flops * exp(sum(near) / len(near)))
