"""What is saved on one mesh arrives on any other with every bit of its masters and moments.

By default every ordered pair of four meshes, with ZeRO stages and offloads drawn so that each pair
of theirs appears, too, and one block: tests/engine/test_add_an_optimizer.py moves several to other
stages. `pytest -m slow` runs all, and writes the table of docs/checkpoint.md.
"""

import time
from itertools import product
from pathlib import Path

import pytest

from tests.checkpoint.resharding import Side, load_all, save
from tests.checkpoint.resharding_table import insert, markdown

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

MESHES = [(1, 1, 1), (1, 4, 1), (4, 1, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
FEW = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)]
STAGES = [1, 3]
OFFLOADS = ["none", "cpu"]
KINDS = [*product(STAGES, OFFLOADS)]


def sides_of(meshes, shift):
    """Return a side for each mesh, with ZeRO stages and offloads in turn, beginning at `shift`."""
    sides = []
    for place, mesh in enumerate(meshes):
        stage, offload = KINDS[(place + shift) % len(KINDS)]
        sides.append(Side(mesh, stage, offload, model="shallow"))
    return sides


SOURCES = sides_of(FEW, shift=0)
TARGETS = sides_of(FEW, shift=2)


def kinds(sides):
    return {(side.zero, side.offload) for side in sides}


def test_sample_covers_every_pair_of_kinds():
    """Each source is loaded on each target, so these are all pairs of each."""
    for sides in (SOURCES, TARGETS):
        assert sorted(side.mesh for side in sides) == sorted(FEW)
        assert kinds(sides) == set(KINDS)


def check(faults, cases):
    assert len(faults) == sum(len(sources) for _, sources in cases)
    wrong = {f"{source} -> {target}": texts for (source, target), texts in faults.items() if texts}
    assert not wrong, wrong


CP = Side((1, 1, 2, 1), 3, model="shallow")
# Its share of a checkpoint is half of what the rank holds, and ends within a matrix.
COPIES = Side((1, 2, 1), 3, shards=1, model="shallow")
PIPELINE = TARGETS[FEW.index((2, 1, 1))]
EVERY_MESH = [(target, SOURCES) for target in TARGETS]
TO_AND_FROM_CP = [(CP, [SOURCES[1], CP]), (PIPELINE, [CP])]
FROM_COPIES = [(PIPELINE, [COPIES])]  # and to copies: test_host_memory.py


@pytest.fixture(scope="module")
def by_default(tmp_path_factory):
    """The faults of every source on every target of the tests below; each target is built once."""
    root = tmp_path_factory.mktemp("default")
    save([*SOURCES, CP, COPIES], root)
    sources_by_target = {}
    for target, sources in [*EVERY_MESH, *TO_AND_FROM_CP, *FROM_COPIES]:
        sources_by_target.setdefault(target, []).extend(sources)
    return load_all(sources_by_target.items(), root)


def test_every_mesh_loads_on_every_mesh(by_default):
    check({pair: by_default[pair] for pair in pairs(EVERY_MESH)}, EVERY_MESH)


def test_checkpoints_move_to_and_from_cp(by_default):
    check({pair: by_default[pair] for pair in pairs(TO_AND_FROM_CP)}, TO_AND_FROM_CP)


def test_checkpoints_move_from_copies(by_default):
    check({pair: by_default[pair] for pair in pairs(FROM_COPIES)}, FROM_COPIES)


def pairs(cases):
    return [(source, target) for target, sources in cases for source in sources]


@pytest.mark.slow
def test_checkpoints_move_to_and_from_two_copies_of_two_shards(tmp_path):
    sides = [COPIES, Side((1, 4, 1), 1, shards=2, model="shallow"), PIPELINE]
    save(sides, tmp_path)
    cases = [(target, sides) for target in sides]
    check(load_all(cases, tmp_path), cases)


# Both kinds of state in one checkpoint; the home of a matrix has no say in where momentum lies.
MUON = [
    Side((2, 1, 1), 3, "cpu", muon=True),
    Side((1, 1, 2), 0, muon=True),
    Side((1, 2, 1), 2, muon=True),
]


@pytest.mark.slow
def test_muon_states_move_between_meshes(tmp_path):
    save(MUON, tmp_path)
    cases = [(target, MUON) for target in MUON]
    check(load_all(cases, tmp_path), cases)


@pytest.mark.slow
def test_checkpoints_move_to_and_from_cp_with_every_axis(tmp_path):
    eight = [
        Side((1, 2, 2, 2), 3),
        Side((2, 1, 2, 2), 1),
        Side((2, 2, 2, 1), 2),
        Side((1, 1, 4, 1), 0),
        Side((2, 2, 2), 3, "cpu"),
        Side((1, 1, 1), 1),
    ]
    save(eight, tmp_path)
    cases = [(target, eight) for target in eight]
    check(load_all(cases, tmp_path), cases)


EP = [
    Side((1, 4, 1), 3, ep=2, model="moe"),
    Side((2, 1, 2), 1, model="moe"),
    Side((1, 4, 1), 0, ep=4, model="moe"),
    Side((1, 4, 1), 2, ep=2, model="moe"),
]


@pytest.mark.slow
def test_divided_experts_move_between_meshes(tmp_path):
    save(EP, tmp_path)
    cases = [(target, EP) for target in EP]
    check(load_all(cases, tmp_path), cases)


MANY_COPIES = [
    Side((2, 4, 1), 3, "cpu", shards=2),
    Side((1, 8, 1), 1, shards=4),
    Side((1, 2, 2, 2), 2, shards=1, precision="bf16"),
    Side((1, 4, 1), 3, shards=2, thresholds=True),
    Side((2, 2, 2), 3),
    Side((1, 1, 1), 0),
]
COPIES_OF_EXPERTS = [
    Side((1, 4, 1), 3, ep=2, shards=2, model="moe"),
    Side((1, 8, 1), 1, ep=2, shards=4, model="moe"),
    Side((2, 1, 2), 1, model="moe"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sides", [MANY_COPIES, COPIES_OF_EXPERTS], ids=["gpt", "moe"])
def test_copies_move_between_meshes(sides, tmp_path):
    save(sides, tmp_path, timeout=400)
    cases = [(target, sides) for target in sides]
    check(load_all(cases, tmp_path, timeout=400), cases)


DEEP = {"model": "deep", "stages_per_rank": 2}
LLAMA = {"model": "llama", "tied": False}
# Within each set, any side can be loaded on any other.
OTHERS = [
    [  # untied; the llama family, with more tp ranks than key/value heads
        Side((1, 1, 4), 3, **LLAMA),
        Side((2, 1, 2), 2, sequence_parallel=True, **LLAMA),
        Side((2, 2, 1), 1, **LLAMA),
    ],
    [  # several stages a rank, on any placement
        Side((2, 2, 1), 3, schedule="interleaved", **DEEP),
        Side((2, 1, 2), 1, schedule="v_shape", **DEEP),
        Side((4, 1, 1), 3, model="deep", schedule="one_f_one_b"),
    ],
    [  # the other ZeRO stages and offloads, other precisions
        Side((1, 4, 1), 0),
        Side((2, 2, 1), 3, "nvme"),
        Side((1, 2, 2), 2, "cpu", precision="bf16"),
        Side((1, 4, 1), 3, thresholds=True, sequence_parallel=True),
        Side((2, 1, 2), 3, "nvme", precision="bf16"),
        Side((1, 4, 1), 3, "cpu+param-cpu", precision="bf16"),
        Side((1, 1, 4), 0, "cpu", sequence_parallel=True),
    ],
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("async_io")
def test_other_models_schedules_and_stages_move_between_meshes(tmp_path):
    save([side for sides in OTHERS for side in sides], tmp_path, timeout=400)
    cases = [(side, sides) for sides in OTHERS for side in sides]
    check(load_all(cases, tmp_path, timeout=400), cases)


TIED = [Side(mesh, *kind, True) for mesh in MESHES for kind in KINDS]
UNTIED = [Side(mesh, *kind, False) for mesh in MESHES for kind in KINDS]
ALL = {True: TIED, False: UNTIED}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder in which every source is saved."""
    root = tmp_path_factory.mktemp("resharding")
    for mesh in MESHES:
        save([side for side in TIED + UNTIED if side.mesh == mesh], root, timeout=600)
    return root


@pytest.fixture(scope="module")
def measured(request):
    """Collects {(source, target): wrong}, and writes the table if the command line names a file."""
    start = time.monotonic()
    faults = {}
    yield faults
    if (file := request.config.getoption("--resharding-table")) and faults:
        insert(Path(file), markdown(faults, time.monotonic() - start))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_every_pair_of_all_meshes(mesh, tied, measured, saved):
    cases = [(target, ALL[tied]) for target in ALL[tied] if target.mesh == mesh]
    faults = load_all(cases, saved, timeout=600)
    measured.update(faults)
    check(faults, cases)
