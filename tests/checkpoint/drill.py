"""Runs of launch/train.py that are killed and started again: a small model, real ranks, real text.

Each rank is a process of its own that runs the command's `main` to its exit code, forked from a
server that has torch loaded.
"""

import faulthandler
import json
import os
import random
import re
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load_file

from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.verify.local_ranks import run_locally

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "run", "far"]
LENGTH = 16
SOON = 20.0  # seconds: gloo hears of a dead peer at once, but these cores are shared
BLOCK = 16 * 2**10  # bytes of a write, so that a file takes several


@dataclass(frozen=True)
class Ended:
    """How a rank's process ended: its exit code, -9 if it was killed, and when."""

    code: int
    at: float  # time.monotonic
    log: str


def prepared_config(root, num_layers=2):
    """A config whose corpus is prepared: dropout, recomputation and clipping are all at work."""
    words = random.Random(0)
    for i in range(40):
        lines = [" ".join(words.choices(WORDS, k=12)) for _ in range(12)]
        (root / f"{i}.txt").write_text("\n".join(lines))
    sizes = {"hidden_size": 32, "num_hidden_layers": num_layers, "num_attention_heads": 4}
    dropout = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    block = {
        "model": {"family": "gpt", "max_position_embeddings": LENGTH, **dropout, **sizes},
        "data": {
            "source": "text",
            "paths": [f"{root}/*.txt"],
            "vocab_size": 280,
            "sequence_length": LENGTH,
            "held_out_fraction": 0.1,
            "cache": str(root / "cache"),
        },
        "pipeline": {"activation_checkpointing": "full"},
        "train": {
            "steps": 4,
            "evaluate_every": 0,
            "evaluate_samples": 8,
            "lr_schedule": {"type": "cosine", "warmup_steps": 2},
            "timeout_seconds": 60,
        },
        "checkpoint": {"every": 1, "keep": 2},
        "run": {"directory": str(root / "runs"), "save_weights": False},
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,  # below the norm of these steps, as `Run.check_whole` sees
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3},
        "parallel3d": block,
    }
    prepare(RunConfig.from_dict(config).data)
    return config


def changed(config, changes):
    """The config with some values replaced, given by their dotted paths."""
    config = json.loads(json.dumps(config))
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return config


class Run:
    """One run in a folder of its own, on `mesh` (pp, dp, tp), to be started as often as needed."""

    def __init__(self, config, name, mesh, **changes):
        pp, dp, tp = mesh
        self.num_ranks = pp * dp * tp
        self.name = name
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        name_and_mesh = {
            "parallel3d.run.name": name,
            "parallel3d.mesh.pp": pp,
            "parallel3d.mesh.tp": tp,
        }
        self.config = changed(config, name_and_mesh | changes)
        self.folder = Path(config["parallel3d"]["run"]["directory"], name)
        self.checkpoints = self.folder / "checkpoints"
        self.num_steps = self.config["parallel3d"]["train"]["steps"]

    def start(self, fault="", disturb=None, timeout=90, **changes):
        """Run the command once, after `disturb(rank)` in each rank's process; return the ends."""
        config = changed(self.config, {k.replace("__", "."): v for k, v in changes.items()})
        path = self.folder.with_suffix(".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config))
        args = str(path), fault, disturb, timeout
        return run_locally(_process, self.num_ranks, *args, timeout=timeout + 10)

    @property
    def lines(self):
        return list(map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines()))

    def complete_steps(self):
        """The steps whose folders have their final names, the newest last."""
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else []
        matches = [re.fullmatch(r"step-(\d+)", name) for name in names]
        return sorted(int(match[1]) for match in matches if match)

    def check_whole(self, tidy=True):
        """Check that each step was done once, with active clipping; if `tidy`, no leftovers."""
        assert [line["step"] for line in self.lines] == list(range(1, self.num_steps + 1))
        clipping = self.config["gradient_clipping"]
        assert all(line["grad_norm"] > clipping for line in self.lines), self.lines
        kept = [f"step-{step}" for step in self.complete_steps()]
        assert kept and kept[-1] == f"step-{self.num_steps}"
        if tidy:
            assert len(kept) <= 2
            assert sorted(os.listdir(self.checkpoints)) == sorted(["latest", *kept])
            assert (self.checkpoints / "latest").read_text() == f"{kept[-1]}\n"


def check_same(run, unbroken, tidy=True):
    """Check that a run has the metrics, weights and moments of one that was never killed."""
    run.check_whole(tidy)
    for line, other in zip(run.lines, unbroken.lines, strict=True):
        for key in ("loss", "grad_norm", "lr", "tokens", "held_out_loss"):
            assert line.get(key) == other.get(key), (line["step"], key, line, other)
    last = f"step-{run.num_steps}"
    ours = run.checkpoints / last
    theirs = unbroken.checkpoints / last
    files = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert files == sorted(path.name for path in ours.glob("*.safetensors")) != []
    for name in files:
        if (ours / name).read_bytes() != (theirs / name).read_bytes():
            raise AssertionError(f"{name}: {_differences(ours / name, theirs / name)}")
    states = [json.loads((folder / "state.json").read_text()) for folder in (ours, theirs)]
    for state in states:
        del state["config"]
    assert states[0] == states[1]


def check_died(ended, rank):
    """Check that a rank was killed, and that the others ended soon after, one with the reason.

    They are on one machine: the others have nothing to add.
    """
    assert ended[rank].code == -signal.SIGKILL, ended[rank]
    for other, end in enumerate(ended):
        if other != rank:
            assert end.code == 1, (other, end)
            assert end.at - ended[rank].at < SOON, (other, end)
            assert "Traceback" not in end.log and "NOT SAVED" not in end.log, end.log
            assert "another rank" not in end.log, end.log
    logs = "".join(end.log for other, end in enumerate(ended) if other != rank)
    assert logs.count(f"rank {rank} on {socket.gethostname()} died at ") == 1, logs


def check_resumed(ended, step):
    """Check that all ranks are done and began after `step`; 0 is a fresh start with a message."""
    assert [end.code for end in ended] == [0] * len(ended), [end.log for end in ended]
    resumed_from = re.findall(
        r"^resume  (?:from \S+: step (\d+)|NOTHING TO RESUME)", ended[0].log, re.M
    )
    assert resumed_from == [str(step) if step else ""], ended[0].log


def _differences(ours, theirs):
    one = load_file(ours)
    other = load_file(theirs)
    return [key for key in one if one[key].tobytes() != other[key].tobytes()][:5]


def _process(rank, config, fault, disturb, timeout):
    """One rank in a process whose connections end with it, as a real one's do; how it ended."""
    log = Path(config).with_suffix(f".{rank}.log")
    faulthandler.cancel_dump_traceback_later()  # a child cannot: the thread is not its own
    child = os.fork()
    if child == 0:
        try:
            _main(rank, log, config, fault, disturb, timeout)
        except BaseException:
            traceback.print_exc()  # an error of the drill itself: the command catches its own
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), time.monotonic(), log.read_text())


def unknown_peak(config, mesh):
    return "nothing", None


def no_self_test(settings, mesh, say):
    """Stand in for the self-test of DeepSpeed."""


def _main(rank, log, config, fault, disturb, timeout):
    import torch

    from launch.train import main
    from parallel3d.checkpoint import disk
    from parallel3d.engine import selftest
    from parallel3d.train import known_hardware

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.dump_traceback_later(timeout, exit=True, file=sys.stderr)
    os.environ.pop("PARALLEL3D_FAULT", None)
    if fault:
        os.environ["PARALLEL3D_FAULT"] = fault
    disk.BLOCK = BLOCK
    # What costs time and is tested elsewhere.
    known_hardware.peak = unknown_peak
    if not torch.cuda.is_available():  # tests/gpu has no other run of it
        selftest.self_test = no_self_test
    if disturb:
        disturb(rank)
    sys.argv = ["train.py", "--config", config]
    main()
