"""Runs that begin from a checkpoint of a trunk: the same as if each had been trained whole."""

import json

import pytest

from tests.checkpoint.drill import changed, prepared_config
from tests.train.running import folder_of, start_all

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

WARMUP = 1
COOLDOWN = 2
STARTS = (2, 4)
SAME = ("loss", "grad_norm", "lr", "tokens", "held_out_loss")


def test_fork_of_trunk_equals_run_without_fork(tmp_path):
    """A trunk of constant rate keeps a checkpoint for each fork; the first one is trained."""
    quick = {"parallel3d.pipeline.activation_checkpointing": "none"}
    quick |= {"gradient_accumulation_steps": 1, "zero_optimization.stage": 1}
    base = changed(prepared_config(tmp_path), quick)

    def run(name, steps, schedule, **checkpoint):
        settings = {
            "parallel3d.run.name": name,
            "parallel3d.train.steps": steps,
            "parallel3d.train.lr_schedule": schedule | {"warmup_steps": WARMUP},
        } | {f"parallel3d.checkpoint.{key}": value for key, value in checkpoint.items()}
        return changed(base, settings)

    begin = STARTS[0]
    end = begin + COOLDOWN
    raws = [run("trunk", 7, {"type": "constant"}, every=1, at=STARTS)]
    kept_folder = folder_of(raws[0]) / "checkpoints"
    wsd = {"type": "wsd", "decay_steps": COOLDOWN}
    raws.append(run("fork", end, wsd, resume=str(kept_folder / f"step-{begin}")))
    raws.append(run("whole", end, wsd, resume="none"))
    for ended in start_all([(raw,) for raw in raws], (1, 1, 1)):
        assert [rank.code for rank in ended] == [0], ended
    trunk, fork, whole = (
        list(map(json.loads, (folder_of(raw) / "metrics.jsonl").read_text().splitlines()))
        for raw in raws
    )
    kept = {path.name for path in kept_folder.glob("step-*")}
    assert kept == {*(f"step-{step}" for step in STARTS), "step-6", "step-7"}
    own = whole[begin:]
    assert [line["step"] for line in fork] == [line["step"] for line in own] == [begin + 1, end]
    for ours, theirs in zip(fork, own, strict=True):
        assert [ours.get(key) for key in SAME] == [theirs.get(key) for key in SAME]
    assert fork[-1]["held_out_loss"] != trunk[-1]["held_out_loss"]
    assert fork[-1]["lr"] == pytest.approx(0.1 * trunk[-1]["lr"])
