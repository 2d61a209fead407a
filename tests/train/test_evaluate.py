"""A checkpoint evaluated by itself: the numbers that its run logged, and those of transformers."""

import io
import json
import re
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest

import launch.evaluate
from launch.evaluate import SHOWN
from parallel3d.base.errors import Parallel3DError
from parallel3d.checkpoint.describe import find_checkpoints
from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.mesh.launch import Launch
from parallel3d.train.ending import DONE, STOPPED, StopRequest
from parallel3d.train.evaluate_checkpoint import evaluation_config
from parallel3d.verify.local_ranks import run_locally
from tests.train.held_out import held_out_loss
from tests.train.running import folder_of, train_on_rank
from tests.train.test_trainer import LENGTH, on_mesh, raw  # noqa: F401

pytestmark = pytest.mark.gloo

SAMPLES = 21  # no multiple of a batch


class StoppedAtOnce(StopRequest):
    """A request to stop that is there from the beginning."""

    def flags(self):
        """Return the flags of a rank that was asked to stop."""
        return [1.0, 0.0]


def evaluate_on_rank(rank, calls, stops=False):
    """What launch/evaluate.py comes to for each command line: its code and output, or its error.

    Where it `stops`, rank 1 is asked to at its first batch.
    """
    results = []
    for words in calls:
        printed = io.StringIO()
        stop = StoppedAtOnce() if stops and rank == 1 else StopRequest()
        try:
            with redirect_stdout(printed), patch("sys.argv", ["evaluate.py", *map(str, words)]):
                args, overrides = launch.evaluate.parse_args()
                code = launch.evaluate.evaluate(args, overrides, Launch.from_environment(), stop)
            results.append((code, printed.getvalue()))
        except Parallel3DError as error:
            results.append((type(error).__name__, str(error)))
    return results


def evaluated(ranks, *calls):
    """What rank 0 says of each; the other ranks come to the same and print nothing."""
    first, *others = run_locally(evaluate_on_rank, ranks, calls)
    for results in others:
        for (code, printed), (their_code, their_printed) in zip(first, results, strict=True):
            assert code == their_code and their_printed == ("" if code == DONE else printed)
    return first


def trained(raw, *mesh, **settings):  # noqa: F811
    """The folder of a run of two steps on a mesh, and its last line."""
    config = on_mesh(raw, *mesh, steps=2, evaluate_every=0, evaluate_samples=SAMPLES) | settings
    for ended in run_locally(train_on_rank, mesh[0] * mesh[1] * mesh[2], config):
        assert ended.code == DONE, ended.error
    folder = folder_of(config)
    return folder, json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def sets_of(line):
    """What the run logged of each set, by the names that the command prints; its perplexity not."""
    names = [name for name in SHOWN if name != "perplexity"]
    return {s: {name: logged[name] for name in names} for s, logged in line["validation"].items()}


def sets_in(result):
    """The same of what the command printed."""
    (code, text) = result
    printed = json.loads(result[1])
    assert code == DONE and list(printed) == ["sets"], text
    for numbers in printed["sets"].values():
        assert list(numbers) == list(SHOWN)
        del numbers["perplexity"]
    return printed["sets"]


@pytest.fixture(scope="module")
def alone(raw):  # noqa: F811
    """A run of one process."""
    return trained(raw, 1, 1, 1)


def test_one_process_gives_the_numbers_of_its_run_to_the_bit(raw, alone):  # noqa: F811
    folder, line = alone
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    more = json.dumps({"more": {"source": "text", "paths": raw["parallel3d"]["data"]["paths"]}})
    (step,) = find_checkpoints(folder)
    own, by_step, others, words, nothing, meaning = evaluated(
        1,
        (folder, "--json"),
        (step, "--json", "--samples", "all", "--data.validation", "{}"),
        (folder, "--json", "--samples", 5, "--data.validation", more),
        (folder,),
        (folder, "--data.held_out_fraction", 0, "--data.validation", "{}"),
        (folder, "--data.vocab_size", 270),
    )
    assert sets_in(own) == sets_of(line) and list(sets_in(own)) == ["held_out", "web"]
    corpus = prepare(RunConfig.from_dict(raw).data)
    whole = sets_in(by_step)
    held_out = len(corpus.held_out) - 1
    assert list(whole) == ["held_out"]
    assert whole["held_out"]["tokens"] == held_out // LENGTH * LENGTH > SAMPLES * LENGTH
    mean, error = held_out_loss(folder, corpus, held_out // LENGTH, LENGTH)
    assert whole["held_out"]["loss"] == pytest.approx(mean, rel=1e-5)
    assert whole["held_out"]["standard_error"] == pytest.approx(error, rel=1e-4)
    assert [sets_in(others)[name]["tokens"] for name in ("held_out", "more")] == [5 * LENGTH] * 2
    assert words[0] == DONE and words[1].startswith(f"held_out  {line['held_out_loss']:.4f} ± ")
    assert nothing[0] == "ConfigError" and nothing[1].startswith("there is nothing to evaluate: ")
    assert meaning == (
        "CheckpointError",
        f"{step} was trained with another tokenizer, so its token ids mean something else; add "
        f"--data.tokenizer {step / 'tokenizer'}",
    )
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.fixture(scope="module")
def pair(raw):  # noqa: F811
    """A run of two processes, with ZeRO-3, in bf16."""
    return trained(raw, 1, 2, 1, bf16={"enabled": True})


@pytest.mark.slow  # sums over ranks: test_evaluation.py; the command's own: the test above
def test_two_ranks_give_the_numbers_of_their_run_to_the_bit(pair):
    folder, line = pair
    (result,) = evaluated(2, (folder, "--json"))
    assert sets_in(result) == sets_of(line)


@pytest.mark.slow
def test_request_to_stop_ends_all_ranks(pair):
    results = run_locally(evaluate_on_rank, 2, [(pair[0],)], True)
    assert results == [[(STOPPED, "")]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_other_meshes_differ_by_the_order_of_sums(pair, ranks):
    """One after the other in the same processes."""
    folder, line = pair
    meshes = [()] if ranks == 1 else [("--mesh.pp", 2), ("--mesh.tp", 2), ("--mesh.pp", 2)]
    results = evaluated(ranks, *((folder, "--json", *words) for words in meshes))
    for words, result in zip(meshes, results, strict=True):
        # Products that tensor parallelism cuts are summed in bf16.
        error = 1e-2 if "--mesh.tp" in words else 1e-12
        for name, numbers in sets_in(result).items():
            assert numbers == pytest.approx(sets_of(line)[name], rel=error)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{run}/none", "/none: no checkpoint there; name a folder step-N, or a run's folder"),
        ("{run}/weights", "/weights: no checkpoint there; name a folder step-N"),
        ("{run} --model.num_attention_heads 2", "num_attention_heads = 2: {step} was trained with"),
        ("{run} --config nowhere.json", "no config file 'nowhere.json'"),
        ("{run} --mesh.tp 3", "tp"),
        ("{run} --data.nothing 3", "parallel3d.data.nothing"),
        ("{run} --data.tokenizer none", "tokenizer"),
        ("{run} --train.evaluate_samples 0", "evaluate_samples"),
    ],
)
def test_wrong_input_is_refused(alone, words, message):
    """Before the ranks meet."""
    (step,) = find_checkpoints(alone[0])
    given = words.format(run=alone[0]).split()
    with (
        patch("sys.argv", ["evaluate.py", *given]),
        pytest.raises(Parallel3DError, match=re.escape(message.format(step=step))),
    ):
        launch.evaluate.evaluate(*launch.evaluate.parse_args(), Launch(0, 1, 0), StopRequest())


def test_mesh_fits_one_process_and_other_ranks(alone, tmp_path):
    """A run's own config goes on any ranks; a file's as it says, but for one process."""
    (step,) = find_checkpoints(alone[0])
    sizes = {}
    for world_size in (1, 4):
        config = evaluation_config(step, Launch(0, world_size, 0)).resolve(world_size)
        sizes[world_size] = config.mesh.pp, config.mesh.dp, config.mesh.tp
    assert sizes == {1: (1, 1, 1), 4: (1, 4, 1)}
    raw = json.loads((alone[0] / "config.json").read_text())  # noqa: F811
    raw["parallel3d"]["mesh"] = {"pp": 2, "dp": 2, "tp": 2}
    raw["parallel3d"]["pipeline"] |= {"schedule": "interleaved", "stages_per_rank": 2}
    raw["train_batch_size"] = "auto"
    (tmp_path / "ds.json").write_text(json.dumps(raw))
    config = evaluation_config(step, Launch(0, 1, 0), file=str(tmp_path / "ds.json")).resolve(1)
    assert (config.mesh.pp, config.mesh.dp, config.mesh.tp) == (1, 1, 1)
    config = evaluation_config(step, Launch(0, 8, 0), file=str(tmp_path / "ds.json")).resolve(8)
    assert config.pipeline.schedule == "interleaved" and config.mesh.tp == 2
