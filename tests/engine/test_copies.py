"""Copies of ZeRO's shards (mesh.dp_shards): every mode equals one process of plain transformers."""

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
        reduction="per_microbatch", offload="cpu", changes=MUON
    ),
    "zero1 offloaded, one rank a copy": case_of(
        mesh=(1, 2, 1, 2), shards=1, zero_stage=1, offload="cpu", sequence_parallel=True
    ),
    "zero3 per pass, cp inside a copy": case_of(
        mesh=(1, 2, 2, 1), shards=1, weights="per_pass", precision="bf16"
    ),
}
MORE = {
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


@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_copies_equal_one_process(cases, cpu_adam):
    jobs = [(case, case.reference) for case in cases.values()]
    by_case = zip(*run_locally(compare_each, 4, jobs), strict=True)
    for (name, case), of_ranks in zip(cases.items(), by_case, strict=True):
        errors = errors_of(case.config, of_ranks)
        print(f"{name:40} {errors}")
        assert errors.within(TOLERANCE[case.precision]), (name, errors)


# A copy's ranks move what plain ZeRO of as many ranks moves; each rank's shard crosses once.
TRAFFIC = {
    "zero1": {"zero_stage": 1},
    "zero3": {"weights": "per_pass"},
}


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


@pytest.mark.parametrize(
    "traffic", [TRAFFIC, pytest.param(MORE_TRAFFIC, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_bytes_inside_a_copy_and_over_the_copies(traffic):
    # Hooks gather a weight that two layers share for each of them.
    sizes = {"steps": 1, "tied": False}
    copied = [case_of(**sizes | settings) for settings in traffic.values()]
    flat = [
        case_of(mesh=(1, 2, 1), shards=None, batch=4, **sizes | settings)
        for settings in traffic.values()
    ]
    plain = run_locally(moved_on_rank, 2, flat)
    for rank, rows in enumerate(run_locally(moved_on_rank, 4, copied)):
        for number, case in enumerate(copied):
            moved, elements = rows[number]
            of_plain, _ = plain[rank % 2][number]
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
