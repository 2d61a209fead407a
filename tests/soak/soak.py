"""One run whose mesh changes, struck by seeded faults; compared with the same run without any.

Every launch has one fault at a step of its own, and recovers from the one before. After the last,
the steps are trained again without faults, each on the mesh that it had: the weights must have the
same bits. On one mesh throughout they must be the same but for rounding.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from functools import partial

import numpy as np
from safetensors.numpy import load_file

from parallel3d.base.step_lines import parsed
from tests.checkpoint.drill import Run, changed, prepared_config
from tests.launch.launching import TRAIN, environment, session
from tests.launch.launching import torchrun as torchrun_command
from tests.soak.faults import DAMAGED, DIES, FAULTS, GOES_ON, KINDS, LAYOUTS, OWN_KINDS
from tests.soak.plant import SAVE

BLOCK = 4  # steps from fault to fault
STOPPED = 3
PEACEFUL = 3600  # seconds for many steps without a fault
TOLERANCE = 1e-5  # relative error of weights where the mesh changed


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


def drawn(number, seed, kinds=KINDS):
    """The faults of a soak, in order: all types alike often, and the layout of each start.

    In a long one the types that only this soak has come last of two rounds, so that 42 faults have
    each of the others twice.
    """
    named, own = ([k for k in kinds if (k in OWN_KINDS) == is_own] for is_own in (False, True))
    draw = random.Random(seed)
    order = []
    by_kind = {kind: [f for f in FAULTS if f.kind == kind] for kind in kinds}
    for queue in by_kind.values():
        draw.shuffle(queue)
    while len(order) < number:
        rounds = [named, named, own, own] if number > len(kinds) else [kinds]
        for kind in (kind for of in rounds for kind in draw.sample(of, len(of))):
            by_kind[kind].append(by_kind[kind].pop(0))
            order.append(by_kind[kind][-1])
    plan = []
    layout = LAYOUTS[1]
    for i, fault in enumerate(order[:number]):
        if layout not in fault.layouts or draw.random() < 0.4:
            layout = draw.choice(fault.layouts)
        ranks = int(np.prod(layout[0]))
        step = i * BLOCK + draw.choice([2, 3])
        at = draw.choice(fault.points)
        if at == SAVE:
            step = i * BLOCK + 2
        victim = draw.choice(fault.victims or range(ranks))
        plan.append((fault, layout, step, at, victim))
    return plan


def counts(plan):
    """How often each kind is met in a plan."""
    met = Counter(fault.kind for fault, *_ in plan)
    return {kind: met[kind] for kind in KINDS}


def slowness_now():
    """How many processes each core has, from 1 to 8: time-outs are as many times as long.

    A fault is never over sooner for it: what hangs does so for ever, or for 1000 s.
    """
    return min(max(round(os.getloadavg()[0] / (os.cpu_count() or 1)), 1), 8)


def as_expected(effect, codes):
    """True if the ranks ended as a fault of this effect lets them."""
    if effect == DIES:
        return bool(codes - {0, STOPPED})
    return codes <= {0, STOPPED} if effect == GOES_ON else codes == {STOPPED}


class Soak:
    """A soak in a folder, with a journal of its own; it goes on where it was ended."""

    def __init__(self, root, number, seed, kinds=KINDS):
        self.root = root
        self.config = soak_config(root)
        self.plan = drawn(number, seed, kinds)
        self.journal = root / "soak.jsonl"
        os.environ["SOAK_CACHE"] = str(root / "cache")
        self.num_steps = number * BLOCK + BLOCK

    def done(self):
        text = self.journal.read_text() if self.journal.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def run_on(self, layout, name="soak", **changes):
        mesh, zero = layout
        changes = {"parallel3d__train__steps": self.num_steps, **changes}
        return Run(self.config, name, mesh, zero_optimization__stage=zero, **changes)

    def events(self):
        path = self.root / "runs/soak/events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for _, line in parsed(lines)]  # without halves

    def strike(self, i):
        """Launch with fault i; return its row of the journal."""
        fault, layout, step, at, victim = self.plan[i]
        ends = step if fault.effect == DAMAGED else (i + 1) * BLOCK
        run = self.run_on(layout, parallel3d__train__stop_after=ends)
        before = len(self.events())
        began = time.time()
        slowness = slowness_now()
        plant = partial(fault.plant, victim=victim, step=step, at=at) if fault.plant else None
        if fault.launcher:
            codes, log = self.under_torchrun(run, step)
        else:
            changes = {key.replace(".", "__"): value * slowness for key, value in fault.changes}
            ended = run.start("", plant, timeout=90 * slowness, **changes)
            codes = [end.code for end in ended]
            log = "\n".join(end.log for end in ended)
        seconds = time.time() - began
        (self.root / f"launch-{i}.log").write_text(log)
        file = ""
        if fault.effect == DAMAGED:
            newest = run.checkpoints / f"step-{run.complete_steps()[-1]}"
            file = fault.damage(newest, random.Random(step))
        reached = max((json.loads(x)["step"] for x in self.lines(run)), default=0)
        row = {
            "number": i,
            "kind": fault.kind,
            "name": fault.name,
            "layout": layout,
            "step": step,
            "at": at,
            "victim": victim,
            "codes": codes,
            "file": file,
            "reached": reached,
            "began": began,
            "seconds": round(seconds, 2),
            "slowness": slowness,
            "events_before": before,
            "events_after": len(self.events()),
        }
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
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *torchrun_command(run.num_ranks)[1:],
            ]
            process = subprocess.Popen(
                [*command, TRAIN, "--config", str(path)],
                cwd=self.root,
                env=environment() | {"OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        deadline = time.monotonic() + 120 * slowness_now()
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

    def run_all(self, limit=None, say=print):
        """Every fault that is left; True if all are done."""
        for i in range(len(self.done()), len(self.plan)):
            if limit is not None and time.monotonic() > limit:
                return False
            row = self.strike(i)
            say(i, row["kind"], row["name"], row["layout"], row["codes"], f"{row['seconds']:.1f} s")
        return True

    def finish(self):
        """Train to the end without a fault; return the layouts that the steps were trained on."""
        run = self.run_on(self.plan[-1][1])
        if f"step-{self.num_steps}" not in {p.name for p in run.checkpoints.iterdir()}:
            ended = run.start(timeout=PEACEFUL)
            assert [end.code for end in ended] == [0] * run.num_ranks, ended[0].log
        assert [json.loads(x)["step"] for x in self.lines(run)] == list(
            range(1, self.num_steps + 1)
        )
        launches = [x for x in map(json.loads, self.events()) if x["event"] == "launch"]
        layouts = {"x".join(map(str, mesh)): (mesh, zero) for mesh, zero in LAYOUTS}
        return merged(self.num_steps, launches, layouts)

    def compare(self, with_one_mesh=True):
        """Train the same steps without faults; return {comparison: largest difference}."""
        segments = self.finish()
        result = {}
        ours = self.run_on(segments[-1][0])
        for layout, end in segments:
            peaceful = self.run_on(layout, "peaceful")
            if (peaceful.checkpoints / f"step-{end}").exists():
                continue
            stop = {"parallel3d__train__stop_after": end} if end < self.num_steps else {}
            ended = peaceful.start(timeout=PEACEFUL, **stop)
            assert {end.code for end in ended} <= {0, STOPPED}, ended[0].log
        last = f"step-{self.num_steps}"
        result["same meshes"] = difference(ours.checkpoints / last, peaceful.checkpoints / last)
        keys = ("step", "loss", "grad_norm")
        for one, other in zip(self.lines(ours), self.lines(peaceful), strict=True):
            assert all(json.loads(one)[key] == json.loads(other)[key] for key in keys), (one, other)
        if with_one_mesh:
            one = self.run_on(LAYOUTS[1], "one-mesh")
            if not (one.checkpoints / last).exists():
                assert {end.code for end in one.start(timeout=PEACEFUL)} == {0}
            result["one mesh"] = difference(ours.checkpoints / last, one.checkpoints / last)
        return result

    def judged(self):
        """Each row with what the journal says: located, lost steps, and seconds to a new step."""
        rows = self.done()
        events = self.events()
        for i, row in enumerate(rows):
            fault = self.plan[row["number"]][0]
            row["as_expected"] = as_expected(fault.effect, {*row["codes"]})
            later = rows[i + 2]["events_after"] if i + 2 < len(rows) else len(events)
            own = events[row["events_before"] : row["events_after"]]
            after = events[row["events_after"] : later]
            pattern = fault.located
            for name in ("victim", "step", "file"):
                pattern = pattern.replace(f"{{{name}}}", re.escape(str(row[name])))
            row["located"] = any(re.search(pattern, line) for line in own + after)
            next_launch = [
                x for x in map(json.loads, after) if x["event"] in ("launch", "first_step")
            ]
            row["lost"] = next((x["lost_steps"] for x in next_launch if x["event"] == "launch"), 0)
            row["restart"] = next(
                (x["seconds"] for x in next_launch if x["event"] == "first_step"), 0
            )
        return rows

    def table(self):
        """The table by type, in Markdown, and the number that was not survived and located."""
        rows = self.judged()
        missed = 0
        by_kind = defaultdict(list)
        for row in rows:
            by_kind[row["kind"]].append(row)
        lines = [
            "| type | injected | survived | located | lost steps | restart, s |",
            "|---|---|---|---|---|---|",
        ]
        for kind, own in sorted(by_kind.items()):
            survived = sum(row["as_expected"] for row in own)
            located = sum(row["located"] for row in own)
            missed += 2 * len(own) - survived - located
            restarts = max(row["restart"] for row in own)
            lost = sum(row["lost"] for row in own)
            lines.append(
                f"| {kind} | {len(own)} | {survived} | {located} | {lost} | {restarts:.1f} |"
            )
        run = self.run_on(self.plan[-1][1])
        useful = sum(json.loads(x)["step_seconds"] for x in self.lines(run))
        wall = sum(row["seconds"] for row in rows)
        lines += [
            "",
            f"{len(rows)} faults, {self.num_steps} steps; {useful:.0f} s of {wall:.0f} s in steps "
            f"that count ({useful / wall:.0%})",
        ]
        return "\n".join(lines), missed


def merged(num_steps, launches, layouts):
    """The layouts on which the steps that count were trained, each with its last step."""
    segments = []
    end = num_steps
    for launch in reversed(launches):
        if launch["step"] < end:
            layout = layouts[launch["mesh"]]
            if not segments or segments[-1][0] != layout:
                segments.append((layout, end))
            end = launch["step"]
    return segments[::-1]


def tensors(folder):
    """{name and kind: array} of a checkpoint's chunks."""
    shapes = json.loads((folder / "state.json").read_text())["parameters"]
    whole = {}
    for path in folder.glob("*.safetensors"):
        for key, chunk in load_file(path).items():
            rest, _, offsets = key.rpartition("|")
            shape = shapes[rest.rpartition("|")[0]]["shape"]
            into = whole.setdefault(rest, np.full(shape, np.nan, np.float32))
            starts = [int(x) for x in offsets.split(",") if x]
            into[tuple(slice(at, at + n) for at, n in zip(starts, chunk.shape, strict=True))] = (
                chunk
            )
    return whole


def difference(one, other):
    """The largest difference of two checkpoints' weights; 0 only if all bits of all states are."""
    ours = tensors(one)
    theirs = tensors(other)
    assert ours.keys() == theirs.keys()
    if all(ours[key].tobytes() == theirs[key].tobytes() for key in ours):
        return 0.0
    return (
        max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours if key.endswith("|master"))
        or 1e-30
    )
