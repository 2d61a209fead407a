"""What a new user gets wrong, through launch/train.py: exit code 2 and one message, nothing left.

In one process but for one of each kind; hardware files and tables of published runs have tables of
their own (test_plan_bad.py, tests/published/test_bad_tables.py), and so have DeepSpeed's keys
(tests/config/test_config_bad.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import train

pytestmark = pytest.mark.gloo

TRAIN = Path(__file__).parents[2] / "launch/train.py"
BAD_INPUT = 2
P = "--parallel3d."
DATA = "--parallel3d.data."
MODEL = "--parallel3d.model."
NAME = f"{P}run.name"
DIRECTORY = f"{P}run.directory"
CACHE = f"{DATA}cache"
OPTIMIZER = "--zero_optimization.offload_optimizer."
NO_NAMES = ["..", ".", "a/b", "   ", "a\tb", "a\u200bb", "mine.lock", "x" * 300, "é" * 101]
SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
BIG = str(10**12)
HUGE = str(10**30)

# By kind: the words on the command line (and, for a launch, the environment), and the message.
CASES = {
    "name": [
        *((NAME, name, "must be a plain name") for name in NO_NAMES),
        (f"{NAME}=-rf", "must be a plain name"),
    ],
    "size": [
        (f"{MODEL}vocab_size", BIG, "parallel3d.model: its"),
        (f"{MODEL}vocab_size", HUGE, "parallel3d.model: its"),
        (f"{MODEL}hidden_size", "4000000", "parameters need at least"),
        (f"{MODEL}hidden_size", "0", "must be greater than 0; raise it"),
        (f"{MODEL}num_hidden_layers", str(10**9), "is above the limit of 2,000 layers"),
        (f"{MODEL}num_hidden_layers", "-1", "must be greater than 0; raise it"),
        (f"{MODEL}num_attention_heads", str(10**9), "does not divide hidden_size=128"),
        (f"{MODEL}hidden_size", "1e3", "must be an integer; write a whole number"),
        ("--train_micro_batch_size_per_gpu", BIG, "is above the limit of 10,000,000 samples"),
        ("--gradient_accumulation_steps", BIG, "is above the limit of 1,000,000 microbatches"),
        (f"{DATA}sequence_length", BIG, "is longer than the model's max_position_embeddings"),
        (f"{P}pipeline.stages_per_rank", BIG, "more than the 6 layers"),
        (f"{P}mesh.pp", BIG, "more than the 6 layers"),
        (f"{P}mesh.tp", str(10**9), "does not divide num_attention_heads=4"),
        (f"{P}mesh.dp", HUGE, "ranks, but there are 1 processes"),
        (f"{P}train.steps", "0", "must be greater than 0; raise it"),
        (f"{P}train.epochs", "-1", "must be greater than 0; raise it"),
        (f"{P}train.seed", str(2**70), "must be less than 9223372036854775808"),
    ],
    "path": [
        (DIRECTORY, "/proc/x", 'run.directory = "/proc/x": cannot be written'),
        (DIRECTORY, "a file", 'run.directory = "a file": cannot be written'),
        (DIRECTORY, "a file/below", 'run.directory = "a file/below": cannot be written'),
        (DIRECTORY, "", "run.directory"),
        (DIRECTORY, "a\0b", "U+0000"),
        (CACHE, "a\nb", "U+000A"),
        ("--config", "nope.json", "no config file 'nope.json'"),
        ("--config", ".", "is a folder"),
        ("--config", "empty", "empty"),
        ("--config", "cut", "cut"),
        ("--config", "binary", "binary"),
        (f"{MODEL}family", "../gpt", "is not a known model family"),
        (f"{P}pipeline.schedule", "../gpipe", "is not a schedule"),
        (f"{P}run.hardware", "../x", "is not described; use one of"),
        (f"{OPTIMIZER}device", "nvme", "requires nvme_path; add"),
        (f"{OPTIMIZER}nvme_path", "a\rb", "U+000D"),
    ],
    "combination": [
        ("--fp16.enabled true --bf16.enabled true", "disable one of them"),
        ("--zero_optimization.stage 1 --zero_optimization.offload_param.device cpu", "use stage 3"),
        (f"{P}train.max_tokens 10", "sets both"),
        (f"{P}checkpoint.resume 3", "a step needs an existing run"),
        (f"{MODEL}num_attention_heads 3", "does not divide hidden_size=128"),
        (f"{P}pipeline.schedule v_shape {P}pipeline.stages_per_rank 3", "use stages_per_rank = 2"),
        (f"{P}pipeline.schedule interleaved {P}mesh.pp 2", "use stages_per_rank = 2 or more"),
        (f"{DATA}source mixture", "mixture"),
        (f"{DATA}source text", "paths"),
        (f"{DATA}source hub", "name"),
        ("--train_batch_size 7", "use 4 or 8"),
        (f"{P}run.name nobody {P}checkpoint.resume none {P}mesh.pp 2", "processes"),
        (f"{DATA}sequence_length 4096", "use at most 128, or raise max_position_embeddings"),
        ("--dry-run x", "must be a whole number"),
    ],
    "launch": [
        ({"RANK": "abc", "WORLD_SIZE": "1"}, 'RANK = "abc"; it must be a whole number from 0 to 0'),
        ({"RANK": "0"}, "WORLD_SIZE is not set, but others are"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, 'WORLD_SIZE = "0"; it must be'),
        ({"RANK": "0", "WORLD_SIZE": "1.5"}, 'WORLD_SIZE = "1.5"; it must be'),
        ({"RANK": "1", "WORLD_SIZE": "1"}, 'RANK = "1"; it must be'),
        ({"RANK": "-1", "WORLD_SIZE": "1"}, 'RANK = "-1"; it must be'),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}, 'LOCAL_RANK = "1"'),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "none"}, 'LOCAL_RANK = "none"'),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}, 'LOCAL_WORLD_SIZE = "2"'),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "x"},
            'TORCHELASTIC_RESTART_COUNT = "x"',
        ),
        (SRUN, "MASTER_ADDR is not"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "all"}, 'SLURM_NTASKS = "all"'),
    ],
}


def flat(case):
    """The environment, the words on the command line, and the message."""
    if not isinstance(case[0], str):
        return case[0], [], case[-1]
    return {}, list(case[:-1]) if len(case) == 3 else case[0].split(), case[-1]


FLAT = [flat(case) for cases in CASES.values() for case in cases]
THROUGH_THE_COMMAND = {kind: flat(cases[5]) for kind, cases in CASES.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with files that are no configs; no launcher's variables."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").write_text("text")
    (tmp_path / "empty").touch()
    (tmp_path / "cut").write_text('{"train_batch_size": 4,')
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def check(code, out, err, what, folder):
    assert code == BAD_INPUT and out == "", err
    assert what in err, err
    assert "Traceback" not in err and len(err) < 700
    assert err.count("\n") == 1 or " problem" in err.splitlines()[0], err
    assert "; " in err or ", or " in err or ", " in err  # the remedy
    left = {path.name for path in folder.iterdir()}
    assert left == {"a file", "empty", "cut", "binary"}


class Ended(BaseException):
    pass


@pytest.mark.parametrize(("environment", "words", "what"), FLAT, ids=lambda x: str(x)[:60])
def test_beginner_mistake_gives_one_message(environment, words, what, folder, monkeypatch, capsys):
    def end(code):
        raise Ended(code)

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", end)
    first = [] if "--config" in words else ["--config", "ds.json"]
    monkeypatch.setattr(sys, "argv", ["train.py", *first, *words])
    try:
        train.main()
        code = None
    except (Ended, SystemExit) as ended:
        code = ended.args[0]
    check(code, *capsys.readouterr(), what, folder)


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "launch" else pytest.param(kind, marks=pytest.mark.slow) for kind in CASES],
)
def test_one_mistake_of_each_kind_through_the_command(folder, kind):
    environment, words, what = THROUGH_THE_COMMAND[kind]
    first = [] if "--config" in words else ["--config", "ds.json"]
    done = subprocess.run(
        [sys.executable, TRAIN, *first, *words],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    check(done.returncode, done.stdout, done.stderr, what, folder)


def test_list_of_mistakes_is_long_enough():
    assert all(len(cases) >= 10 for cases in CASES.values())
