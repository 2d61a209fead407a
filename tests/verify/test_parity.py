"""The same seed and data give the same numbers on every mesh as plain transformers on one process.

Each setting appears, beside those with which it goes wrong most easily; `pytest -m slow` runs every
pair that can go together, on all meshes as `verify` runs them, and writes the tables of
docs/parity.md.
"""

import time
from functools import cache
from math import prod
from pathlib import Path

import pytest

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.schedule import schedules
from parallel3d.verify.case import CaseTask, checked
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE
from parallel3d.verify.reference import prepare
from parallel3d.verify.shrink import MESHES, Extent, shrink
from tests.meshes import sizes_of
from tests.verify.configs import MODELS, config_of
from tests.verify.measuring import (
    errors_of,
    measure,
    reference_on_batches,
    train_each,
)
from tests.verify.pairwise import pairs, pairwise, possible_pairs
from tests.verify.parity_table import by_hand, markdown

pytestmark = pytest.mark.gloo

BATCH = 6  # samples in a step: 1, 2 and 3 microbatches on dp 1 and 2
SHORT = Extent(steps=2)  # the second uses what the first left; the table in full has three
# The stages a rank with which each is run: several where it interleaves them.
STAGES = {
    name: stages
    for name in schedules.names()
    for stages in (3, 2, 1)
    if schedules.why_not(name, 4, 8, stages) is None
}
# Every two axes; the table in full has every mesh of `verify`.
FEW = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
OFFLOADS = ["none", "cpu", "nvme", "cpu+cpu", "nvme+nvme"]
SETTINGS = {
    "model": list(MODELS),
    "mesh": FEW,
    "zero": [0, 1, 2, 3],
    "offload": OFFLOADS,
    "schedule": list(STAGES),
    "microbatches": [1, 2, 3],
    "reduction": ["per_step", "per_microbatch"],
    "weights": ["per_microbatch", "per_pass", "per_step"],
    "checkpointing": ["none", "selective", "full"],
    "sequence_parallel": [False, True],
    "isolate": [False, True],
}


def can_be(row):
    """Whether a config with these settings is one that is not refused."""
    stages = STAGES[row["schedule"]]
    if schedules.why_not(row["schedule"], row["mesh"][0], row["microbatches"], stages):
        return False
    each = row["reduction"] == "per_microbatch" and row["zero"] > 0
    if schedules.splits_backward(row["schedule"]) and each:
        return False
    offload = row["offload"]
    return offload in ("none", "cpu") or row["zero"] == 3


def label(row):
    mesh = "x".join(map(str, row["mesh"]))
    marks = [row["model"], mesh, row["schedule"], f"zero{row['zero']}", row["offload"]]
    marks += [row["reduction"], f"ckpt-{row['checkpointing']}", f"m{row['microbatches']}"]
    marks += [f"weights-{row['weights']}"] if row["zero"] == 3 else []
    marks += ["mup"] if row.get("mup") else []
    marks += ["sp"] if row["sequence_parallel"] else []
    return " ".join([*marks, *(["isolated"] if row["isolate"] else [])])


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory):
    """The reference of all small configs with the same model on the same data, made once."""
    made = {}

    def train(small):
        key = small.model.model_dump_json(), small.data.isolate_documents, small.global_batch_size
        if key not in made:
            made[key] = reference_on_batches(small, tmp_path_factory.mktemp("reference"))
        return made[key]

    return train


def job_of(row, reference_of, folder):
    """A row's small config, and its reference."""
    settings = {name: value for name, value in row.items() if name != "mesh"}
    raw = config_of(stages_per_rank=STAGES[row["schedule"]], **settings)
    small = small_of(raw, sizes_of(row["mesh"]), str(folder))
    return small, reference_of(small)


def small_of(raw, mesh, folder=""):
    """The small config on a mesh; without a pipeline two layers are of all kinds."""
    meshes = (*meshes_of(mesh.pp), mesh)
    small = shrink(RunConfig.from_dict(raw), meshes, folder, BATCH, extent=SHORT)[mesh]
    if mesh.pp > 1:
        return small
    raw = small.to_dict()
    model = raw["parallel3d"]["model"]
    model["num_hidden_layers"] = 2
    if model.get("layer_types"):
        model["layer_types"] = model["layer_types"][:2]
    return RunConfig.from_dict(raw).resolve(mesh.ranks).completed()


def meshes_of(pp):
    """Meshes for which a model is made that has layers for `pp` and heads for any tp."""
    return MeshSizes(pp=pp), MeshSizes(tp=4)


ALL_AXES = {
    "model": "llama",
    "mesh": (2, 2, 2),
    "zero": 3,
    "offload": "nvme+nvme",
    "schedule": "v_shape",
    "microbatches": 2,
    "reduction": "per_step",
    "weights": "per_pass",
    "checkpointing": "selective",
    "sequence_parallel": True,
    "isolate": True,
}
# Parameters on the host and the optimizer alone on NVMe: tests/engine/test_offload.py.
DEFAULT = SETTINGS | {"offload": ["none", "cpu", "nvme+nvme"]}
# Each axis is a setting by itself, so that most rows have one or two ranks.
AXES = {"pp": [1, 2], "dp": [1, 2], "tp": [1, 2]}
BY_AXIS = {name: values for name, values in DEFAULT.items() if name != "mesh"} | AXES


def by_axis(row):
    """A row with an axis a setting."""
    sizes = sizes_of(row["mesh"])
    others = {name: value for name, value in row.items() if name != "mesh"}
    return others | {axis: getattr(sizes, axis) for axis in AXES}


def on_mesh(row):
    """A row with its axes as one setting; undoes `by_axis`."""
    others = {name: value for name, value in row.items() if name not in AXES}
    return others | {"mesh": tuple(row[axis] for axis in AXES)}


def can_act(row):
    """True if a row by axis can be, and shards and sequence parallelism have ranks to act on.

    Weights are let go before the step's end only where they are shards, and stages overlap where
    there are several microbatches. NVMe, which the engine alone reads, stands beside shards.
    `every_pair` has the others.
    """
    if row["zero"] == 3 and row["dp"] == 1:
        return False
    if row["zero"] < 3 and row["weights"] != "per_step":
        return False
    if row["pp"] > 1 and row["microbatches"] == 1:
        return False
    if row["sequence_parallel"] and row["tp"] == 1:
        return False
    if row["offload"] == "nvme+nvme" and row["pp"] * row["tp"] > 1:
        return False
    return can_be(on_mesh(row))


# The pairs of settings that appear by default, an axis where it has two ranks.
CLOSEST = {
    frozenset(names)
    for names in (
        ("model", "tp"),
        ("schedule", "pp"),
        ("zero", "pp"),
        ("zero", "dp"),
        ("zero", "tp"),
        ("zero", "offload"),
        ("reduction", "dp"),
        ("weights", "dp"),
        ("sequence_parallel", "checkpointing"),
        ("sequence_parallel", "isolate"),
    )
}


def is_closest(pair):
    """Whether a pair (frozenset of (setting, value)) appears by default."""
    row = dict(pair)
    return frozenset(row) in CLOSEST and all(row.get(axis, 2) == 2 for axis in AXES)


# cp beside stages and tp, with windows; beside dp and experts in tests/pipeline/test_experts.py.
_CP = {"offload": "none", "reduction": "per_step", "weights": "per_pass", "microbatches": 2}
_CP_SETTINGS = "model", "mesh", "zero", "schedule", "checkpointing", "sequence_parallel", "isolate"
CP_ROWS = [
    _CP | dict(zip(_CP_SETTINGS, values, strict=True))
    for values in (
        ("llama untied", (1, 1, 2, 2), 3, "gpipe", "none", True, True),
        ("gpt untied", (2, 1, 2, 1), 2, "zero_bubble", "none", False, True),
        ("qwen2", (1, 1, 2, 1), 1, "gpipe", "full", False, True),  # windows
    )
]
CP_MESHES = [(1, 1, 4, 1), (1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 2, 1)]
CP_DEFAULT = DEFAULT | {"mesh": CP_MESHES, "offload": ["none", "cpu"], "microbatches": [1, 3]}
# Of the first 150 seeds the least work.
SEED_OF_ROWS = 83


def work_of(row):
    """About how long a row takes; ZeRO-3 gathers, and NVMe waits for files."""
    seconds = 1.0 + row["pp"] * row["dp"] * row["tp"] * (0.9 + 0.05 * row["microbatches"])
    if row["pp"] == 1:
        seconds *= 0.8 + 0.2 * STAGES[row["schedule"]]  # in stages that are all its own
    if row["zero"] == 3:
        seconds *= 1.5
    if row["offload"] == "nvme+nvme":
        seconds *= 1.5
    return seconds


def closest_rows():
    """Rows in which each closest pair appears that the other rows lack; axes are settings."""
    others = set().union(*(pairs(by_axis(row)) for row in (ALL_AXES, *CP_ROWS)))

    def is_missing(pair):
        return is_closest(pair) and pair not in others

    return [*map(on_mesh, pairwise(BY_AXIS, can_act, SEED_OF_ROWS, is_missing, work_of))]


ROWS = [*closest_rows(), ALL_AXES, *CP_ROWS]


def every_pair():
    return pairwise(DEFAULT, can_be, seed=2)  # fewest rows among the first few seeds


def pytest_generate_tests(metafunc):
    """Make rows; the large tables, which take a second, only where slow tests are asked for."""
    if "row" not in metafunc.fixturenames:
        return
    is_slow = "slow" in metafunc.config.option.markexpr.replace("not slow", "")
    if metafunc.function is test_parity_in_full:
        rows = pairwise(IN_FULL, can_be, seed=0) if is_slow else []
    else:
        others = [*every_pair(), *pairwise(CP_DEFAULT, can_be, seed=0)] if is_slow else []
        slow = [pytest.param(row, marks=pytest.mark.slow) for row in others if row not in ROWS]
        rows = [*ROWS, *slow]
    metafunc.parametrize("row", rows, ids=label)


@pytest.fixture(scope="module")
def together(request, reference_of, tmp_path_factory):
    """Errors of one of ROWS; those of as many ranks and one offload are trained in one start."""

    def asked():
        for item in request.session.items:
            if item.path == request.path and "row" in getattr(item, "fixturenames", ()):
                row = item.callspec.params["row"]
                if "together" in item.fixturenames and row in ROWS:
                    yield row

    @cache
    def trained(ranks, offload):
        rows = [r for r in asked() if (prod(r["mesh"]), r["offload"]) == (ranks, offload)]
        folder = tmp_path_factory.mktemp("offloaded")
        jobs = [job_of(row, reference_of, folder) for row in rows]
        results = zip(*run_locally(train_each, ranks, jobs, timeout=220), strict=True)
        errors = [
            errors_of(config, of_ranks) for (config, _), of_ranks in zip(jobs, results, strict=True)
        ]
        return list(zip(rows, errors, strict=True))

    def errors(row):
        return next(e for r, e in trained(prod(row["mesh"]), row["offload"]) if r == row)

    return errors


def test_every_setting_appears():
    """A setting that no row may have would be a setting that nobody tests."""
    for name, values in BY_AXIS.items():
        assert {by_axis(row)[name] for row in ROWS} >= set(values)


def test_every_closest_pair_appears():
    seen = set().union(*(pairs(by_axis(row)) for row in ROWS))
    assert seen >= possible_pairs(BY_AXIS, can_act, is_closest).keys()


@pytest.mark.slow
def test_every_pair_appears_in_full():
    assert set().union(*map(pairs, every_pair())) >= possible_pairs(DEFAULT, can_be).keys()


@pytest.mark.usefixtures("operators")
def test_parity_with_plain_transformers(row, reference_of, together, tmp_path):
    if row in ROWS:
        errors = together(row)
    else:
        errors = measure(*job_of(row, reference_of, tmp_path), timeout=120)
    print(f"{label(row):100} {errors}")
    assert errors.within(TOLERANCE["fp32"]), errors


# As a user's config would have them, muP included, on every mesh of `verify`.
IN_FULL = SETTINGS | {
    "mesh": list(MESHES),
    "microbatches": [1, 3, 4],
    "mup": [False, True],
}


def verified(row, folder):
    """The largest differences of one row where `verify` trains it on the row's mesh."""
    settings = {name: value for name, value in row.items() if name not in ("mesh", "mup")}
    raw = config_of(stages_per_rank=STAGES[row["schedule"]], **settings)
    raw["gradient_clipping"] = 1.0
    if row["mup"]:
        mup = {"type": "mup", "base_width": 16}
        raw["parallel3d"]["model"] = raw["parallel3d"]["model"] | {"parametrization": mup}
    config = RunConfig.from_dict(raw)
    meshes = [row["mesh"], *meshes_of(row["mesh"][0])]
    small, reference = prepare(config, meshes, folder)
    errors, _ = checked(small[row["mesh"]], reference, CaseTask(), timeout=300)
    return errors


@pytest.fixture(scope="module")
def measured(request):
    """Collects (row, errors), and writes the table if the command line names a file for it."""
    start = time.monotonic()
    rows = []
    yield rows
    if (file := request.config.getoption("--parity-table")) and rows:
        page = Path(file)
        kept = by_hand(page.read_text()) if page.exists() else ""
        page.write_text(markdown(rows, time.monotonic() - start) + kept)


@pytest.mark.slow
@pytest.mark.usefixtures("operators")
def test_parity_in_full(row, measured, tmp_path):
    errors = verified(row, tmp_path)
    measured.append((row, errors))
    print(f"{label(row):100} {errors}")
    assert errors.within(TOLERANCE["fp32"]), errors


def test_bf16_follows_fp32(reference_of, tmp_path):
    """The losses of bf16 stay within 2 % of fp32's."""
    raw = config_of(precision="bf16", microbatches=2, zero=1)
    mesh = MeshSizes(dp=2)
    small = small_of(raw, mesh)
    exact = small_of(config_of(microbatches=2), mesh)
    errors = measure(small, reference_of(exact), timeout=120)
    print(errors)
    assert errors.loss < 0.02
