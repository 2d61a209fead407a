"""Runs that begin from a checkpoint of a trunk: the same as if each had been trained whole."""

import json

import pytest

from tests.checkpoint.drill import changed, prepared_config
from tests.train.running import folder_of, start_all

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

WARMUP = 1
COOLDOWN = 2
ENDS = (4, 6)
SAME = ("loss", "grad_norm", "lr", "tokens", "held_out_loss")


def test_fork_of_trunk_equals_run_without_fork(tmp_path):
    """One trunk of constant rate serves both ends, by the checkpoints that are kept for them."""
    none = {"parallel3d.pipeline.activation_checkpointing": "none"}
    base = changed(prepared_config(tmp_path), none)

    def run(name, steps, schedule, **checkpoint):
        settings = {
            "parallel3d.run.name": name,
            "parallel3d.train.steps": steps,
            "parallel3d.train.lr_schedule": schedule | {"warmup_steps": WARMUP},
        } | {f"parallel3d.checkpoint.{key}": value for key, value in checkpoint.items()}
        return changed(base, settings)

    starts = [end - COOLDOWN for end in ENDS]
    trunk = run("trunk", 8, {"type": "constant"}, every=1, at=starts)
    places = [folder_of(trunk) / f"checkpoints/step-{step}" for step in starts]
    wsd = {"type": "wsd", "decay_steps": COOLDOWN}
    forks = [
        run(f"fork-{end}", end, wsd, resume=str(place))
        for end, place in zip(ENDS, places, strict=True)
    ]
    whole = [run(f"whole-{end}", end, wsd, resume="none") for end in ENDS]
    every = [trunk, *forks, *whole]
    for ended in start_all([(raw,) for raw in every], (1, 1, 1)):
        assert [rank.code for rank in ended] == [0], ended
    metrics = [
        list(map(json.loads, (folder_of(raw) / "metrics.jsonl").read_text().splitlines()))
        for raw in every
    ]
    kept = {path.name for path in (folder_of(trunk) / "checkpoints").glob("step-*")}
    assert kept == {*(f"step-{step}" for step in starts), "step-7", "step-8"}
    for end, fork, other in zip(ENDS, metrics[1:3], metrics[3:], strict=True):
        own = [line for line in other if line["step"] > end - COOLDOWN]
        assert [line["step"] for line in fork] == [line["step"] for line in own]
        for ours, theirs in zip(fork, own, strict=True):
            assert [ours.get(key) for key in SAME] == [theirs.get(key) for key in SAME]
        assert fork[-1]["held_out_loss"] != metrics[0][-1]["held_out_loss"]
        assert fork[-1]["lr"] == pytest.approx(0.1 * metrics[0][-1]["lr"])
