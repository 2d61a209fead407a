"""The look-up beside the planner knows what the fits saw, of other groups alone."""

import hashlib
from collections import defaultdict
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from benchmarks.published import fits
from benchmarks.published.neighbours import NEIGHBOURS, Lookup, RunFigures, development, write
from benchmarks.published.rows import read

pytestmark = pytest.mark.pure

SAMPLE = Path(__file__).with_name("published_sample.csv")


def test_development_rows_match_the_digests_of_the_fits() -> None:
    lines: dict[str, list[str]] = defaultdict(list)
    for run in development():
        lines[run.group].append(f"{run.source}:{run.line}:{run.seconds:.6g}")
    assert len(development()) == 504
    assert fits.seen_by(None) == {
        group: hashlib.sha256("\n".join(sorted(text)).encode()).hexdigest()[:16]
        for group, text in lines.items()
    }


def test_run_keeps_the_identity_of_its_row() -> None:
    rows = {(row.source, row.model, row.seconds): row for row in read(SAMPLE)[0]}
    row = rows["megatron_sc21_t1", "GPT-18.4B", next(k[2] for k in rows if k[1] == "GPT-18.4B")]
    run = RunFigures.of(row)
    shipped = [
        r
        for r in development()
        if r.source == row.source and r.params == row.setting.workload.num_params
    ]
    # The sample has other line numbers; figures in the file have six digits.
    assert [replace(s, line=0).features for s in shipped] == [pytest.approx(run.features)]
    assert shipped[0].efficiency == pytest.approx(run.efficiency, rel=1e-5)
    # 135 TFLOP/s of 312 count recomputation, which model FLOPs do not: 3 of 4 forwards, or so.
    assert run.efficiency == pytest.approx(135 / 312 * 0.75, rel=0.03)


def test_predicted_seconds_use_the_mean_efficiency_of_the_neighbours() -> None:
    run = development()[0]
    # Four runs of another group at 0.1, 0.2, 0.4 and 0.9 of the peak; the last is far away.
    others = [
        replace(run, group="b", seconds=run.model_flops / run.peak_flops / share, tp=tp)
        for share, tp in ((0.1, 1), (0.2, 2), (0.4, 2), (0.9, 64))
    ]
    lookup = Lookup(run.group, [*others, replace(run, seconds=1e-9)])
    assert lookup.nearest(run) == others[:NEIGHBOURS]  # never one of its own group
    mean = prod((0.1, 0.2, 0.4)) ** (1 / 3)
    assert lookup.seconds(run) == pytest.approx(run.model_flops / run.peak_flops / mean)
    assert Lookup("b", others).seconds(run) is None


def test_new_group_may_use_all_development_runs() -> None:
    assert len(Lookup("a group of yours").runs) == 504
    assert {run.group for run in Lookup("vtrain").runs} == set(fits.seen_by("vtrain"))


def test_written_rows_are_read_back(tmp_path: Path) -> None:
    rows = [row for row in read(SAMPLE)[0] if row.seconds is not None]
    write(rows, tmp_path / "development.csv")
    text = (tmp_path / "development.csv").read_text().splitlines()
    assert len(text) == len(rows) + 1 and text[0].startswith("source,line,group,chip,precision")
