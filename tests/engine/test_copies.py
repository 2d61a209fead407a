"""Copies of ZeRO's shards (mesh.dp_shards): every mode equals one process of plain transformers."""

from dataclasses import dataclass

import pytest

from parallel3d.mesh.traffic import Traffic
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.traffic import shard_traffic
from parallel3d.tensor.cut import is_of_experts
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE
from tests.cases import Case, Trainer, compare_on_rank
from tests.pipeline.test_experts import MOE
from tests.verify.measuring import errors_of, number_anew

pytestmark = pytest.mark.gloo

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "weight_decay": 0.1}}}


SMALL = {"batch": 8, "microbatches": 2, "model": {"num_hidden_layers": 1}}


def case_of(mesh=(1, 4, 1), shards=2, changes=(), **settings):
    changes = {"parallel3d.mesh.dp_shards": shards, **dict(changes)}
    return Case(mesh=mesh, changes=changes, **SMALL | settings)


# Each way in which gradients are reduced.
CASES = {
    "zero3 per microbatch, offloaded, Muon": case_of(
        reduction="per_microbatch", offload="cpu", steps=1, changes=MUON
    ),
    "zero1 offloaded, one rank a copy": case_of(
        mesh=(1, 2, 1), shards=1, zero_stage=1, offload="cpu"
    ),
    "zero3 per pass, cp inside a copy": case_of(
        mesh=(1, 2, 2, 1),
        shards=1,
        weights="per_pass",
        precision="bf16",
        batch=4,
        microbatches=1,
    ),
}
MORE = {
    "zero1 offloaded, tp, one rank a copy": case_of(
        mesh=(1, 2, 1, 2), shards=1, zero_stage=1, offload="cpu", sequence_parallel=True
    ),
    "zero2 per microbatch, fp16": case_of(
        zero_stage=2, reduction="per_microbatch", precision="fp16"
    ),
    "zero3": case_of(),
    "zero1 bf16": case_of(zero_stage=1, precision="bf16"),
}


def compare_each(rank, cases):
    """Train the cases one after another on one rank, and compare each with its reference."""
    deviations = []
    for case, reference in cases:
        number_anew()
        deviations.append(compare_on_rank(rank, case, reference))
    return deviations


# A copy's ranks move what plain ZeRO of as many ranks moves; each rank's shard crosses once.
TRAFFIC = {"zero3": {"weights": "per_pass", "microbatches": 1}}


def moved_on_rank(rank, cases):
    """Each case's bytes of a step by group and operation, and the elements of the rank's shards."""
    rows = []
    for case in cases:
        number_anew()
        trainer = Trainer(case)
        with Traffic(trainer.mesh) as traffic:
            trainer.executor.run(trainer.batches()[0], 0)
            trainer.engine.step(trainer.lr)
        mesh = trainer.mesh
        names = {
            mesh.name_of(mesh.copies.group): "across",
            mesh.name_of(mesh.shards.group): "inside",
        }
        moved = {}
        for calls in traffic.calls:
            group = names.get(calls.group, calls.group)
            moved.setdefault(group, {})[calls.operation] = calls.bytes
        shards = trainer.mesh.shards.size
        elements = 0
        for h in trainer.engine.held:
            parts = shards // trainer.mesh.experts.size if is_of_experts(h.parameter) else shards
            elements += h.elements / parts
        rows.append((moved, elements))
        trainer.close()
    return rows


MORE_TRAFFIC = {
    "zero1": {"zero_stage": 1},
    "zero3 per microbatch": {"reduction": "per_microbatch"},
    "bf16 sums": {
        "zero_stage": 3,
        "precision": "bf16",
        "changes": {"communication_data_type": "bf16"},
    },
    "experts": {
        "model": MOE | {"router_z_loss_coef": 0.01, "num_hidden_layers": 1},
        "changes": {"parallel3d.mesh.ep": 2},
    },
}


def both_on_rank(rank, jobs, cases):
    return compare_each(rank, jobs), moved_on_rank(rank, cases)


@dataclass(frozen=True)
class Results:
    """What the ranks of some cases found.

    - `deviations`: of each case's ranks, by its name.
    - `copied`: cases on four ranks; `moved`: what each of these ranks moved for each.
    - `plain`: what each of two ranks of plain ZeRO moved for each.
    """

    deviations: dict
    copied: list
    moved: list
    plain: list


def run_all(cases, traffic):
    """Compare cases and count the bytes of others, in one start of two ranks and one of four."""
    # Hooks gather a weight that two layers share for each of them.
    sizes = {"steps": 1, "tied": False}
    flat_sizes = sizes | {"mesh": (1, 2, 1), "shards": None, "batch": 4}
    moving = {
        2: [case_of(**flat_sizes | settings) for settings in traffic.values()],
        4: [case_of(**sizes | settings) for settings in traffic.values()],
    }
    deviations = {}
    moved = {}
    for size, counted in moving.items():
        compared = {name: case for name, case in cases.items() if case.world_size == size}
        jobs = [(case, case.reference) for case in compared.values()]
        by_rank, moved[size] = zip(*run_locally(both_on_rank, size, jobs, counted), strict=True)
        deviations |= zip(compared, zip(*by_rank, strict=True), strict=True)
    return Results(deviations, moving[4], moved[4], moved[2])


@pytest.fixture(scope="module")
def few(cpu_adam):
    return run_all(CASES, TRAFFIC)


@pytest.fixture(scope="module")
def more(cpu_adam):
    return run_all(MORE, MORE_TRAFFIC)


def check_numbers(cases, results):
    for name, case in cases.items():
        errors = errors_of(case.config, results.deviations[name])
        print(f"{name:40} {errors}")
        assert errors.within(TOLERANCE[case.precision]), (name, errors)


def test_copies_equal_one_process(few):
    check_numbers(CASES, few)


@pytest.mark.slow
def test_other_copies_equal_one_process(more):
    check_numbers(MORE, more)


def test_bytes_inside_a_copy_and_over_the_copies(few):
    check_bytes(few)


@pytest.mark.slow
def test_bytes_of_other_copies(more):
    check_bytes(more)


def check_bytes(results):
    for rank, rows in enumerate(results.moved):
        for number, case in enumerate(results.copied):
            moved, elements = rows[number]
            of_plain, _ = results.plain[rank % 2][number]
            inside = moved.pop("inside")
            across = moved.pop("across")
            size = 2 if case.changes.get("communication_data_type") else 4
            # ZeRO-1 cuts a flat tensor: one of two ranks has more. ZeRO-3 has one more element for
            # each of its groups of parameters (docs/deepspeed.md).
            extra = across.pop("all_reduce") - size * elements
            assert not across
            if case.zero_stage == 1:
                assert abs(extra) < 0.01 * size * elements
            else:
                assert 0 <= extra <= 2 * size
            of_plain = of_plain["inside"]
            of_plain.pop("all_to_all", None)  # experts' tokens, between the same ranks there
            scalars = 64  # bytes of norms and losses
            assert inside.keys() <= of_plain.keys()
            for operation, num_bytes in of_plain.items():
                assert abs(inside.get(operation, 0) - num_bytes) <= scalars, (operation, case)
            moved.pop("ep", None)  # experts' tokens
            assert sum(sum(moves.values()) for moves in moved.values()) <= scalars
            planned = shard_traffic(Setting.from_config(case.config))
            assert planned.summed == pytest.approx(size * elements, rel=1e-3)
            if case.zero_stage == 3:
                assert planned.gathered == pytest.approx(inside["all_gather"], rel=0.01)
                assert planned.reduced == pytest.approx(inside["reduce_scatter"], rel=0.01)
