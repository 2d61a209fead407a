"""The trainer on real ranks and real text, put together by launch/train.py itself."""

import json
import math
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from launch.train import train
from parallel3d.base.errors import TrainingError
from parallel3d.checkpoint import disk
from parallel3d.checkpoint.manifest import step_folders, verify
from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.engine import Engine
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Executor
from parallel3d.train import known_hardware
from parallel3d.train import trainer as trainer_module
from parallel3d.train.ending import DONE, STOPPED, StopRequest
from parallel3d.train.reporter import Reporter
from parallel3d.verify.local_ranks import run_locally
from tests.train.held_out import check_losses
from tests.train.running import claim_on_first
from tests.train.test_metrics import KEYS

pytestmark = pytest.mark.gloo

HIDDEN = 32
LAYERS = 2
LENGTH = 16
VOCAB = 280
STEPS = 4
PEAK = 2e12
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "run", "far"]
STOPS = [(1, signal.SIGINT), pytest.param(0, signal.SIGTERM, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A config, on a corpus that is already prepared."""
    root = tmp_path_factory.mktemp("trainer")
    rng = np.random.default_rng(0)
    for i in range(40):
        lines = [" ".join(rng.choice(WORDS, 12)) for _ in range(12)]
        (root / f"{i}.txt").write_text("\n".join(lines))
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    block = {
        "model": {"family": "gpt", "max_position_embeddings": LENGTH, **sizes},
        "data": {
            "source": "text",
            "paths": [f"{root}/*.txt"],
            "vocab_size": VOCAB,
            "sequence_length": LENGTH,
            "held_out_fraction": 0.2,
            "cache": str(root / "cache"),
            "validation": {"web": {"source": "text", "paths": [f"{root}/1?.txt"]}},
        },
        "train": {
            "steps": STEPS,
            "evaluate_every": 3,
            "evaluate_samples": 24,  # no multiple of the batch: the last one is filled up
            "lr_schedule": {"type": "cosine", "warmup_steps": 2},
            "timeout_seconds": 60,
        },
        "run": {"directory": str(root / "runs")},
    }
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3},
        "parallel3d": block,
    }
    prepare(RunConfig.from_dict(config).data)
    return config


def on_mesh(raw, pp, dp, tp, micro_batch=4, save_weights=True, **training):
    """The config on another mesh, with other settings of `train`, and a folder of its own."""
    block = raw["parallel3d"] | {"mesh": {"pp": pp, "tp": tp}}
    block |= {"train": block["train"] | training}
    run = {"name": f"{pp}x{dp}x{tp}-{time.monotonic_ns()}", "save_weights": save_weights}
    block |= {"run": block["run"] | run}
    return raw | {"train_micro_batch_size_per_gpu": micro_batch, "parallel3d": block}


def known_peak(config, mesh):
    """Stand for a measurement of the device."""
    return "a peak of mine", PEAK


def run_on_rank(rank, raw, disturb=None, *details):
    """All of launch/train.py after `disturb`: the exit code or error, and what was seen."""
    seen = {"run": [], "take_step": [], "set_timeouts": []}

    def look_at(owner, name):
        call = getattr(owner, name)

        def looked_at(*args):
            result = call(*args)
            seen[name].append((len(seen["take_step"]), args[1:], result))
            return result

        setattr(owner, name, looked_at)

    look_at(trainer_module.Trainer, "run")
    look_at(trainer_module.Trainer, "take_step")
    look_at(Mesh, "set_timeouts")
    known_hardware.peak = known_peak
    if disturb:
        disturb(rank, *details)
    asked = RunConfig.from_dict(raw)
    config = asked.resolve(int(os.environ["WORLD_SIZE"]))
    mesh = Mesh(pp=config.mesh.pp, dp=config.mesh.dp, tp=config.mesh.tp)
    claimed = claim_on_first(asked, mesh)
    start = time.monotonic()
    try:
        with StopRequest().listening() as stop:
            ended = train(asked, config, mesh, claimed, stop, as_json=False)
    except Exception as error:
        if not seen["run"] and not seen["take_step"]:
            raise  # nothing of this is meant to fail before it trains
        ended = error if isinstance(error, TrainingError) else str(error)
    took = time.monotonic() - start
    claimed and claimed.lock.release()
    result = seen["run"][0][2] if seen["run"] else None
    timeouts = [(steps, seconds) for steps, (seconds,), _ in seen["set_timeouts"]]
    return ended, Seen(result, Path(config.run.directory, config.run.name), timeouts, took)


@dataclass
class Seen:
    """What one rank came to."""

    result: trainer_module.Result | None
    directory: Path
    timeouts: list  # (steps done, seconds) of each time that they were shortened
    seconds: float

    @property
    def lines(self):
        return list(map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines()))


# The numbers of meshes with tensor parallelism are equal by default in tests/verify/test_parity.py.
MESHES = [
    (2, 1, 1),
    *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((2, 1, 2), (2, 2, 2))),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_one_process_and_many_tell_the_same_story(raw, mesh):
    """Same metrics on one process and many; files, arithmetic, held-out loss against hand-made."""
    corpus = prepare(RunConfig.from_dict(raw).data)
    batch = 16
    single = run_locally(run_on_rank, 1, on_mesh(raw, 1, 1, 1, micro_batch=8))
    config = on_mesh(raw, *mesh, micro_batch=8 // mesh[1])
    many = run_locally(run_on_rank, math.prod(mesh), config)
    curves = []
    for ranks in (single, many):
        code, seen = ranks[0]
        assert code == DONE
        lines = seen.lines
        assert seen.result.mean_loss == pytest.approx(np.mean([line["loss"] for line in lines]))
        curves.append(lines)
        for step, line in enumerate(lines, 1):
            evaluated = step in (3, STEPS)
            assert list(line) == KEYS + ["held_out_loss", "validation"] * evaluated
            assert line["step"] == step
            assert line["tokens"] == step * batch * LENGTH
            assert math.isfinite(line["loss"]) and line["peak_memory_bytes"] > 2**20
            # 6 x (4 + 8) h^2 a layer, 12 s h a layer, 6 h V: Kaplan et al. 2020, table 1, x 3.
            matrices = 6 * LAYERS * 12 * HIDDEN**2 + 6 * HIDDEN * corpus.vocab_size
            flops = matrices + LAYERS * 12 * LENGTH * HIDDEN
            speed = batch * LENGTH / line["step_seconds"]
            assert line["tokens_per_second"] == pytest.approx(speed)
            assert line["tflops_per_device"] == pytest.approx(speed * flops / len(ranks) / 1e12)
            assert line["mfu"] == pytest.approx(line["tflops_per_device"] * 1e12 / PEAK)
        # Warm-up of two steps, then cos(90, 180 degrees) from 1 down to 0.1.
        lrs = [2e-3 * x for x in (0.5, 1.0, 0.55, 0.1)]
        assert [line["lr"] for line in lines] == pytest.approx(lrs)
        for result in [seen.result for _, seen in ranks]:
            assert (result.steps, result.stopped) == (STEPS, False)
            assert result.loss == lines[-1]["loss"]
            assert result.held_out_loss == lines[-1]["held_out_loss"]
            assert len(result.peak_memory_bytes) == len(ranks)
        check_losses(lines[-1], seen.directory, corpus, samples=24, length=LENGTH)
        # Once the first step is done, with the setting's value, on every rank.
        assert all(seen.timeouts[0] == (1, 60) for _, seen in ranks)
    for one, other in zip(*curves, strict=True):
        for key in ("loss", "grad_norm", "held_out_loss"):
            if key in one:
                assert other[key] == pytest.approx(one[key], rel=1e-5), (one["step"], key)
    assert curves[0][-1]["loss"] < curves[0][0]["loss"]


def test_side_losses_are_means_over_the_layers_and_the_batch():
    """Of two replicas of two stages: the first has two layers with one loss, the last has both."""
    mesh = SimpleNamespace(replicas=SimpleNamespace(size=2), tensor=SimpleNamespace(size=1))
    reporter = SimpleNamespace(_side_losses=Counter(balance=3, size=1), _mesh=mesh)
    sums = (2.0, 0.0), (4.0, 0.0), (1.0, 5.0), (2.0, 7.0)
    step = SimpleNamespace(rows=[SimpleNamespace(side_losses=own) for own in sums])
    means = Reporter.means_of_side_losses(reporter, step)
    assert means == {"balance": 9 / 2 / 3, "size": 12 / 2 / 1}


def poison_loss(rank, culprit, value):
    """From its third batch on, the executor of one rank reports a loss that is not finite."""
    run = Executor.run
    write = disk.write_file

    def slow_write(*args, **options):
        time.sleep(0.1)  # the save of the step before is still under way
        return write(*args, **options)

    disk.write_file = slow_write

    def poisoned(self, batch, step=0):
        loss = run(self, batch, step)
        return value if rank == culprit and step >= 2 else loss

    Executor.run = poisoned


def poison_weight(rank, culprit):
    """Before its second step, one rank's part of the last norm becomes NaN."""
    step_of = trainer_module.Trainer.take_step

    def poisoned(self, step, *args):
        if rank == culprit and step == 1:
            weight = next(h for h in self.engine.held if h.name == "head.norm.weight").parameter
            weight.data.fill_(math.nan)
        return step_of(self, step, *args)

    trainer_module.Trainer.take_step = poisoned


def poison_gradient(rank, culprit):
    """In its second step one rank gets a gradient from the next stage that is NaN."""
    backward = Engine.backward
    step_of = trainer_module.Trainer.take_step

    def poisoned_step(self, step, *args):
        self.engine.poisoned = rank == culprit and step == 1
        return step_of(self, step, *args)

    def poisoned(self, output, grad=None, **stage):
        poisoned = grad is not None and getattr(self, "poisoned", False)
        backward(self, output, grad * math.nan if poisoned else grad, **stage)

    trainer_module.Trainer.take_step = poisoned_step
    Engine.backward = poisoned


@pytest.mark.parametrize(
    ("disturb", "details", "expected"),
    [
        # By default tests/train/test_bad_steps.py has wrong losses.
        pytest.param(
            poison_loss,
            (1, math.inf),
            "the loss on rank 1 is inf at step 3",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            poison_weight, (1,), "the loss on rank 1 is nan at step 2", marks=pytest.mark.slow
        ),
        (poison_gradient, (0,), "the gradient norm is not finite at step 2"),
    ],
    ids=["loss", "weight", "gradient"],
)
def test_nonfinite_value_on_one_rank_stops_all(raw, disturb, details, expected):
    config = on_mesh(raw, 2, 1, 1, save_weights=False)
    config["parallel3d"] |= {"checkpoint": {"every": 1}}
    if disturb is poison_weight:
        config |= {"zero_optimization": {"stage": 1}}  # whole weights, which one rank can spoil
    ranks = run_locally(run_on_rank, 2, config, disturb, *details)
    assert all(isinstance(ended, TrainingError) for ended, _ in ranks), ranks
    messages = {str(ended) for ended, _ in ranks}  # one: rank 0 speaks for all
    assert [message.startswith(expected) for message in messages] == [True], messages
    before = int(expected.rsplit(" ", 1)[1]) - 1
    assert len(ranks[0][1].lines) == before  # they were reported, and saved
    assert step_folders(ranks[0][1].directory / "checkpoints")[0][0] == before


def stop_in_step_two(rank, culprit, number):
    """One rank alone gets a signal, twice, while it is at its second step."""
    run = Executor.run

    def signalled(self, batch, step=0):
        if rank == culprit and step == 1:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # torchrun repeats a Ctrl-C at once
        return run(self, batch, step)

    Executor.run = signalled


@pytest.mark.parametrize(("culprit", "number"), STOPS)
def test_request_to_stop_on_one_rank_stops_all_at_one_step(raw, culprit, number):
    """The profile that was begun is written, too."""
    config = on_mesh(raw, 2, 1, 1, steps=40, profile={"start": 1, "steps": 20})
    ranks = run_locally(run_on_rank, 2, config, stop_in_step_two, culprit, number)
    assert [ended for ended, _ in ranks] == [STOPPED] * 2
    for result in [seen.result for _, seen in ranks]:
        assert (result.steps, result.stopped) == (2, True)
        assert result.held_out_loss is None  # saved at once, whatever else is due
    directory = ranks[0][1].directory
    assert [line["step"] for line in ranks[0][1].lines] == [1, 2]
    assert [step for step, _ in step_folders(directory / "checkpoints")] == [2]
    assert verify(directory / "checkpoints/step-2") == []
    assert not (directory / "weights").exists()
    timeline = json.loads((directory / "profile/timeline.json").read_text())["traceEvents"]
    spans = [event["name"] for event in timeline if (event["ph"], event["pid"]) == ("X", 1)]
    assert [name for name in spans if name.startswith("step")] == ["step 1"]
