"""A global batch that changes within a run, and side losses: the metrics of one process."""

import json
from math import cos, pi, sqrt

import pytest

from parallel3d.mesh.launch import Launch
from parallel3d.train.ending import DONE, STOPPED
from parallel3d.train.evaluate_checkpoint import evaluation_config
from tests.checkpoint.drill import LENGTH, changed, prepared_config
from tests.own_families import FOLDER, forgotten_afterwards
from tests.train.running import folder_of, start

pytestmark = pytest.mark.gloo

SCHEDULE = [[0, 8], [f"{5 * LENGTH} tokens", 12], [32, 4], [f"{40 * LENGTH - 1} tokens", 8]]
SIZES = 8, 12, 12, 4, 4, 8
MICRO = 2


@pytest.fixture(scope="module", autouse=True)
def family():
    """Forget the family of FOLDER afterwards."""
    with forgotten_afterwards():
        yield


def growing(tmp_path):
    """A run with SCHEDULE, 3 samples longer than its whole steps, and the same on one process."""
    raw = prepared_config(tmp_path)
    none = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    settings = {f"parallel3d.model.{name}": value for name, value in none.items()}
    tokens = (sum(SIZES) + 3) * LENGTH
    train = {"steps": None, "max_tokens": tokens, "batch_schedule": SCHEDULE, "batch_lr": "sqrt"}
    settings |= {f"parallel3d.train.{name}": value for name, value in train.items()}
    settings |= {"train_micro_batch_size_per_gpu": MICRO}
    settings |= {"parallel3d.pipeline.activation_checkpointing": "none"}
    del raw["gradient_accumulation_steps"]
    settings |= {"parallel3d.model.family": "routed", "parallel3d.run.model_folders": [FOLDER]}
    raw = changed(raw, settings)
    one = changed(raw, {"parallel3d.run.name": "one", "train_micro_batch_size_per_gpu": 4})
    return changed(raw, {"parallel3d.run.name": "two"}), one


def lines(raw):
    return list(map(json.loads, (folder_of(raw) / "metrics.jsonl").read_text().splitlines()))


def samples_of(ranks):
    return sorted({sample for ended in ranks for sample in ended.samples})


def check_same(two, one):
    """That each step of both runs has its size, the same numbers and the rate by hand."""
    tokens = 0
    for size, ours, theirs in zip(SIZES, lines(two), lines(one), strict=True):
        tokens += size * LENGTH
        assert ours["tokens"] == theirs["tokens"] == tokens
        passed = tokens / LENGTH / 8  # in steps of the first batch, of which the run has 6
        height = passed / 2 if passed <= 2 else 0.55 + 0.45 * cos(pi * (passed - 2) / 4)
        assert ours["lr"] == pytest.approx(2e-3 * sqrt(size / 8) * height, rel=1e-9)
        speed = ours["tokens_per_second"] * ours["step_seconds"]
        assert speed == pytest.approx(size * LENGTH)
        assert ours["side_losses"] == pytest.approx(theirs["side_losses"], rel=1e-5), ours["step"]
        assert ours["side_losses"].keys() == {"balance", "z", "largest", "size"}
        for key in ("loss", "grad_norm", "lr"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)


def run_in_parts(raw, parts):
    """Start a run on each part's mesh with its settings, up to its step; check the samples."""
    ends = [0]
    for mesh, stop_after, settings in parts:
        settings = {"parallel3d.train.stop_after": stop_after} | settings
        ranks = start(changed(raw, settings), mesh)
        assert {ended.code for ended in ranks} == {STOPPED if stop_after else DONE}, ranks
        assert any(ended.says("12 from sample 5 (learning rate x 1.225)") for ended in ranks)
        ends.append(sum(SIZES[:stop_after]))
        assert samples_of(ranks) == list(range(*ends[-2:]))


def test_batch_phases_on_pp_2_with_resume_equal_one_rank(tmp_path):
    """ZeRO-3 to the middle of the second phase, then ZeRO-1; one more step would not fit."""
    two, one = growing(tmp_path)
    run_in_parts(one, [((1, 1, 1), None, {})])
    zero = "zero_optimization.stage"
    run_in_parts(two, [((2, 1, 1), 2, {zero: 3}), ((2, 1, 1), None, {zero: 1})])
    check_same(two, one)
    # dp 3 cannot do its sizes, but an evaluation has one size.
    checkpoint = folder_of(two) / "checkpoints" / f"step-{len(SIZES)}"
    config = evaluation_config(checkpoint, Launch(0, 6, 0)).resolve(6)
    assert config.mesh.dp == 3 and config.global_batch_size % (3 * MICRO) == 0


@pytest.mark.slow
def test_resume_on_another_mesh_in_each_phase_equals_one_rank(tmp_path):
    """The micro batch stays, so dp 2 takes half as many microbatches."""
    two, one = growing(tmp_path)
    run_in_parts(one, [((1, 1, 1), None, {})])
    meshes = (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 1, 1), (2, 2, 1)
    run_in_parts(two, zip(meshes, (1, 2, 4, 5, None), ({},) * 5, strict=True))
    check_same(two, one)
