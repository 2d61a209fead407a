"""Kill -9 of any rank at any write, sync, rename and delete of a save, and the command again."""

import random
import re
from collections import Counter
from dataclasses import dataclass

import pytest

from tests.checkpoint.drill import Run, check_died, check_resumed, check_same, prepared_config
from tests.launch.launching import Place, deepspeed, torchrun

pytestmark = pytest.mark.drill

MESH = (2, 2, 1)
PAIR = (1, 2, 1)
LAST = 4  # a checkpoint after each step; from the third on an old one is deleted
PRUNING = 3
# It keeps states of two kinds: momentum of matrices, and AdamW's moments of the rest.
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 2e-2, "adam_lr": 2e-3, "weight_decay": 0.1}}}
RENAME = "checkpoint.before_rename"  # the first of a save gives the checkpoint its name


@dataclass(frozen=True)
class Point:
    """The so many-th point of a name that a rank passes in a save, and whom to kill there."""

    save: int
    name: str
    count: int
    rank: int
    occurrence: int  # since the rank's start
    resumed: int  # the newest complete step, which must be gone on from


class Drill:
    """An unbroken run, and where its ranks pass fault points."""

    def __init__(self, config, root, mode, asynchronous, mesh):
        settings = {"parallel3d__checkpoint__asynchronous": asynchronous}
        self.config = config
        self.mode = mode
        self.mesh = mesh
        self.settings = settings
        self.unbroken = Run(config, f"unbroken-{mode}", mesh, **settings)
        self.num_ranks = self.unbroken.num_ranks
        ended = self.unbroken.start(f"record {root}/{mode}")
        assert [end.code for end in ended] == [0] * self.num_ranks, ended[0].log
        self.unbroken.check_whole()
        ranks = range(self.num_ranks)
        self.saves = [self._saves(root / f"{mode}-{rank}", rank) for rank in ranks]
        self.done = Counter()

    def _saves(self, record, rank):
        """The names of the points of each of a rank's saves, in order."""
        saves = []
        begins = "checkpoint.before_create" if rank else "checkpoint.before_mkdir"
        for name in record.read_text().split():
            if name == begins:
                saves.append([])
            if name.startswith("checkpoint."):
                saves[-1].append(name)
        assert len(saves) == LAST
        return saves

    def points(self, save):
        """Every point of a save, each with a seeded choice among the ranks that pass it."""
        longest = Counter()
        for saves in self.saves:
            longest |= Counter(saves[save - 1])
        points = []
        for name, total in sorted(longest.items()):
            points += [self._point(save, name, count) for count in range(1, total + 1)]
        return points

    def _point(self, save, name, count):
        passing = [
            rank for rank, saves in enumerate(self.saves) if saves[save - 1].count(name) >= count
        ]
        rank = random.Random(f"{self.mode} {save} {name} {count}").choice(passing)
        before = sum(names.count(name) for names in self.saves[rank][: save - 1])
        # Only the first rank renames; what comes later finds the checkpoint complete.
        names = self.saves[0][save - 1]
        at = [i for i, n in enumerate(names) if n == name][count - 1] if rank == 0 else -1
        resumed = save if at > names.index(RENAME) else save - 1
        return Point(save, name, count, rank, before + count, resumed)

    def kill(self, point):
        """One kill and one start; the end is that of the unbroken run."""
        number = self.done["kills"]
        run = Run(self.config, f"{self.mode}-{number}", self.mesh, **self.settings)
        ended = run.start(f"kill {point.name} {point.occurrence} {point.rank}")
        check_died(ended, point.rank)
        self.done["kills"] += 1
        assert max(run.complete_steps(), default=0) == point.resumed, point
        check_resumed(run.start(), point.resumed)
        self.done["resumes" if point.resumed else "fresh starts"] += 1
        check_same(run, self.unbroken, tidy=point.resumed < LAST)
        print(point, f"others ended after {max(e.at for e in ended) - ended[point.rank].at:.1f} s")


@pytest.fixture(scope="module")
def make_drill(tmp_path_factory):
    root = tmp_path_factory.mktemp("kill")
    config = prepared_config(root, num_layers=1)
    made = {}

    def make(mode, mesh=MESH):
        name = f"{mode}-{'x'.join(map(str, mesh))}"
        if name not in made:
            is_first = mode == "asynchronous"
            made[name] = Drill(config | (MUON if is_first else {}), root, name, is_first, mesh)
        return made[name]

    return make


def test_run_survives_a_kill_at_a_delete(make_drill):
    """Behind training.

    A kill at a rename leaves what one at the write before it leaves, or what a whole save does.
    """
    drill = make_drill("asynchronous", PAIR)
    points = drill.points(PRUNING)
    assert len(points) >= 50
    assert {point.rank for point in points} == {0, 1}
    draw = random.Random(4)
    drill.kill(draw.choice([point for point in points if "delete" in point.name]))


@pytest.mark.slow
def test_run_survives_a_kill_at_a_write_that_ends_it(make_drill):
    drill = make_drill("asynchronous")
    # Rank 0 does not talk to rank 2: it hears of its death when ranks 1 and 3 end of it.
    written = [point for point in drill.points(LAST) if "write" in point.name and point.rank == 2]
    resumes = drill.done["resumes"]
    drill.kill(random.Random(4).choice(written))
    assert drill.done["resumes"] == resumes + 1


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_run_survives_a_kill_at_every_point_of_a_save(make_drill, mode):
    """All of the save that deletes an old one, and a sample of the first and of the last save."""
    drill = make_drill(mode)
    points = drill.points(PRUNING)
    # Each tensor is a write of its own where nothing is copied: some of many that are alike.
    alike = [point for point in points if point.name == "checkpoint.before_write"]
    draw = random.Random(mode)
    if mode == "synchronous":
        left_out = set(draw.sample(alike[1:-1], max(0, len(alike) - 10)))
        points = [point for point in points if point not in left_out]
    points += draw.sample(drill.points(1), 4) + draw.sample(drill.points(LAST), 6)
    for point in points:
        drill.kill(point)
    ranks = Counter(point.rank for point in points)
    kinds = Counter(point.name.removeprefix("checkpoint.") for point in points)
    print(f"\n{mode}: {len(points)} points, {dict(drill.done)}, of ranks {sorted(ranks.items())}")
    print(", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())))
    assert len(points) >= 50 and set(ranks) == set(range(drill.num_ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("before_delete", 1), ("before_delete", 2), ("before_rmdir", 1)]
)
def test_run_survives_a_kill_while_the_next_start_cleans_up(make_drill, name, count):
    drill = make_drill("asynchronous")
    run = Run(drill.config, f"cleaning-{name}-{count}", MESH)
    check_died(run.start("kill checkpoint.after_fsync 3 1"), 1)  # the rank's file of the third save
    assert (run.checkpoints / "step-3.tmp").is_dir()
    check_died(run.start(f"kill checkpoint.{name} {count} 0"), 0)
    assert (run.checkpoints / "step-3.tmp").is_dir()
    check_resumed(run.start(), 2)
    check_same(run, drill.unbroken)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_run_survives_kills_under_the_launchers(tmp_path, monkeypatch):
    """The command as a user types it, killed and typed again: as a run that was never killed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # launchers choose differently
    place = Place(tmp_path)

    def run(launcher, name, fault=None):
        if fault:
            monkeypatch.setenv("PARALLEL3D_FAULT", fault)
        else:
            monkeypatch.delenv("PARALLEL3D_FAULT", raising=False)
        settings = ("--parallel3d.run.name", name, "--parallel3d.checkpoint.every", 1)
        done = place.run(launcher(2), *settings, steps=LAST, timeout=400)
        return done.returncode, done.stderr + done.stdout

    def end_of(name):
        folder = place.root / "runs" / name / "checkpoints" / f"step-{LAST}"
        shards = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
        assert len(shards) == 2
        keys = ("step", "loss", "grad_norm")
        return shards, [[line[key] for key in keys] for line in place.lines(name)]

    code, log = run(torchrun, "unbroken")
    assert code == 0, log
    unbroken = end_of("unbroken")
    assert [step for step, *_ in unbroken[1]] == list(range(1, LAST + 1))
    kills = [
        (deepspeed, "kill checkpoint.before_create 2 1", 1),  # the rank's file of the second save
        (torchrun, "kill checkpoint.after_rename 3 0", 2),  # the folder, in the second save
        (deepspeed, "kill checkpoint.before_delete 2 0", 3),  # the third save deletes the first
    ]
    for i, (launcher, fault, resumed) in enumerate(kills):
        code, log = run(launcher, f"killed-{i}", fault)
        assert code != 0, log
        code, log = run(launcher, f"killed-{i}")
        assert code == 0, log
        assert re.findall(r"resume  from \S+: step (\d+)", log) == [str(resumed)], log
        assert end_of(f"killed-{i}") == unbroken, i
    print("\n3 kills and 3 resumes under torchrun and deepspeed")
