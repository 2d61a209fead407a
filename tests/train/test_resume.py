"""Where a run goes on, and on what mesh: the same losses, every sample once, or a clear refusal."""

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from parallel3d.checkpoint import on_disk, state
from parallel3d.checkpoint.manifest import verify
from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.train.ending import DONE, STOPPED
from tests.checkpoint.drill import LENGTH, changed, prepared_config
from tests.train.running import folder_of, start, start_all

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

HOME = (1, 2, 1)
ALONE = (1, 1, 1)
BATCH = 8
HALF = 2
STEPS = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """One layer, and no dropout: on another mesh its masks would be others."""
    raw = prepared_config(tmp_path_factory.mktemp("resume"))
    model = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    settings = {f"parallel3d.model.{name}": value for name, value in model.items()}
    settings |= {"parallel3d.model.num_hidden_layers": 1}
    settings |= {"parallel3d.train.steps": STEPS, "parallel3d.checkpoint.every": 1}
    settings |= {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 2}
    raw = changed(raw, settings | {"parallel3d.pipeline.activation_checkpointing": "none"})
    del raw["gradient_accumulation_steps"]  # follows from batch, micro batch and dp
    return raw


def named(raw, name, **changes):
    """The config of a run of this name; in `changes`, "__" stands for a dot."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return changed(raw, {"parallel3d.run.name": name} | changes)


@pytest.fixture(scope="module")
def half(config):
    """The folder of a run that was stopped half-way, with checkpoints of the steps 1 and 2."""
    raw = named(config, "half", parallel3d__train__stop_after=HALF)
    ranks = start(raw, HOME)
    assert [ended.code for ended in ranks] == [STOPPED] * 2, ranks
    assert seen_by_all(ranks) == list(range(HALF * BATCH))
    return folder_of(raw)


def copied(half, raw, name, **changes):
    """A config that goes on with a copy of the stopped run."""
    raw = named(raw, name, **changes)
    shutil.copytree(half, folder_of(raw))
    (folder_of(raw) / "attempts.json").unlink()
    return raw


def seen_by_all(ranks):
    """The samples that the ranks asked for, one of each data-parallel coordinate's."""
    shares = {tuple(ended.samples) for ended in ranks}
    return sorted(sample for share in shares for sample in share)


def lines(raw):
    return list(map(json.loads, (folder_of(raw) / "metrics.jsonl").read_text().splitlines()))


def steps_saved(raw):
    return sorted(path.name for path in (folder_of(raw) / "checkpoints").glob("step-*"))


HARDWARE = "parallel3d__run__hardware"  # whose memory decides for how long weights are gathered
ACCUMULATION = {"gradient_accumulation_steps": 2}
OTHERS = [
    # The sizes are 4 samples a step, and no batch is asked for: it stays 8.
    ((2, 1, 1), {"zero_optimization__stage": 1, "train_batch_size": None} | ACCUMULATION),
    ((1, 1, 2), {"zero_optimization__offload_optimizer": {"device": "cpu"}}),
    ((2, 2, 1), {"parallel3d__pipeline__schedule": "one_f_one_b", HARDWARE: "A100-SXM4-80GB"}),
]
# Every mesh to every mesh: tests/checkpoint/test_resharding.py.
FEW = [OTHERS[0], *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS[1:])]


@pytest.fixture(scope="module")
def stayed(config):
    """The metrics of a run on one rank that was never stopped."""
    raw = named(config, "stayed")
    (ended,) = start(raw, ALONE)
    assert ended.code == DONE
    assert ended.says('weights: "auto" is per_step') == 1  # the host has room
    return lines(raw)


def check_tokenizer_is_kept(run, theirs):
    """The cache that it came from may be emptied. One that was exchanged is damage."""
    names = sorted(path.name for path in theirs.iterdir())
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    assert names and checkpoints
    for folder in (run, *checkpoints):
        own = folder / "tokenizer"
        assert sorted(path.name for path in own.iterdir()) == names
        assert all((own / name).read_bytes() == (theirs / name).read_bytes() for name in names)
        assert own.stat().st_mode & 0o777 == (run / "checkpoints").stat().st_mode & 0o777
    assert not (run / "tokenizer.partial").exists()
    assert not verify(checkpoints[0])
    with TemporaryDirectory() as place:
        damaged = shutil.copytree(checkpoints[0], Path(place, checkpoints[0].name))
        with (damaged / "tokenizer" / "tokenizer.json").open("a") as file:
            file.write(" ")
        damage = [(bad.file, bad.reason) for bad in verify(damaged)]
    assert damage == [("tokenizer", "its hash is not the one in state.json")]


@pytest.mark.parametrize(("mesh", "changes"), FEW, ids=["pp", "tp", "pp-dp"])
def test_another_mesh_goes_on_with_the_same_losses(config, half, stayed, mesh, changes):
    name = "x".join(map(str, mesh))
    raw = copied(half, config, name, **changes)
    ranks = start(raw, mesh)
    assert [ended.code for ended in ranks] == [DONE] * len(ranks), ranks
    assert ranks[0].says("changed since the checkpoint: ") == 1
    kept = "batch   stays 8: 4 microbatches of 2 (for 4: --train_batch_size 4)"
    assert ranks[0].says(kept) == ("train_batch_size" in changes)
    assert ranks[0].says('weights: "auto" is per_step') == (
        "zero_optimization__stage" not in changes
    )
    assert seen_by_all(ranks) == list(range(HALF * BATCH, STEPS * BATCH))
    assert [line["step"] for line in lines(raw)] == list(range(1, STEPS + 1))
    before = (half / "metrics.jsonl").read_text().splitlines()
    assert lines(raw)[:HALF] == [json.loads(line) for line in before]
    for ours, theirs in zip(lines(raw), stayed, strict=True):
        for key in ("loss", "grad_norm", "lr", "tokens", "held_out_loss"):
            assert (key in ours) == (key in theirs)
            if key in ours:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)


def test_every_sample_once_on_other_dp_sizes_and_batches(config):
    """A change of mesh and batch, and the end at the tokens that were asked for."""
    total = 37
    settings = {"parallel3d.train.max_tokens": total * LENGTH, "parallel3d.train.steps": None}
    settings |= {"zero_optimization.stage": 1}
    raw = named(changed(config, settings), "batches")
    seen = []
    ends = []
    for mesh, batch, micro, stop_after in (
        ((1, 2, 1), 8, 2, 3),  # 24 samples
        ((1, 1, 1), 6, 3, None),  # 36: another batch would be more than 37
    ):
        changes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}
        changes |= {"parallel3d.train.stop_after": stop_after}
        ranks = start(changed(raw, changes), mesh)
        assert {ended.code for ended in ranks} == {STOPPED if stop_after else DONE}, ranks
        seen += [sample for ended in ranks for sample in ended.samples]
        ends.append(len(seen))
    assert ends == [24, 36]
    assert sorted(seen) == list(range(36))
    assert [line["tokens"] // LENGTH for line in lines(raw)] == [8, 16, 24, 30, 36]
    rates = [line["lr"] for line in lines(raw)]
    assert rates[-1] == pytest.approx(0.1 * max(rates))  # the schedule ended with the run


@pytest.mark.parametrize(
    ("length", "samples"),
    [({"max_tokens": 800}, 50), ({"epochs": 0.5}, 50), ({"epochs": 2}, 200)],
    ids=str,
)
def test_length_in_tokens_and_epochs_with_another_batch(config, length, samples):
    settings = {"parallel3d.train": {"seed": 0} | length}
    for batch, step, next_sample in ((8, 3, 24), (4, 2, 16), (6, 1, 40), (8, 6, 48), (4, 12, 48)):
        raw = changed(config, settings | {"train_batch_size": batch, "gradient_clipping": 1.0})
        resolved = RunConfig.from_dict(raw).resolve(2 if batch != 6 else 1)
        whole = resolved.with_corpus(280, 100 * LENGTH + 1)
        assert whole.num_steps == samples // batch
        resumed = whole.resumed(step, next_sample)
        done = next_sample + (resumed.num_steps - step) * batch
        assert done <= samples < done + batch, (batch, step)
        assert whole.resumed(0, 0).num_steps == whole.num_steps


def test_length_in_steps_stays(config):
    resolved = RunConfig.from_dict(config).resolve(2).with_corpus(280, 1000)
    assert resolved.resumed(1, 17).num_steps == STEPS


def split_in_another_way(rank):
    state.SPLIT_FORMAT = 4


def test_another_run_is_refused_by_name(config, half):
    """One message on all ranks, which says what was changed and how to go on."""
    refusals = {
        "parallel3d.train.seed was 0 and is now 1": {"parallel3d__train__seed": 1},
        f"parallel3d.data.sequence_length was {LENGTH} and is now 8": {
            "parallel3d__data__sequence_length": 8
        },
        f"step-{HALF}/tokenizer to go on with the run's own": {"parallel3d__data__vocab_size": 270},
        "is of another model: blocks.1.": {"parallel3d__model__num_hidden_layers": 2},
        "is of another model: embedding.token.weight has shape": {
            "parallel3d__model__hidden_size": 16
        },
    }
    runs = [
        (copied(half, config, f"refused-{number}", **changes),)
        for number, changes in enumerate(refusals.values())
    ]
    # Last: what disturbs stays in the ranks' processes. A tokenizer trained on another training
    # part differs, too, and is not the reason.
    another = copied(half, config, "refused-split", parallel3d__data__vocab_size=270)
    runs.append((another, split_in_another_way))
    refusals["held out other documents (split 3, now 4)"] = {}
    for expected, ranks in zip(refusals, start_all(runs, HOME), strict=True):
        errors = {ended.error for ended in ranks}
        (error,) = errors
        assert error.startswith("CheckpointError: ") and expected in error, error
        assert "another run.name" in error and f"step-{HALF}" in error, error
        assert not any(ended.samples for ended in ranks)


def test_another_corpus_is_said(config, half):
    """Other text under the same tokenizer, which is given by its folder this time."""
    corpus = prepare(RunConfig.from_dict(config).data)
    check_tokenizer_is_kept(half, corpus.tokenizer_directory)
    changes = {
        "parallel3d__data__held_out_fraction": 0.2,
        "parallel3d__data__tokenizer": str(corpus.tokenizer_directory),
        "parallel3d__data__vocab_size": 280,
    }
    raw = copied(half, config, "corpus", **changes)
    (ended,) = start(raw, ALONE)
    assert ended.code == DONE, ended
    assert ended.says("the corpus has changed since the checkpoint: sample 16") == 1


def see_damage(rank, step, culprit=1):
    """One rank alone reads other bytes of one file of a checkpoint than were written."""
    check_file = on_disk.check_file

    def damaged(folder, *args):
        wrong = rank == culprit and folder.name == f"step-{step}"
        return "its contents do not match" if wrong else check_file(folder, *args)

    on_disk.check_file = damaged


def after_restart(rank):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_run_resumes_from_requested_or_newest_valid_checkpoint(config, half):
    """Each of these in turn on one rank, but where one of two ranks sees damage."""
    key = "parallel3d__checkpoint__resume"
    quick = {"zero_optimization.stage": 1, "train_micro_batch_size_per_gpu": BATCH // 2}
    config = changed(config, quick)
    names = ["one-rank-sees-damage", "step", "path", "restart", "fresh"]
    raws = {name: copied(half, config, name) for name in names if name != "path"}
    (folder_of(raws["restart"]) / "checkpoints/latest").write_text("step-99\n")
    (folder_of(raws["one-rank-sees-damage"]) / "checkpoints/latest").unlink()
    raws["step"] = named(raws["step"], "step", **{key: 1})
    raws["path"] = named(config, "path", **{key: str(half / "checkpoints/step-1")})
    raws["restart"] = named(raws["restart"], "restart", **{key: 1})
    for file in (folder_of(raws["fresh"]) / "checkpoints").glob("step-*/manifest.json"):
        flip(file)
    before = {path: path.stat().st_mtime_ns for path in half.rglob("*")}
    # What disturbs stays in the rank's process, so that comes last.
    disturbances = {name: () for name in ("step", "path", "fresh")}
    disturbances |= {"restart": (after_restart,)}
    runs = [(raws[name], *how) for name, how in disturbances.items()]
    results = dict(zip(disturbances, start_all(runs, ALONE), strict=True))
    damaged = raws["one-rank-sees-damage"]
    results["one-rank-sees-damage"] = start(damaged, HOME, see_damage, HALF)
    starts = {"one-rank-sees-damage": 1, "step": 1, "path": 1, "fresh": 0}
    starts |= {"restart": 2}  # the run's own newest is further than what was asked for
    for name, ranks in results.items():
        assert [ended.code for ended in ranks] == [DONE] * len(ranks), (name, ranks)
        first = starts[name]
        assert seen_by_all(ranks) == list(range(first * BATCH, STEPS * BATCH)), ranks[0].printed
        folder = (half if name == "path" else folder_of(raws[name])) / "checkpoints"
        resumptions = ranks[0].says(f"resume  from {folder}/step-{first}: step {first} of {STEPS}")
        assert resumptions == (first > 0), (name, ranks[0].printed)
        begin = 1 if name != "path" else 2
        assert [line["step"] for line in lines(raws[name])] == list(range(begin, STEPS + 1)), name
    rejected = results["one-rank-sees-damage"][0]
    assert rejected.says("resume  step-2 is rejected: ") == 1
    assert rejected.says("its contents do not match (seen by rank 1)") == 1
    for name in ("one-rank-sees-damage", "step"):
        assert steps_saved(raws[name]) == ["step-2", "step-2.rejected", "step-3"], name
        assert results[name][0].says("step-2.rejected") == 1, name
    assert results["fresh"][0].says("NOTHING TO RESUME") == 1
    assert results["fresh"][0].says("resume  step-") == 2
    assert "step-2.rejected" in steps_saved(raws["fresh"])
    assert before == {path: path.stat().st_mtime_ns for path in half.rglob("*")}
    # The journal of a run that went on has both launches and both ends.
    journal = (folder_of(raws["restart"]) / "events.jsonl").read_text().splitlines()
    told = [(event["event"], event["step"]) for event in map(json.loads, journal)]
    starts = [("launch", 0), ("first_step", 1)], [("launch", 2), ("first_step", 3)]
    assert told == [*starts[0], ("end", 2), *starts[1], ("end", 3)]
    first, _, end, *_ = map(json.loads, journal)
    assert (first["mesh"], first["device"], first["hardware"]) == ("1x2x1", "cpu", None)
    assert end["stopped"] and len(end["peak_memory_bytes"]) == 2


def test_impossible_resume_request_is_fatal(config, half):
    key = "parallel3d__checkpoint__resume"
    bad = folder_of(copied(half, config, "damaged")) / "checkpoints/step-2"
    flip(bad / "shard-00001-of-00002.safetensors")
    cases = [
        (copied(half, config, "f0", **{key: 3}), "/step-3 is rejected: "),
        (named(config, "damaged", **{key: 2}), "do not match the manifest"),
        (named(config, "f2", **{key: str(bad)}), "do not match the manifest"),
        (named(config, "f3", **{key: "/nowhere/step-4"}), "/nowhere/step-4"),
        (named(config, "f4", **{key: 4}), "checkpoint.resume = 4: a step needs"),
        (copied(half, config, "f5", **{key: "none"}), 'resume = "none"'),
    ]
    for (raw, expected), ranks in zip(
        cases, start_all([(raw,) for raw, *_ in cases], HOME), strict=True
    ):
        errors = {ended.error for ended in ranks}
        (error,) = errors  # the same words on all ranks
        assert not error.startswith("TrainingError") and expected in error, error
        assert not any(ended.samples for ended in ranks)
        assert not ranks[0].says("NOTHING TO RESUME"), raw["parallel3d"]["run"]


def test_request_to_stop_finished_run_does_not_stop_next_start(config, half):
    raw = copied(half, config, "done", parallel3d__train__steps=HALF)
    (folder_of(raw) / "STOP").touch()
    (ended,) = start(raw, ALONE)
    assert ended.code == DONE, ended
    assert not (folder_of(raw) / "STOP").exists()
