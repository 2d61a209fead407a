"""The benchmark of devices runs on a CPU: each switch is a config that trains."""

import json
import sys

import pytest

from benchmarks import gpu
from parallel3d.verify.local_ranks import run_locally

pytestmark = pytest.mark.gloo


def rows_on_rank(rank, arguments):
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu.py", *arguments])
        patch.setattr(gpu, "measure_peak_flops", lambda *args, **options: 1e12)
        patch.setattr(gpu, "say", lambda row, mesh: lines.append(json.dumps(row)))
        gpu.main()
    return [json.loads(line) for line in lines]


TOY = ["--models", "toy", "--sequences", "16", "--tokens", "32", "--steps", "1"]


@pytest.mark.slow  # a config of every row is made by default
def test_rows_report_speed():
    only = ["--only", "as it is", "ZeRO-3"]
    (rows,) = run_locally(rows_on_rank, 1, [*TOY, *only], timeout=60)
    head, *rows = rows
    assert head["device"] == "cpu" and head["peak_flops"] > 0
    assert [row["switch"] for row in rows] == ["as it is", "ZeRO-3"]
    for row in rows:
        assert row["fits"] and 0 < row["mfu_of_measured_products"] < 1
        assert row["tokens_per_second_and_device"] > 0


def test_every_row_has_a_valid_config():
    for model in gpu.MODELS:
        for settings in (gpu.SWITCHES | gpu.ACROSS).values():
            config = gpu.config_of(model, 2048, 8192, 2, settings)
            assert config.data.sequence_length == 2048, (model, settings)


@pytest.mark.slow
def test_every_row_runs():
    (rows,) = run_locally(rows_on_rank, 1, TOY, timeout=230)
    assert {row["switch"] for row in rows[1:]} == {*gpu.SWITCHES, "transformers, compiled"}
    across = ["--tp", "2", "--only", *gpu.ACROSS]
    for rows in run_locally(rows_on_rank, 2, [*TOY, *across], timeout=230):
        assert [row["switch"] for row in rows[1:]] == [*gpu.ACROSS]
