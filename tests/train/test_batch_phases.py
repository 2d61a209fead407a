"""A global batch that changes within a run, and side losses: the metrics of one process."""

import json
from pathlib import Path

import pytest

from parallel3d.config import RunConfig
from parallel3d.train.ending import DONE, STOPPED
from tests.checkpoint.drill import LENGTH, changed, prepared_config
from tests.train.running import folder_of, start

pytestmark = pytest.mark.gloo

FAMILIES = str(Path(__file__).parents[1] / "pipeline/families")
PHASES = (0, 8), (12, 12), (40, 4)  # the first sample of a phase, and samples in a step
SIZES = 8, 8, 12, 12, 4, 4
MICRO = 2


def in_phases(rank):
    """A stand-in for a setting: the batch is a function of the samples seen."""

    def batch_phases(self):
        share = self.micro_batch_size * self.mesh.dp
        return tuple((first, size // share) for first, size in PHASES)

    RunConfig.batch_phases = property(batch_phases)


def lines(raw):
    return list(map(json.loads, (folder_of(raw) / "metrics.jsonl").read_text().splitlines()))


def samples_of(ranks):
    return sorted({sample for ended in ranks for sample in ended.samples})


def test_the_same_run_on_pp_2_with_a_resume_in_between(tmp_path):
    """ZeRO-3 to the middle of the second phase, then ZeRO-1; one more step would not fit."""
    raw = prepared_config(tmp_path)
    none = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    settings = {f"parallel3d.model.{name}": value for name, value in none.items()}
    settings |= {"parallel3d.train.steps": None, "parallel3d.train.max_tokens": 51 * LENGTH}
    settings |= {"train_batch_size": 8, "train_micro_batch_size_per_gpu": MICRO}
    del raw["gradient_accumulation_steps"]
    settings |= {"parallel3d.model.family": "routed", "parallel3d.run.model_folders": [FAMILIES]}
    raw = changed(raw, settings)
    one = changed(raw, {"parallel3d.run.name": "one", "train_micro_batch_size_per_gpu": 4})
    (ended,) = start(one, (1, 1, 1), in_phases)
    assert ended.code == DONE, ended
    assert samples_of([ended]) == list(range(sum(SIZES)))

    two = changed(raw, {"parallel3d.run.name": "two"})
    zero = "zero_optimization.stage"
    ranks = start(changed(two, {"parallel3d.train.stop_after": 3, zero: 3}), (2, 1, 1), in_phases)
    assert {ended.code for ended in ranks} == {STOPPED}, ranks
    assert samples_of(ranks) == list(range(28))
    ranks = start(changed(two, {zero: 1}), (2, 1, 1), in_phases)
    assert {ended.code for ended in ranks} == {DONE}, ranks
    assert samples_of(ranks) == list(range(28, sum(SIZES)))

    tokens = 0
    for size, ours, theirs in zip(SIZES, lines(two), lines(one), strict=True):
        tokens += size * LENGTH
        assert ours["tokens"] == theirs["tokens"] == tokens
        speed = ours["tokens_per_second"] * ours["step_seconds"]
        assert speed == pytest.approx(size * LENGTH)
        assert ours["side_losses"] == pytest.approx(theirs["side_losses"], rel=1e-5), ours["step"]
        assert ours["side_losses"].keys() == {"balance", "z", "largest", "size"}
        for key in ("loss", "grad_norm", "lr"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)
