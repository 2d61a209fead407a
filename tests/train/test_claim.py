"""Which folder a launch writes to: the name's, the unfinished run's of its config, or a new one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.base.lock import Lock
from parallel3d.config import RunConfig
from parallel3d.config.digest import digest_of
from parallel3d.mesh.launch import Launch
from parallel3d.train import claim as claims
from parallel3d.train.claim import Attempts

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
ALONE = Launch(0, 1, 0)
NAME = "gpt-h128-l4-1x1x1"


CLAIMED = []


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "runs"
    while CLAIMED:
        CLAIMED.pop().lock.release()


def read(*overrides):
    return RunConfig.from_json(str(ROOT / "configs/ds.json"), list(map(str, overrides)))


def claim(*overrides, launch=ALONE):
    asked = read(*overrides)
    claimed = claims.claim(asked, asked.resolve(launch.world_size), launch, print)
    CLAIMED.append(claimed)
    return claimed


def leave(claimed, *overrides, **end):
    """What a launch leaves behind that came so far: dead, or ended in one of two ways."""
    claimed.folder.mkdir(exist_ok=True)
    attempts = Attempts(claimed.folder, read(*overrides).to_dict(), claimed.config)
    attempts.begin(3)
    if end:
        attempts.end(**end)
    claimed.lock.release()


@pytest.mark.parametrize("end", [{}, {"stopped": True}])
def test_same_command_resumes_newest_unfinished_run(place, end):
    first = claim()
    assert first.folder == Path("runs") / NAME and first.lock.path.exists()
    leave(first, **end)
    second = claim("--parallel3d.checkpoint.resume", "none")  # starts afresh
    assert second.folder.name == f"{NAME}-2"
    leave(second, **end)
    again = claim()
    assert again.folder == second.folder
    leave(again, stopped=False)
    assert claim().folder == first.folder  # the newest that has not come to its end


def test_finished_run_and_another_config_start_new_run(place):
    leave(claim(), stopped=False)
    another = claim()
    assert another.folder.name == f"{NAME}-2"
    leave(another)
    other = claim("--optimizer.params.lr", 1e-4)
    assert other.folder.name == f"{NAME}-3"
    other.lock.release()


SAME = [
    ("--parallel3d.run.directory", "elsewhere"), ("--parallel3d.train.stop_after", 3),
    ("--parallel3d.checkpoint.every", 7), ("--parallel3d.data.cache", "/scratch"),
    ("--steps_per_print", 3), ("--parallel3d.train.timeout_seconds", 9),
    ("--parallel3d.data.workers", 2), ("--parallel3d.data.read_ahead", 0),
    ("--parallel3d.pipeline.weights", "per_step"),
]  # fmt: skip
OTHER = [
    ("--optimizer.params.lr", 1e-4), ("--parallel3d.train.seed", 1), ("--parallel3d.mesh.pp", 2),
    ("--parallel3d.train.steps", 7000), ("--parallel3d.data.source", "text"),
    ("--zero_optimization.stage", 1, "--zero_optimization.offload_optimizer.device", "none"),
]  # fmt: skip


@pytest.mark.parametrize("overrides", [*SAME, *OTHER])
def test_digest_depends_only_on_trained_settings(overrides):
    more = ("--parallel3d.data.paths", '["a"]') if "text" in overrides else ()
    assert (digest_of(read(*overrides, *more)) == digest_of(read())) == (overrides in SAME)


def test_more_processes_go_on_with_the_same_run(place):
    leave(claim())
    four = claim(launch=Launch(0, 4, 0, 4))
    assert four.folder.name == NAME
    four.lock.release()


def test_restart_resumes_run_of_first_attempt(place):
    leave(claim(launch=Launch(0, 4, 0, 4)))  # the name says four processes
    first = claim()
    leave(first)
    for _ in range(2):
        again = claim(launch=Launch(0, 1, 0, restart_count=1))
        assert again.folder == first.folder
        leave(again, stopped=True)


def test_living_launch_keeps_its_run(place):
    held = claim()  # it has no folder yet: its corpus may take an hour
    for name in ((), ("--parallel3d.run.name", NAME)):
        with pytest.raises(ConfigError, match=rf"runs/{NAME} is being trained by process \d+ on"):
            claim(*name)
    with pytest.raises(
        ConfigError, match=r"second run of the same config add --parallel3d.run.name"
    ):
        claim()
    others = [
        claim("--optimizer.params.lr", 1e-4),
        claim("--parallel3d.checkpoint.resume", "none"),
        claim("--parallel3d.run.name", "mine"),
    ]
    assert [other.folder.name for other in others] == [f"{NAME}-2", f"{NAME}-3", "mine"]
    for one in [*others, held]:
        one.lock.release()
    assert not list(place.iterdir())  # nothing was trained, so nothing is left


def test_living_run_is_not_resumed(place):
    leave(claim())
    held = claim()
    with pytest.raises(ConfigError, match="is being trained by"):
        claim()
    held.lock.release()


def test_unwritable_run_directory_is_refused(place):
    place.write_text("a file")
    with pytest.raises(ConfigError, match=r'run.directory = "runs": cannot be written \(.*\); use'):
        claim()


def test_unwritable_run_folder_is_named_and_leaves_no_lock(place):
    place.mkdir()
    (place / "mine").write_text("a file")
    with pytest.raises(ConfigError, match=r"^the run's folder runs/mine cannot be written \(Not a"):
        claim("--parallel3d.run.name", "mine")
    assert [path.name for path in place.iterdir()] == ["mine"]


def test_second_launch_is_refused_before_torch_import(place):
    """In less time than torch takes to import, with exit code 2 and one line."""
    place.mkdir()
    held = Lock(place / "mine.lock")
    held.take()
    code = (
        "import runpy, sys, os\n"
        "def ended(code):\n print(code, 'torch' in sys.modules, flush=True); real(code)\n"
        "real, os._exit = os._exit, ended\n"
        f"sys.argv = ['train.py', '--config', 'ds.json', '--parallel3d.run.name', 'mine']\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"runpy.run_path({str(ROOT / 'launch/train.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "2 False\n", done.stderr
    assert done.stderr.count("\n") == 1 and "is being trained by process" in done.stderr
    held.release()


def test_record_without_config_starts_new_run(place):
    claimed = claim()
    leave(claimed)
    path = claimed.folder / "attempts.json"
    record = json.loads(path.read_text())
    del record["config"]
    path.write_text(json.dumps(record))
    again = claim()
    assert again.folder.name == f"{NAME}-2"
    again.lock.release()


def test_resume_from_step_of_missing_run_is_refused(place):
    with pytest.raises(ConfigError, match=r"checkpoint.resume = 3: a step needs an exist"):
        claim("--parallel3d.checkpoint.resume", 3)
    assert not place.exists()


def test_planned_mesh_is_first_row_of_planner():
    """Every rank comes to the planner's first row; the config is the same for any number."""
    words = (
        "--parallel3d.mesh",
        '"plan"',
        "--parallel3d.run.hardware",
        "A100-SXM4-80GB",
        "--train_batch_size",
        32,
        "--train_micro_batch_size_per_gpu",
        "null",
        "--gradient_accumulation_steps",
        "null",
        "--bf16.enabled",
        "true",
    )
    asked = read(*words)
    for ranks in (1, 2, 4):
        config = claims.resolve_config(asked, Launch(0, ranks, 0, ranks))
        assert config.mesh.pp * config.mesh.dp * config.mesh.tp == ranks
        assert config.global_batch_size == 32
        assert any(f'mesh: "plan" for {ranks} x A100-SXM4-80GB' in note for note in config.notes)


IMPOSSIBLE = [
    ("--parallel3d.model.vocab_size", 10**12, r"model: its [\d,]+ parameters need at least"),
    ("--parallel3d.model.hidden_size", 4 * 10**6, r"model: its [\d,]+ parameters need at least"),
    ("--parallel3d.model.num_hidden_layers", 10**9, "num_hidden_layers = 1000000000: "),
    ("--train_micro_batch_size_per_gpu", 10**12, "micro_batch_size_per_gpu = 1000000000000: "),
]


@pytest.mark.parametrize(("flag", "size", "words"), IMPOSSIBLE)
def test_sizes_that_cannot_be_are_refused_before_there_is_a_folder(place, flag, size, words):
    with pytest.raises(ConfigError, match=rf"{words}.*; use"):
        claims.resolve_config(read(flag, size), ALONE)
    assert not place.exists()


def test_machine_too_small_is_refused_before_corpus_and_model(monkeypatch):
    from parallel3d.mesh.mesh import Mesh
    from parallel3d.mesh.nodes import find_nodes
    from parallel3d.train.machines import check_machine

    mesh = Mesh()
    nodes = find_nodes(mesh)
    try:
        check_machine(read().resolve(1), mesh, nodes, print)
        large = read("--parallel3d.model.hidden_size", 2**16).resolve(1)
        with pytest.raises(ConfigError, match=r"parameters need at least .* at most"):
            check_machine(large, mesh, nodes, print)
        offload = ("--zero_optimization.offload_optimizer.nvme_path", "/nowhere")
        device = ("--zero_optimization.offload_optimizer.device", "nvme")
        with pytest.raises(
            ConfigError, match=r'offload_optimizer.nvme_path = "/nowhere": rank 0 cannot write'
        ):
            check_machine(read(*offload, *device).resolve(1), mesh, nodes, print)
    finally:
        mesh.close()


@pytest.mark.parametrize("launch", [Launch(0, 1, 0, restarts_left=1), Launch(0, 1, 0, 1, 1)])
def test_restart_without_run_name_is_refused(launch):
    """It would begin a new one at step 0, without a word."""
    named = ("--parallel3d.run.name", "mine")
    for resume in ("none", 3, "runs/other/checkpoints/step-4"):
        with pytest.raises(ConfigError, match="torchrun starts a run again"):
            claims.check_restarts(read(RESUME, resume), launch)
        claims.check_restarts(read(RESUME, resume, *named), launch)


ELASTIC = Launch(0, 2, 0, 2, is_elastic=True, has_agents=True)
KEPT = ("--train_batch_size", 16, "--train_micro_batch_size_per_gpu", 2)
RESUME = "--parallel3d.checkpoint.resume"


def elastic(*overrides):
    asked = read("--gradient_accumulation_steps", "null", *KEPT, *overrides)
    claims.check_restarts(asked, ELASTIC)
    return claims.resolve_config(asked, ELASTIC)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((RESUME, "none"), r'resume = "none": torchrun starts a run again'),
        ((RESUME, 3, "--parallel3d.run.name", "mine"), "resume = 3: torchrun"),
        ((RESUME, "runs/other/checkpoints/step-4"), r"use \"auto\", or the path of a checkpoint "),
        (("--train_batch_size", "null"), "train_batch_size = null: torchrun --nnodes MIN:MAX chan"),
        (("--gradient_accumulation_steps", 4), "train_batch_size = 16: .* the batch must stay"),
    ],
)
def test_elastic_launch_that_could_not_resume_is_refused(monkeypatch, overrides, says):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ConfigError, match=says):
        elastic(*overrides)
    asked = read("--gradient_accumulation_steps", "null", *KEPT, *overrides)
    claims.check_restarts(asked, Launch(0, 2, 0, 2))  # any other launch may


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (RESUME, "runs/other/checkpoints/step-4", "--parallel3d.run.name", "mine"),
        ("--parallel3d.mesh.dp", 4, "--parallel3d.mesh.fallbacks", '["1x2x1"]'),
    ],
)
def test_elastic_launch_keeps_its_batch(monkeypatch, overrides):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    config = elastic(*overrides)
    assert (str(config.mesh.sizes), config.global_batch_size) == ("1x2x1", 16)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ConfigError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each host"):
        elastic(*overrides)


def test_run_stopped_on_one_host_is_resumed_on_another(place):
    """Rank 0 may be on a host that has not restarted anything."""
    first = claim(launch=Launch(0, 1, 0, restart_count=1, is_elastic=True, has_agents=True))
    leave(first, stopped=True)
    assert claim(launch=ELASTIC).folder == first.folder


def test_hardware_without_a_file_is_refused_before_the_ranks_meet():
    config = RunConfig.from_json("ds.json", ["--run.hardware", "nowhere/mine.json"])
    with pytest.raises(ConfigError, match=r"nowhere/mine.json.* is not a file"):
        claims.resolve_config(config, Launch(rank=0, local_rank=0, world_size=1))
