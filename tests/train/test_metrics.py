"""metrics.jsonl, TensorBoard, progress and summary."""

import io
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from rich.console import Console

from parallel3d.errors import ConfigError
from parallel3d.train import metrics
from parallel3d.train.metrics import MetricsWriter, Progress, StepMetrics
from parallel3d.train.report import Summary, print_summary
from parallel3d.train.trainer import Result

pytestmark = pytest.mark.gloo

KEYS = [
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tflops_per_device"),
    *("mfu", "peak_memory_bytes", "step_seconds"),
]
CPU = torch.device("cpu")


def step_metrics(step=1, **changes):
    values = {
        "step": step,
        "loss": 5.0,
        "grad_norm": 1.25,
        "lr": 1e-3,
        "tokens": 1024 * step,
        "tokens_per_second": 12345.6,
        "tflops_per_device": 0.5,
        "mfu": 0.25,
        "peak_memory_bytes": 2**20,
        "step_seconds": 0.1,
    }
    return StepMetrics(**(values | changes))


def test_lines_are_json_with_the_published_keys(tmp_path):
    with closing(MetricsWriter(tmp_path / "run")) as writer:
        writer.write(step_metrics(1))
        # On disk at once: a killed run keeps its lines.
        assert len(writer.path.read_text().splitlines()) == 1
        writer.write(step_metrics(2, mfu=None, loss=float("nan"), held_out_loss=4.5))
    first, second = map(json.loads, writer.path.read_text().splitlines())
    assert list(first) == KEYS
    assert list(second) == [*KEYS, "held_out_loss"]
    assert second["mfu"] is None
    assert second["loss"] is None
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_tensorboard_reads_back(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with closing(MetricsWriter(tmp_path, tensorboard=True)) as writer:
        writer.write(step_metrics(1))
        writer.write(step_metrics(2, loss=4.0, mfu=None))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 5.0), (2, 4.0)]
    assert [e.step for e in events.Scalars("mfu")] == [1]


def test_tensorboard_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install tensorboard"):
        MetricsWriter(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


def shown(terminal, **changes):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=160)
    with closing(Progress(20, every=10, console=console)) as progress:
        for step in range(1, 21):
            progress.show(step_metrics(step, **changes))
    return stream.getvalue()


def test_log_has_aligned_lines():
    lines = shown(terminal=False).splitlines()
    assert [line[:10] for line in lines] == ["step  1/20", "step 10/20", "step 20/20"]
    assert "loss 5.0000  norm 1.250  lr 1.0e-03  12,346 tokens/s  MFU 25.0 %" in lines[0]


def test_terminal_has_a_bar():
    text = shown(terminal=True)
    assert "20/20" in text
    assert "12,346 tokens/s" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_summary(terminal):
    result = Result(
        loss=3.0,
        held_out_loss=3.5,
        tokens_per_second=1e4,
        tflops_per_device=0.123,
        mfu=0.5,
        peak_memory_bytes=[2**20, 2**21],
    )
    summary = Summary(
        result=result,
        unigram_entropy=6.0,
        peak_name="a measured matmul",
        files={"metrics": Path("runs/a/metrics.jsonl")},
    )
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=160, color_system=None)
    print_summary(summary, console)
    for text in (
        "3.5000 (below the unigram entropy, 6.0000)",
        "10,000",
        "50.0 % of a measured matmul",
        "1, 2",
        "runs/a/metrics.jsonl",
    ):
        assert text in stream.getvalue()


def test_peak_memory_is_a_high_water_mark():
    before = metrics.peak_memory_bytes(CPU)
    held = torch.ones(before // 4 + 2**26)  # fp32: more than was resident before
    assert metrics.peak_memory_bytes(CPU) - before > 2**26
    after = metrics.peak_memory_bytes(CPU)
    del held
    assert metrics.peak_memory_bytes(CPU) >= after


def test_measured_peak_is_what_a_matmul_reaches():
    peak = metrics.measure_peak_flops(CPU, torch.float32, seconds=0.05)
    assert 1e8 < peak < 1e14
