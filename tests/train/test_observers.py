"""Every observer of a run at once: NCCL's rules, one order of collectives, and who makes them."""

import os
from collections import Counter
from contextlib import contextmanager

import pytest

from parallel3d.mesh.groups import BACKEND
from parallel3d.train import observers as observers_module
from parallel3d.verify.local_ranks import run_locally
from tests.checkpoint.drill import changed, prepared_config
from tests.pipeline.test_total_order import Issued, cycle_in
from tests.strict.running import STRICT
from tests.train.running import folder_of, train_on_rank

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

STEPS = 1
EVERYTHING = {
    "parallel3d.run.name": "everything",
    "parallel3d.mesh": {"pp": 2, "tp": 1},
    "parallel3d.train.steps": STEPS,
    "parallel3d.pipeline.activation_checkpointing": "none",
    "parallel3d.train.check_bits": {"every": 1, "recompute_every": 1},
    "parallel3d.train.on_spike": "skip",
    "parallel3d.train.noise_scale_every": 1,
    "parallel3d.train.ema": {"decay": 0.5, "every": 1},
    "parallel3d.train.evaluate_every": 1,
    "parallel3d.train.digest_every": 1,
    "parallel3d.train.profile": {"start": 0, "steps": 1, "ranks": [0]},
    "parallel3d.checkpoint.every": 1,
    "parallel3d.checkpoint.in_memory_every": 1,
    "wall_clock_breakdown": True,
    "comms_logger": {"enabled": True},
    "steps_per_print": 1,
    "zero_optimization.stage": 1,
}
METHODS = ("computed", "may_update", "after", "at_end")


def watched(observers, issued):
    """Count the operations that each observer issues, by its class."""
    counts = Counter()

    def count(name, method):
        def counted(*args):
            before = len(issued.operations)
            result = method(*args)
            counts[name] += len(issued.operations) - before
            return result

        return counted

    def count_around(name, around):
        @contextmanager
        def counted(step):
            with around(step) as context:
                yield context
                before = len(issued.operations)
            counts[name] += len(issued.operations) - before

        return counted

    for observer in observers:
        name = type(observer).__name__
        for method in METHODS:
            setattr(observer, method, count(name, getattr(observer, method)))
        observer.around = count_around(name, observer.around)
    return counts


def on_rank(rank, raw, root, backend):
    if backend:
        os.environ[BACKEND] = backend
    make = observers_module.observed_trainer
    seen = []
    issued = Issued()

    def made(*args, **options):
        trainer = make(*args, **options)
        statements = {type(x).__name__: x.collectives for x in trainer.observers}
        seen.append((statements, watched(trainer.observers, issued)))
        return trainer

    observers_module.observed_trainer = made
    with issued:
        ended = train_on_rank(rank, changed(raw, {"parallel3d.checkpoint.in_memory_folder": root}))
    statements, counts = seen[0]
    return ended.error, ended.code, statements, counts, issued.operations


def run_all(tmp_path, backend=""):
    """A run of 2 x 2 ranks with every observer: what each rank came to."""
    raw = changed(prepared_config(tmp_path), EVERYTHING)
    ranks = run_locally(on_rank, 4, raw, str(tmp_path), backend)
    assert all((error, code) == ("", 0) for error, code, *_ in ranks), ranks[0][:2]
    events = (folder_of(raw) / "events.jsonl").read_text()
    assert "wrong_bits" not in events and "not_saved" not in events
    return ranks


@pytest.mark.slow  # by default the strict backend runs without observers: tests/strict
def test_all_observers_keep_rules_of_nccl(tmp_path):
    assert [code for _, code, *_ in run_all(tmp_path, STRICT)] == [0] * 4


def test_all_observers_keep_one_order_of_collectives(tmp_path):
    """Each makes collectives only if it says so."""
    ranks = run_all(tmp_path)
    _, _, statements, _, _ = ranks[0]
    assert [*statements] == [
        "Profiler",
        "StepWatch",
        "FirstStep",
        "CopyCheck",
        "RecomputationCheck",
        "LayerHistory",
        "StepFilter",
        "GradientNoise",
        "WeightAverage",
        "ScheduledEvaluation",
        "Reporter",
        "DigestLog",
        "Saving",
    ]
    silent = {name for name, text in statements.items() if text == "none"}
    assert silent == {"FirstStep", "GradientNoise", "WeightAverage"}
    idle = {"Reporter", "LayerHistory"}  # no experts, and no step to look into
    for _, _, _, counts, _ in ranks:
        issuing = {name for name, count in counts.items() if count}
        assert issuing == statements.keys() - silent - idle, counts
    assert not cycle_in([operations for *_, operations in ranks])
