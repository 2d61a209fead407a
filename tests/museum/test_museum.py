"""Silent bugs are planted in the check that `verify` runs, and it sees each.

By default one for each comparison that sees a bug; `pytest -m slow` plants all, and looks for false
alarms.
"""

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.schedule import schedules
from parallel3d.verify.case import CaseTask, checked
from parallel3d.verify.local_ranks import RankFailed
from parallel3d.verify.measure import TOLERANCE
from parallel3d.verify.reference import prepare
from parallel3d.verify.shrink import MESHES, drops_out, shrink
from tests.meshes import sizes_of
from tests.museum import exhibits
from tests.museum import tour as museum_tour
from tests.museum.exhibit import KINDS, replaced, wrapped
from tests.museum.halls import HALLS, hall
from tests.museum.needs import NEEDS
from tests.museum.tour import Hall
from tests.verify.configs import MODELS, config_of

pytestmark = pytest.mark.gloo

ALL = {name: exhibits.load(name).EXHIBIT for name in exhibits.names()}
MEASURED = json.loads((Path(__file__).parents[2] / "docs" / "museum.json").read_text())["exhibits"]
SMALL_MESHES = [MeshSizes(), MeshSizes(pp=2)]
MOST_SECONDS = 20  # longer ones are slow tests: rotary positions are seen in long samples alone


def when(record):
    """Its turn: what an unbroken run sees is first, and what is seen soon."""
    return record["by"].startswith("resume: "), record["seconds"]


def one_for_each_comparison():
    """The name of the exhibit that each comparison saw in the shortest time.

    It is one of a resumed run only where an unbroken run shows the comparison none. Ordered by
    hall, whose reference is trained once.
    """
    quickest = {}
    for record in sorted(MEASURED.values(), key=when):
        if record["seconds"] <= MOST_SECONDS:
            comparison = record["by"].removeprefix("resume: ")
            quickest.setdefault(comparison, record)
    by_hall = sorted(quickest.values(), key=lambda record: record["hall"])
    return [record["name"] for record in by_hall]


BY_DEFAULT = one_for_each_comparison()
# Below it, other code reduces on the least mesh; one that shares their reference is with them.
SEEN_WITH_ZERO_3 = {"averaged_in_bf16", "no_masters"}
# The museum shows them on meshes of several ranks, which their mistakes do not need.
SEEN_ON_ONE_RANK = {"step_count_lost", "vocabulary_padding_wins"}
SEEN_IN_THE_REFERENCE = {"first weights", "settings"}


@pytest.fixture(scope="module")
def halls(tmp_path_factory):
    """The halls of the museum, each made once."""
    made = {}

    def get(title, meshes=MESHES, **changes):
        key = title, tuple(meshes), *changes.items()
        if key not in made:
            made[key] = Hall(hall(title, **changes), tmp_path_factory.mktemp("hall"), meshes)
        return made[key]

    return get


def test_there_are_as_many_as_the_museum_says():
    published = [name for name, exhibit in ALL.items() if exhibit.source]
    assert len(ALL) >= 40 and len(published) >= 25
    for kind in KINDS:
        assert sum(exhibit.kind == kind for exhibit in ALL.values()) >= 3, kind
    for name, exhibit in ALL.items():
        assert set(exhibit.needs) <= NEEDS.keys(), name
        assert exhibit.sizes in MESHES, name
        assert bool(exhibit.date) == bool(exhibit.source), name
        assert exhibit.what.endswith("."), name


@pytest.mark.parametrize("name", ALL)
def test_patched_names_exist(name):
    """A name that is gone raises AttributeError, other arguments a TypeError (`check_fits`)."""
    with exhibits.load(name).plant():
        pass


class Patched:
    """Something to patch."""

    def step(self, lr, is_kept=None, *, scale):
        """Return what the patch passes on."""
        return lr, is_kept, scale


@pytest.mark.parametrize(
    "wrong",
    [
        lambda original, self, lr, *, scale: original(self, lr, scale=scale),  # one is new
        lambda original, self, lr, is_kept, step, *, scale: None,  # one is gone
        lambda original, self, lr, is_kept=None: None,  # the keyword is new
        lambda original, self, lr, is_kept, *, scale: None,  # a default is new
    ],
)
def test_patch_that_no_longer_fits_is_not_planted(wrong):
    with pytest.raises(TypeError, match=r"the patch of Patched\.step does not fit its arguments"):
        wrapped(Patched, "step", wrong)
    with pytest.raises(TypeError, match="does not fit"):
        replaced(Patched, "step", partial(wrong, None))
    with wrapped(Patched, "step", lambda original, *args, **named: original(*args, **named)):
        assert Patched().step(1, scale=2) == (1, None, 2)


@pytest.mark.parametrize(
    ("last", "seen", "raised"),
    [
        ("TypeError: backward() got an unexpected keyword", False, True),
        ("parallel3d.base.errors.TrainingError: the loss is nan", True, False),
    ],
)
def test_patch_that_raises_shows_nothing(last, seen, raised, halls, monkeypatch):
    def fails(*args, **kwargs):
        raise RankFailed(f"rank 0 of 1: Traceback (most recent call last):\n  ...\n{last}\n")

    place = halls("gpt", SMALL_MESHES)
    monkeypatch.setattr(place, "trained", lambda: None)
    monkeypatch.setattr(museum_tour, "checked", fails)
    visit = place.visit("running_average")
    assert (visit.seen, bool(visit.raised)) == (seen, raised), visit


def test_each_can_be_held_by_a_hall(halls):
    for name, exhibit in ALL.items():
        assert any(not halls(title).lacks(exhibit) for title in HALLS), name


def least_mesh(name):
    """The least mesh on which an exhibit is seen."""
    if name in SEEN_ON_ONE_RANK:
        return MeshSizes()
    return sizes_of([min(2, size) for size in ALL[name].mesh])


def cheapest_settings(name):
    """Two microbatches, no clipping, and the stage of ZeRO that takes the least time."""
    settings = {"microbatches": 2}
    if "clipping" not in ALL[name].needs:
        settings["clipping"] = 0.0
    if "ZeRO-3" not in ALL[name].needs and name not in SEEN_WITH_ZERO_3:
        settings["zero"] = 1
    return settings


def meshes_of_hall(title):
    """The least meshes of the exhibits that are planted in a hall by default."""
    names = [name for name in BY_DEFAULT if MEASURED[name]["hall"] == title]
    return tuple(dict.fromkeys(map(least_mesh, names)))


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_each_comparison_sees_its_quickest_exhibit(name, halls):
    """A hall has one reference, but where the comparison is with the reference's own start.

    The reference shares no code with what is planted: tests/verify/test_definitions.py.
    """
    measured = MEASURED[name]
    title = measured["hall"]
    place = halls(title, meshes_of_hall(title), **cheapest_settings(name))
    is_shared = measured["by"] not in SEEN_IN_THE_REFERENCE
    visit = place.visit(name, least_mesh(name), is_shared)
    assert visit.by == measured["by"], visit
    assert visit.relative_size > 1e-5


def test_nothing_is_seen_where_nothing_is_planted(halls):
    place = halls("gpt", SMALL_MESHES)
    clean = place.small(MeshSizes(pp=2))
    errors, _ = checked(clean, place.trained(), CaseTask(drops=True))
    assert not errors.beyond(TOLERANCE["fp32"]), errors


def test_rounding_moves_no_weight_beyond_the_bound():
    """Not even one whose gradient is all but zero, which Adam's first step takes for a whole one.

    Sums of rounded numbers are off by 1e-9 where gradients are of 1e-2.
    """
    adam = shrink(RunConfig.from_dict(config_of()), MESHES)[MeshSizes()].optimizer.params
    moved = []
    for gradient in (0.0, 2e-9):
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        weight.grad = torch.full_like(weight, gradient)
        torch.optim.AdamW([weight], lr=adam.lr, betas=adam.betas, eps=adam.eps).step()
        moved.append(weight.item())
    assert 0 < abs(moved[1] - moved[0]) < TOLERANCE["fp32"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in BY_DEFAULT])
def test_each_other_is_seen(name, halls):
    title = next(title for title in HALLS if not halls(title).lacks(ALL[name]))
    visit = halls(title).visit(name)
    print(title, visit)
    assert visit.seen, visit


def drawn(number):
    """A config by lot, and a mesh that it can run on."""
    lot = random.Random(number)
    while True:
        settings = {
            "model": lot.choice(list(MODELS)),
            "zero": lot.choice([0, 1, 2, 3]),
            "schedule": lot.choice(schedules.names()),
            "stages_per_rank": lot.choice([1, 2]),
            "reduction": lot.choice(["per_step", "per_microbatch"]),
            "checkpointing": lot.choice(["none", "selective", "full"]),
            "sequence_parallel": lot.choice([False, True]),
            "isolate": lot.choice([False, True]),
        }
        mesh = lot.choice(MESHES)
        schedule = settings["schedule"]
        stages = settings["stages_per_rank"]
        split = schedules.splits_backward(schedule) and settings["reduction"] == "per_microbatch"
        if not schedules.why_not(schedule, mesh.pp, 4, stages) and not split:
            return config_of(**settings), mesh


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_no_false_alarm(number, tmp_path):
    raw, mesh = drawn(number)
    raw["gradient_clipping"] = random.Random(number).choice([0.0, 1.0])
    if raw["parallel3d"]["model"]["family"] == "gpt":
        raw["parallel3d"]["model"] |= {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    config = RunConfig.from_dict(raw)
    other = MeshSizes(dp=2, tp=2) if config.pipeline.stages_per_rank == 1 else mesh
    small, reference = prepare(config, (mesh, other), tmp_path)
    saved = tmp_path / "saved"
    errors, counters = checked(
        small[mesh], reference, CaseTask(saves=saved, drops=drops_out(config)), timeout=300
    )
    print(mesh, errors)
    assert not errors.beyond(TOLERANCE["fp32"]), errors
    resumed, _ = checked(small[mesh], reference, CaseTask(resumes=saved), counters=counters)
    assert not resumed.beyond(TOLERANCE["fp32"]), resumed
