"""metrics.jsonl, TensorBoard, progress and summary."""

import errno
import io
import itertools
import json
import math
import os
import re
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console

from parallel3d.config import RunConfig
from parallel3d.data.evaluation_samples import SetLoss
from parallel3d.mesh.mesh import Mesh
from parallel3d.train import known_hardware, metrics, progress
from parallel3d.train.assembly import assemble
from parallel3d.train.metrics import MetricsWriter, Result, StepMetrics, numbers_of
from parallel3d.train.output import Summary, print_placement, print_summary
from parallel3d.train.progress import Progress, in_words
from tests.verify.configs import config_of

pytestmark = pytest.mark.gloo

KEYS = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "peak_memory_bytes",
    "step_seconds",
]
OF_SET = SetLoss(loss=4.5, standard_error=math.inf, tokens=640, documents=5, bits_per_byte=1.5)
CPU = torch.device("cpu")


def step_metrics(step=1, **changes):
    values = (step, 5.0, 1.25, 1e-3, 1024 * step, 12345.6, 0.5, 0.25, 2**20, 0.1)
    return StepMetrics(**(dict(zip(KEYS, values, strict=True)) | changes))


def test_lines_are_json_with_the_published_keys(tmp_path):
    with closing(MetricsWriter(tmp_path / "run")) as writer:
        writer.write(step_metrics(1))
        # On disk at once: a killed run keeps its lines.
        assert len(writer.path.read_text().splitlines()) == 1
        writer.write(step_metrics(2, mfu=None, loss=float("nan"), validation={"held_out": OF_SET}))
    first, second = map(json.loads, writer.path.read_text().splitlines())
    assert list(first) == KEYS
    assert list(second) == [*KEYS, "held_out_loss", "validation"]
    assert second["held_out_loss"] == 4.5
    kept = {"loss": 4.5, "standard_error": None, "tokens": 640, "documents": 5}
    assert second["validation"] == {"held_out": {**kept, "bits_per_byte": 1.5}}
    assert second["mfu"] is None
    assert second["loss"] is None
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_trackers_get_what_a_line_has(tmp_path):
    class Heard(list):
        def log(self, values, step):
            self.append((step, values))

        def finish(self):
            self.append("finished")

    heard = Heard()
    with closing(MetricsWriter(tmp_path, heard)) as writer:
        writer.write(step_metrics(1))
        writer.write(step_metrics(2, loss=4.0, mfu=None, validation={"web": OF_SET}))
    (first, values), (second, others), last = heard
    of_set = {"loss": 4.5, "tokens": 640, "documents": 5}  # without what is not finite
    for name, value in {**of_set, "bits_per_byte": 1.5}.items():
        assert others[f"validation/web/{name}"] == value
    assert "held_out_loss" not in others
    assert (first, second, last) == (1, 2, "finished")
    assert list(values) == [key for key in KEYS if key != "step"]
    assert others["loss"] == 4.0 and "mfu" not in others


def flat_of(metrics):
    return numbers_of(json.loads(metrics.to_json()))


def shown(terminal, **changes):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=160)
    with closing(Progress(20, every=10, console=console)) as progress:
        for step in range(1, 21):
            progress.show(step_metrics(step, **changes))
    return stream.getvalue()


def test_interrupted_evaluation_completes_its_line_later(tmp_path):
    """Once: the line of a step that was evaluated stays as it is."""
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(step_metrics(1))
        writer.write(step_metrics(2))
        before = writer.path.read_text().splitlines()
    for losses in ({}, {"held_out": OF_SET}, {"web": OF_SET}):
        with closing(MetricsWriter(tmp_path)) as writer:  # started again
            writer.complete(losses)
            first, last = writer.path.read_text().splitlines()
            assert first == before[0]
            if not losses:
                assert last == before[1]
    values = json.loads(last)
    assert list(values["validation"]) == ["held_out"] and values["held_out_loss"] == 4.5
    assert {key: values[key] for key in json.loads(before[1])} == json.loads(before[1])
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.complete({"held_out": OF_SET})
        writer.write(step_metrics(3))
    assert [json.loads(line)["step"] for line in writer.path.read_text().splitlines()] == [1, 2, 3]
    with closing(MetricsWriter(tmp_path / "new")) as writer:
        writer.complete({"held_out": OF_SET})
    assert writer.path.read_text() == ""


def test_log_has_aligned_lines():
    lines = shown(terminal=False).splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d  step", line) for line in lines)
    assert [line[10:20] for line in lines] == ["step  1/20", "step 10/20", "step 20/20"]
    assert lines[1].endswith("0:00:00 elapsed, 0:00:00 left") and lines[2].endswith("  0:00:00")
    assert "loss 5.0000  norm 1.250  lr 1.0e-03  12,346 tokens/s  MFU 25.0 %" in lines[0]


def test_terminal_has_a_bar():
    text = shown(terminal=True)
    assert "20/20" in text
    assert "12,346 tokens/s" in text


def columns_of(lines):
    """The height of the curve in each column of dots, from 0 at its lowest row; None without a dot.

    Read back by Unicode's numbers of braille dots: 1 2 3 7 go down on the left, 4 5 6 8 right.
    """
    dots = (1, 2, 3, 7, 4, 5, 6, 8)
    drawn = [line.partition("┤")[2] for line in lines]
    heights = [None] * (2 * len(drawn[0]))
    for row, text in enumerate(drawn):
        for i, dot in itertools.product(range(len(text)), range(8)):
            if ord(text[i]) - 0x2800 & 1 << dots[dot] - 1:
                heights[2 * i + dot // 4] = 4 * (len(drawn) - row) - 1 - dot % 4
    return heights


def test_terminal_shows_loss_curve_and_log_shows_none():
    def lines(losses, terminal=True, width=80):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
        console = Console(file=stream, force_terminal=terminal, width=width, color_system=None)
        with closing(Progress(len(losses), console=console)) as progress:
            for step, loss in enumerate(losses, 1):
                progress.show(step_metrics(step, loss=loss))
        stream.seek(0)
        text = stream.read()
        # The display of the end comes last, above the bar.
        plain = re.sub(r"\x1b\[\??\d*[A-Za-z]", "", text)
        return [line for line in plain.splitlines() if "┤" in line][-6:], text

    curve, _ = lines([10.0 - i / 2 for i in range(16)])
    assert curve[0].split("┤")[0].strip() == "10.000" and curve[-1].split()[0] == "2.500"
    heights = columns_of(curve)
    assert heights[0] == 23 and heights[15] == 0 and heights == sorted(heights, reverse=True)
    # A long run is told in whole by means, and a loss that is not finite ends it elsewhere.
    curve, _ = lines([*(float(i // 512) for i in range(1024)), math.nan])
    heights = columns_of(curve)
    assert heights[0] == 0 and heights[-1] == 23 and set(heights) == {0, 23}
    half = heights.index(23)
    assert len(heights) == 64 and half == 32
    # Nothing is wider than the terminal, and a log has no curve.
    assert all(len(line) <= 40 for line in lines([3.0, 2.0, 1.0] * 60, width=40)[0])
    assert "┤" not in lines([3.0, 2.0, 1.0], terminal=False)[1]


def test_remaining_time_is_estimated_from_newest_steps(monkeypatch):
    """The first step, which also compiles, and the steps before a restart tell nothing of it."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    for first in (0, 400):
        stream = io.StringIO()
        log = Progress(1000, every=1, console=Console(file=stream, width=160), first=first)
        for step in range(first + 1, first + 101):
            clock[0] += 500 if step == 1 else 2
            log.show(step_metrics(step))
            if step == first + 1:
                assert stream.getvalue().rstrip().endswith("elapsed"), "it predicts nothing"
        left = (1000 - first - 100) * 2
        assert stream.getvalue().rstrip().endswith(f"{in_words(left)} left")


@pytest.mark.parametrize("num_steps", [10**18, 2**70])
def test_run_that_takes_longer_than_time_counts_shows_its_steps(num_steps, monkeypatch):
    """With a stop_after, as by people whose train.steps means "until I stop it"."""
    clock = iter(range(1000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    log = Progress(num_steps, every=1, console=Console(file=stream, width=160))
    for step in (1, 2, 3):
        log.show(step_metrics(step))
    assert stream.getvalue().rstrip().endswith("more than 1,000,000 days left")


def test_full_disk_keeps_lines_in_memory(tmp_path, monkeypatch):
    """It takes a part of a line first, as a real one does; and there is room again later."""
    room = [150]
    warnings = []
    write = os.write

    def write_while_there_is_room(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(metrics.os, "write", write_while_there_is_room)
    with closing(MetricsWriter(tmp_path, say=warnings.append)) as writer:
        for step in (1, 2, 3):
            writer.write(step_metrics(step))
        assert len(warnings) == 1 and "No space left on device). Training continues" in warnings[0]
        room[0] = 10**6
        writer.write(step_metrics(4))
        assert len(warnings) == 2
        room[0] = 0
        writer.write(step_metrics(5))
    assert [json.loads(line)["step"] for line in writer.path.open()] == [1, 2, 3, 4]
    assert warnings[-1].startswith("METRICS LOST: the last 1 lines")


@pytest.mark.parametrize("terminal", [True, False])
def test_summary(terminal):
    result = Result(
        steps=20,
        trained=20,
        loss=3.0,
        mean_loss=3.1,
        loss_deviation=0.25,
        mean_loss_of=20,
        validation={
            "held_out": SetLoss(3.5, 0.25, 8192, 40, 1.5),
            "web": SetLoss(4.0, None, 2048, 1, None),
        },
        tokens_per_second=1e4,
        tflops_per_device=0.123,
        mfu=0.5,
        peak_memory_bytes=[2**20, 2**21],
    )
    summary = Summary(
        result=result,
        unigram_loss=6.0,
        peak_name="a measured matmul",
        files={"run": Path("runs/a"), "metrics": Path("runs/a/metrics.jsonl")},
        seconds=125,
    )
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=160, color_system=None)
    print_summary(summary, console, go_on="the command")
    for text in (
        "0:02:05",
        "3.1000 ± 0.2500 over the last 20 steps",
        "held-out loss                  3.5000 ± 0.2500 (perplexity 33.12, 1.5000 bits per byte; "
        "8,192 tokens of 40 documents)",
        "loss of web                    4.0000 (perplexity 54.6; 2,048 tokens of 1 document)",
        "unigram loss                   6.0000 (the same tokens by their frequencies in training; "
        "the model is below it)",
        "10,000",
        "50.0 % of a measured matmul",
        "1, 2",
        "runs/a/metrics.jsonl",
    ):
        assert text in stream.getvalue()


def test_step_that_is_faster_than_the_peak_has_no_mfu():
    """The peak was measured while other programs had the cores; 205 % was shown."""
    assert metrics.mfu_of(5e11, 1e12) == 0.5
    assert metrics.mfu_of(2.05e12, 1e12) is metrics.mfu_of(1.0, None) is None
    summary = Summary(Result(steps=3, trained=3), 6.0, "a measured matmul", {"run": Path("runs/a")})
    assert dict(summary.rows())["MFU"] == (
        "unknown, for steps were faster than a measured matmul at the start of the run"
    )


@pytest.mark.parametrize("stopped", [True, False])
def test_summary_tells_stopped_run_from_run_with_nothing_to_do(stopped):
    result = Result(steps=20, trained=3 if stopped else 0, stopped=stopped)
    result.validation = {"held_out": SetLoss(3.5, 0.25, 8192, 40, 1.5)}
    summary = Summary(result, 6.0, "peak", {"run": Path("runs/a")})
    stream = io.StringIO()
    print_summary(summary, Console(file=stream, width=160), go_on="the command")
    text = stream.getvalue()
    if stopped:
        assert (
            "stopped on request after step 20, everything saved; to resume:\n        the command"
            in text
        )
    else:
        assert "runs/a is finished: all its 20 steps were done before" in text
        assert "raise parallel3d.train.steps, max_tokens or epochs" in text  # two are refused
        assert "tokens/s" not in text and "3.5000" in text


def test_peak_memory_is_a_high_water_mark():
    before = metrics.peak_memory_bytes(CPU)
    resident = psutil.Process().memory_info().rss
    held = torch.ones((before - resident) // 4 + 2**25)  # fp32: more than was resident before
    assert metrics.peak_memory_bytes(CPU) - before > 2**26
    after = metrics.peak_memory_bytes(CPU)
    del held
    assert metrics.peak_memory_bytes(CPU) >= after


def test_measured_peak_is_what_a_matmul_reaches():
    peak = known_hardware.measure_peak_flops(CPU, torch.float32)
    assert 1e8 < peak < 1e14


def test_rates_of_roles_are_there_where_roles_have_their_own():
    rates = {"input": 1e-3, "hidden": 2.5e-4}
    assert "role_lr" not in json.loads(step_metrics().to_json())
    metrics = step_metrics(role_lr=rates)
    assert json.loads(metrics.to_json())["role_lr"] == rates
    assert flat_of(metrics)["role_lr/hidden"] == 2.5e-4
    metrics = step_metrics(part_epochs={"mixture.1": 1.5})
    assert json.loads(metrics.to_json())["part_epochs"] == {"mixture.1": 1.5}
    assert flat_of(metrics)["part_epochs/mixture.1"] == 1.5


def test_attention_kernel_is_printed_with_model(monkeypatch):
    """Of a device; here the CPU stands in for one, and nothing has been computed yet."""
    raw = config_of(zero=0)
    raw["parallel3d"]["model"] |= {"hidden_size": 32, "num_hidden_layers": 1}
    config = RunConfig.from_dict(raw).resolve(1).with_corpus(256, 10**6)
    mesh = Mesh()
    try:
        parts = assemble(config, mesh)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        console = Console(record=True, width=200)
        print_placement(console, config, parts)
    finally:
        mesh.close()
    lines = console.export_text().splitlines()
    assert lines[0].startswith("model   gpt") and lines[-1].startswith("kernel  "), lines
