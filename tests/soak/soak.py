"""One run whose mesh changes, struck by seeded faults; compared with the same run without any.

Every launch has one fault at a step of its own, and recovers from the one before. After the last,
the steps are trained again without faults, each on the mesh that it had: the weights must have the
same bits. On one mesh throughout they must be the same but for rounding.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from tests.checkpoint.drill import Run, changed, prepared_config
from tests.launch.launching import TRAIN, environment, session
from tests.launch.launching import torchrun as torchrun_command
from tests.soak.faults import DAMAGED, DIES, FAULTS, GOES_ON, KINDS, LAYOUTS, NOT_INJECTED

BLOCK = 4  # steps from fault to fault
STOPPED = 3
TOLERANCE = 1e-5  # of weights where the mesh changed
WARMUP = 4


def soak_config(root):
    """A small model of three layers without dropout, whose masks would depend on the mesh."""
    root.mkdir(parents=True, exist_ok=True)
    stored = root / "config.json"
    if stored.exists():
        return json.loads(stored.read_text())
    config = prepared_config(root)
    changes = {f"parallel3d.model.{n}_pdrop": 0.0 for n in ("embd", "resid", "attn")}
    changes |= {"train_batch_size": 12, "optimizer.params.lr": 1e-4}
    changes |= {"parallel3d.checkpoint.every": 2, "parallel3d.checkpoint.keep": 3}
    changes |= {"parallel3d.checkpoint.asynchronous": False}
    changes |= {"parallel3d.train.check_bits": {"every": 1}, "parallel3d.train.digest_every": 4}
    config = changed(config, changes)
    del config["gradient_accumulation_steps"]
    stored.write_text(json.dumps(config))
    return config


def drawn(number, seed):
    """The faults of a soak, in order: all types alike often, and the layout of each start."""
    draw, order = random.Random(seed), []
    by_kind = {kind: [f for f in FAULTS if f.kind == kind] for kind in KINDS}
    for queue in by_kind.values():
        draw.shuffle(queue)
    while len(order) < number:
        kinds = draw.sample(KINDS, len(KINDS))
        for kind in kinds:
            by_kind[kind].append(by_kind[kind].pop(0))
            order.append(by_kind[kind][-1])
    plan, layout = [], LAYOUTS[1]
    for i, fault in enumerate(order[:number]):
        if layout not in fault.layouts or draw.random() < 0.4:
            layout = draw.choice(fault.layouts)
        ranks = int(np.prod(layout[0]))
        step = i * BLOCK + draw.choice([2, 3])
        at = draw.choice(fault.points)
        if at == "saving step":
            step = i * BLOCK + 2
        victim = draw.choice(fault.victims or range(ranks))
        plan.append((fault, layout, step, at, victim))
    return plan


class Soak:
    """A soak in a folder, with a journal of its own; it goes on where it was ended."""

    def __init__(self, root, number, seed):
        self.root, self.config = root, soak_config(root)
        self.plan = drawn(number, seed)
        self.journal = root / "soak.jsonl"
        os.environ["SOAK_CACHE"] = str(root / "cache")
        self.num_steps = number * BLOCK + BLOCK
        self.draw = random.Random(seed)
        self.corpus = {p: p.read_bytes() for p in (root / "cache").glob("corpora/*/tokens.bin")}

    def done(self):
        text = self.journal.read_text() if self.journal.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def run_on(self, layout, name="soak", **changes):
        mesh, zero = layout
        changes = {"parallel3d__train__steps": self.num_steps, **changes}
        return Run(self.config, name, mesh, zero_optimization__stage=zero, **changes)

    def events(self):
        path = self.root / "runs/soak/events.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def strike(self, i):
        """Launch with fault i; return its row of the journal."""
        fault, layout, step, at, victim = self.plan[i]
        ends = step if fault.effect == DAMAGED else (i + 1) * BLOCK
        run = self.run_on(layout, parallel3d__train__stop_after=ends)
        before, began = len(self.events()), time.time()
        plant = partial(fault.plant, victim=victim, step=step, at=at) if fault.plant else None
        if fault.launcher:
            codes, log = self.under_torchrun(run, step)
        else:
            ended = run.start("", plant, **{k.replace(".", "__"): v for k, v in fault.changes})
            codes, log = [end.code for end in ended], "\n".join(end.log for end in ended)
        seconds = time.time() - began
        (self.root / f"launch-{i}.log").write_text(log)
        file = ""
        if fault.effect == DAMAGED:
            newest = run.checkpoints / f"step-{run.complete_steps()[-1]}"
            file = fault.damage(newest, random.Random(step))
        reached = max((json.loads(x)["step"] for x in self.lines(run)), default=0)
        row = {
            "number": i, "kind": fault.kind, "name": fault.name, "layout": layout, "step": step,
            "at": at, "victim": victim, "codes": codes, "file": file, "reached": reached,
            "began": began, "seconds": round(seconds, 2), "events_before": before,
            "events_after": len(self.events()),
        }  # fmt: skip
        expected = {DIES: lambda c: any(c), GOES_ON: lambda c: set(c) <= {0, STOPPED}}
        fine = expected.get(fault.effect, lambda c: set(c) == {STOPPED})(codes)
        row["as_expected"] = bool(fine)
        with self.journal.open("a") as journal:
            journal.write(json.dumps(row) + "\n")
        return row

    def lines(self, run):
        path = run.folder / "metrics.jsonl"
        return [x for x in path.read_text().splitlines() if x] if path.exists() else []

    def under_torchrun(self, run, step):
        """The real launcher, killed when the run has reached the step."""
        path = self.root / "launched.json"
        path.write_text(json.dumps(run.config))
        log = self.root / "launched.log"
        with log.open("w") as file:
            command = [sys.executable, "-m", "torch.distributed.run", *torchrun_command(run.num_ranks)[1:]]
            process = subprocess.Popen(
                [*command, TRAIN, "--config", str(path)], cwd=self.root,
                env=environment() | {"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if any(json.loads(x)["step"] >= step for x in self.lines(run)):
                break
            time.sleep(0.02)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while (left := session(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for one in left:
            one.kill()
        return ([0] if not left else [-9]), log.read_text()

    def repair(self):
        """Put the corpus back, as whoever reads the message would."""
        for path, data in self.corpus.items():
            path.write_bytes(data)

    def run_all(self, limit=None, say=print):
        """Every fault that is left, then the end; True if all is done."""
        for i in range(len(self.done()), len(self.plan)):
            if limit is not None and time.monotonic() > limit:
                return False
            before = self.done()[-1:] if i else []
            row = self.strike(i)
            if before and before[0]["kind"] == "corpus shard flipped":
                self.repair()
                if not any(row["codes"]) or set(row["codes"]) != {2}:
                    say(f"{i}: the flipped corpus was trained on")
            say(i, row["kind"], row["name"], row["layout"], row["codes"], f"{row['seconds']:.1f} s")
        return True
