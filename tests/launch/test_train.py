"""launch/train.py through the real launchers: what users type, and what scripts rely on.

Each launch costs seconds to half a minute of imports, so there are few, and each shows much.
"""

import ctypes
import fcntl
import json
import os
import pty
import re
import resource
import struct
import termios
from functools import partial

import pytest

from parallel3d.checkpoint.manifest import verify
from tests.launch.launching import (
    PYTHON,
    Place,
    deepspeed,
    interrupt,
    print_into,
    wait_until_gone,
)

pytestmark = pytest.mark.drill

DONE = 0
FAILED = 1
BAD_INPUT = 2
STOPPED = 3
CAP_IPC_LOCK = 14
OUR_TRACEBACK = re.compile(r'File ".*/(launch/train|parallel3d/.*)\.py", line')


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("launch"))


# A small model, short rows, few of them held out: what a launch proves does not depend on them.
SMALL = (
    "--parallel3d.data.sequence_length",
    32,
    "--parallel3d.train.evaluate_samples",
    8,
    "--parallel3d.model.hidden_size",
    32,
    "--parallel3d.model.num_hidden_layers",
    2,
)
ALONE = ("--json", "--train_micro_batch_size_per_gpu", 8, *SMALL)
STEPS = 2


@pytest.fixture(scope="module")
def alone(place):
    """The exit code and both outputs of one process with the global batch of the 2x2x2 mesh."""
    out = place.root / "alone.out"
    name = ("--parallel3d.run.name", "alone")
    code, log = place.ended(*ALONE, *name, steps=STEPS, disturb=partial(print_into, out))
    return code, out.read_text(), log


def check_alone(place, name, code, printed, log):
    assert code == DONE, log
    result = json.loads(printed)  # and nothing else on standard output
    assert result["steps"] == STEPS and result["stopped"] is False
    lines = place.lines(name)
    assert [line["step"] for line in lines] == [1, 2]
    assert result["loss"] == lines[-1]["loss"]
    assert result["held_out_loss"] == lines[-1]["held_out_loss"]
    assert len(result["peak_memory_bytes"]) == 1
    for file, path in result["files"].items():
        assert (place.root / path).exists(), file
    # Everything else is on standard error: ours alone, and no library's warnings.
    for text in ("mesh pp 1", "corpus  40 documents", "step 2/2", "held-out loss", "tokens/s"):
        assert text in log
    assert not re.search("warn|deprecat", log, re.IGNORECASE), log
    config = json.loads((place.root / "runs" / name / "config.json").read_text())
    mesh = config["parallel3d"]["mesh"]
    assert {axis: mesh[axis] for axis in ("pp", "dp", "tp")} == {"pp": 1, "dp": 1, "tp": 1}
    assert config["train_batch_size"] == 32
    assert (
        config["parallel3d"]["pipeline"]["weights"] == "per_step"
    )  # it fits into the free host memory


def test_one_process_prints_one_json_object(place, alone):
    check_alone(place, "alone", *alone)


@pytest.mark.slow  # the README's command below has all imports in its outputs, too
def test_plain_python_prints_one_json_object(place):
    name = ("--parallel3d.run.name", "plain")
    done = place.run(PYTHON, *ALONE, *name, steps=STEPS)
    check_alone(place, "plain", done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("dp", "tp"), [(1, 1), *(pytest.param(dp, 2, marks=pytest.mark.slow) for dp in (1, 2))]
)
def test_readme_command_trains_the_mesh(place, alone, dp, tp):
    """The main command of the README, at a few steps: the losses of one process.

    The hardware is described, so ZeRO-3's weights are gathered once a step.
    """
    mesh = ("--parallel3d.mesh.pp", 2, "--parallel3d.mesh.tp", tp)
    hardware = ("--parallel3d.run.hardware", "H100-SXM5-80GB")
    batch = ("--train_micro_batch_size_per_gpu", 8 // dp)
    command = deepspeed(2 * dp * tp)
    done = place.run(command, *mesh, *batch, *hardware, *SMALL, "--json", steps=STEPS)
    assert done.returncode == DONE, done.stderr[-4000:]
    run = place.root / f"runs/gpt-h32-l2-2x{dp}x{tp}"
    config = json.loads((run / "config.json").read_text())
    assert config["parallel3d"]["pipeline"]["weights"] == "per_step"
    files = {"attempts.json", "checkpoints", "config.json", "corpus.json"}
    files |= {"events.jsonl", "metrics.jsonl", "tokenizer", "weights"}
    assert {path.name for path in run.iterdir()} == files
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= {
        path.name for path in (run / "weights").iterdir()
    }
    for one, other in zip(place.lines("alone"), place.lines(run.name), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    assert other["held_out_loss"] == pytest.approx(one["held_out_loss"], rel=1e-4)
    # A fact that every rank knows is printed once.
    for text in (
        "[0]  → [1]" if tp == 1 else f"[0 1] → [{2 * dp} {2 * dp + 1}]",
        "corpus  40 documents",
        "step 2/2",
        "training loss",
    ):
        assert done.stderr.count(text) == 1, text
    assert not re.search("warn|deprecat", done.stderr, re.IGNORECASE), done.stderr
    # Beside the launcher's own lines, which have the time in front, there is the object alone.
    ours = [line for line in done.stdout.splitlines() if line and not line.startswith("[20")]
    assert len(ours) == 1, ours
    assert json.loads(ours[0])["loss"] == other["loss"]


@pytest.mark.slow
def test_deepspeed_alone_trains_one_process(place):
    name = ("--parallel3d.run.name", "deepspeed-alone")
    done = place.run(deepspeed(), *name, "--parallel3d.run.save_weights", "false", steps=1)
    assert done.returncode == DONE, done.stderr[-4000:]
    assert len(place.lines("deepspeed-alone")) == 1
    assert "mesh pp 1 × dp 1 × tp 1 = 1 rank" in done.stderr


@pytest.mark.slow  # tests/launch/test_first_day.py has a hundred on one process
def test_bad_config_is_refused_once(tmp_path):
    place = Place(tmp_path)
    wrong = ("--parallel3d.mesh.tp", 3, "--gradient_cliping", 1.0)
    done = place.run(deepspeed(2), *wrong)
    assert done.returncode == BAD_INPUT, done.stderr[-4000:]
    output = done.stdout + done.stderr
    assert output.count("2 problems in") == 1
    assert output.count("gradient_clipping") == 1 and output.count("num_attention_heads=4") == 1
    assert "Traceback" not in output
    assert {path.name for path in tmp_path.iterdir()} == {"texts"}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bad_corpus_is_refused_once_and_leaves_no_files(tmp_path, ranks):
    place = Place(tmp_path)
    (tmp_path / "texts/7.txt").write_bytes(b"good until \xff")
    if ranks == 1:
        code, output = place.ended()
    else:
        done = place.run(deepspeed(ranks))
        code = done.returncode
        output = done.stdout + done.stderr
    assert code == BAD_INPUT, output[-4000:]
    assert output.count("7.txt is not UTF-8: byte 0xff at offset 11") == 1
    assert "Traceback" not in output
    assert [path for path in tmp_path.rglob("*") if path.parent.name != "texts"] == [
        tmp_path / "texts"
    ]


@pytest.mark.slow  # tests/checkpoint/test_save_failures.py does it without the command
def test_three_failed_saves_end_all_ranks_with_one_message(place, alone):
    """No file may be larger than 1 MB; the corpus was prepared before. No rank has a traceback."""
    limited = ["bash", "-c", 'ulimit -f 1000; exec "$@"', "bash", *deepspeed(2)]
    done = place.run(
        limited,
        "--parallel3d.checkpoint.every",
        1,
        "--parallel3d.run.name",
        "limited",
        "--parallel3d.run.trackers",
        '["csv", "tensorboard"]',
        steps=20,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == FAILED, printed
    assert printed.count("3 checkpoints in a row could not be saved; all ranks stop") == 1
    assert printed.count("File too large") == 4 and "Traceback" not in printed, printed


@pytest.mark.slow  # one process in a terminal, and the end of the deepspeed command, are not
def test_ctrl_c_ends_all_ranks_cleanly(place):
    with place.started(deepspeed(2), "--parallel3d.run.name", "stopped") as (process, log):
        place.wait_for_lines("stopped", 2, process)
        interrupt(process)
        wait_until_gone(process.pid, seconds=30)
        output = log.read_text()
        lines = place.lines("stopped")
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        assert f"stopped on request after step {len(lines)}" in output
        newest = place.root / f"runs/stopped/checkpoints/step-{len(lines)}"
        assert verify(newest) == []
        # The launcher's own traceback is not ours to prevent.
        assert not OUR_TRACEBACK.search(output), output


def test_terminal_shows_a_bar_and_accepts_ctrl_c(place):
    """On a terminal of 100 columns, with a key press for Ctrl-C."""
    keyboard, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

    process = place.forked(
        place.root / "log.txt",
        "--parallel3d.run.name",
        "terminal",
        steps=400,
        variables={"TERM": "xterm"},
        disturb=partial(take_terminal, os.ttyname(screen)),
    )
    seen = read_until(keyboard, r" \d+/400.* loss \d")
    os.close(screen)
    os.write(keyboard, b"\x03")
    seen += read_until(keyboard, None)
    process.join(30)
    assert process.exitcode == STOPPED, seen
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert re.search(r"step +\d+/400 ━+ loss \d\.\d{4}  [\d,]+ tokens/s  MFU", text)
    assert "\x1b[?25h" in seen.rpartition("\x1b[?25l")[2]  # the cursor is back
    assert "stopped on request after step" in text and "training loss" in text
    assert "Traceback" not in text
    # Nothing is wider than the screen, except that a path or a command is never cut.
    assert re.search(r"\btokenizer +runs/terminal/tokenizer\b", text), text
    wide = [line for line in re.split(r"[\r\n]+", text) if len(line) > 100]
    assert all(re.match("tokenizer |  +python ", line) for line in wide), wide


def take_terminal(name):
    """Make it the controlling terminal of this session, and its three streams."""
    screen = os.open(name, os.O_RDWR)
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)
    for stream in range(3):
        os.dup2(screen, stream)
    os.close(screen)


def read_until(terminal, pattern):
    """What the terminal shows, until the pattern is in it, or (None) until it is closed."""
    seen = ""
    while pattern is None or not re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)):
        try:
            seen += os.read(terminal, 2**16).decode(errors="replace")
        except OSError:  # the other side is closed
            assert pattern is None, seen
            break
    return seen


def limit_locked_memory():
    """As for an ordinary user; root may lock without limit."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**16, 2**16))
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the upper halves follow
    assert libc.capget(header, sets) == 0
    for place in range(3):
        sets[place] &= ~(1 << CAP_IPC_LOCK)
    assert libc.capset(header, sets) == 0, ctypes.get_errno()


@pytest.mark.usefixtures("async_io")
def test_nvme_offload_names_the_limit_on_locked_memory(place):
    """Where a buffer cannot be locked DeepSpeed itself would abort."""
    (place.root / "nvme").mkdir()
    code, output = place.ended(
        "--zero_optimization.offload_optimizer.device",
        "nvme",
        "--zero_optimization.offload_optimizer.nvme_path",
        place.root / "nvme",
        "--parallel3d.run.name",
        "locked",
        disturb=limit_locked_memory,
    )
    assert code == BAD_INPUT, output
    assert "the limit is 0.1 MiB" in output and "ulimit -l" in output
    assert "Traceback" not in output
    assert not list((place.root / "nvme").iterdir())
