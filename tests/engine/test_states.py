"""The engine's states: every element once, with true values; a resumed run is bitwise unbroken."""

from dataclasses import replace
from functools import cache
from itertools import product
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from parallel3d.models import huggingface
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import in_our_names
from tests.cases import Case, Trainer
from tests.engine.storage_bytes import memory_bytes
from tests.train import resuming
from tests.train.resuming import copy_out, differences, load, run_resumed, run_unbroken, train
from tests.verify.measuring import reference_on_batches

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("operators")]

KINDS = ("master", "exp_avg", "exp_avg_sq")
SMALL = {"steps": 4, "batch": 2, "microbatches": 1, "model": {"num_hidden_layers": 1}}
TWO = Case(mesh=(1, 2, 1), **SMALL)
# CPU Adam's running products are first off in the step after the fifth.
BY_CPU_ADAM = replace(TWO, steps=5 + resuming.AFTER)
SCALED = {
    "fp16.initial_scale_power": 18,
    "fp16.loss_scale_window": 2,
    "fp16.hysteresis": 2,
}


def expected(case, folder):
    """Weights and moments of an AdamW of torch's own, by name."""
    made = []
    family = huggingface("gpt")

    class Kept(torch.optim.AdamW):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    with patch("torch.optim.AdamW", Kept):
        reference = reference_on_batches(case.config, folder)
    weights = family.to_huggingface(case.config.model, load_file(reference.weights))
    states = {}
    for name, weight in weights.items():
        [state] = [s for p, s in made[0].state.items() if _same(p.detach().float(), weight)]
        kinds = {"master": weight, **{k: state[k].float() for k in KINDS[1:]}}
        for kind, value in kinds.items():
            states.setdefault(kind, {})[name] = value
    by_kind = {k: in_our_names(case.config.model, v) for k, v in states.items()}
    return {name: {k: by_kind[k][name] for k in KINDS} for name in by_kind["master"]}


def _same(a, b):
    return a.shape == b.shape and torch.equal(a, b)


def pieces(rank, case):
    """This rank's pieces after training; its masters are what `full_parameter` gives."""
    trainer = Trainer(case)
    trainer.run()
    engine = trainer.engine
    rank_pieces = []
    copies = copy_out(engine)
    held = sum(t.nbytes for block in copies for kinds in block for t in kinds.values())
    on_nvme = engine.settings.zero.offload_optimizer.device == "nvme"
    # Of what lies on NVMe no tensor stays in memory; small ones never leave it.
    assert (memory_bytes(engine)["optimizer"] < held / 5) is on_nvme
    whole = {h.name: engine.full_parameter(h).flatten().cpu() for h in engine.held}
    for block, tensors in zip(engine.states.blocks, copies, strict=True):
        for piece, kinds in zip(block, tensors, strict=True):
            part = whole[piece.held.name].narrow(0, piece.start, piece.numel)
            assert piece.numel > 0
            assert torch.equal(kinds["master"], part)
            rank_pieces.append(
                (piece.held.name, piece.held.cut, piece.held.copy, piece.start, kinds)
            )
    assert engine.states.counters() == {"optimizer_steps": case.steps, "loss_scale": None}
    trainer.close()
    return rank_pieces


@pytest.mark.parametrize(
    "case",
    [
        # Copies of one state by default: tests/checkpoint/test_checksums.py.
        *(pytest.param(replace(TWO, zero_stage=stage), marks=pytest.mark.slow) for stage in (0, 1)),
        replace(TWO, zero_stage=2, offload="cpu", steps=2),
        replace(TWO, steps=2),
        # Parts of tp ranks by default: tests/checkpoint/test_resharding.py.
        pytest.param(replace(TWO, mesh=(1, 2, 2)), marks=pytest.mark.slow),
        pytest.param(replace(TWO, mesh=(2, 1, 1)), marks=pytest.mark.slow),
        # What is read of NVMe starts the next run bit for bit: below.
        pytest.param(replace(TWO, offload="nvme+param-nvme"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pieces_tile_each_part_and_hold_the_states_of_adam(case, tmp_path):
    case = replace(case, folder=str(tmp_path))
    all_pieces = [piece for rank in run_locally(pieces, case.world_size, case) for piece in rank]
    want = expected(case, tmp_path)
    seen = {}
    for name, cut, copy, start, kinds in all_pieces:
        name = "embedding.token.weight" if copy else name
        times = seen.setdefault((name, cut.parts, copy), torch.zeros(cut.local_shape).flatten())
        times[start : start + kinds["master"].numel()] += 1
        for kind, tensor in kinds.items():
            whole = cut.part_of(want[name][kind])
            part = whole.flatten()[start : start + tensor.numel()]
            error = float((tensor - part).abs().max() / whole.abs().max())
            # A key's bias has no gradient but rounding, of which Adam makes whole steps.
            assert error < 2e-5, (name, kind, error)
    assert {name for name, *_ in seen} == want.keys()
    _, dp, tp = case.mesh
    for (name, *_), times in seen.items():
        copies = dp if case.zero_stage == 0 else 1
        cut_in_tp = sum(1 for n, *_ in seen if n == name) > 1
        assert bool((times == copies * (1 if cut_in_tp else tp)).all()), (name, times)


PIPELINED = {
    "zero_optimization.offload_optimizer.pipeline_read": True,
    "zero_optimization.offload_optimizer.pipeline_write": True,
    "zero_optimization.offload_optimizer.buffer_count": 12,
    "zero_optimization.sub_group_size": 2000,
}
EXACT = {
    "zero0": replace(TWO, zero_stage=0),
    "zero1": replace(TWO, zero_stage=1),
    "zero2": replace(TWO, zero_stage=2),
    "zero3": replace(TWO, mesh=(1, 1, 1)),
    "zero3 kept gathered": replace(TWO, thresholds=True),
    "zero3+cpu": replace(BY_CPU_ADAM, offload="cpu"),
    "zero3+cpu+param-cpu": replace(BY_CPU_ADAM, offload="cpu+param-cpu"),
    "zero1+cpu": replace(BY_CPU_ADAM, zero_stage=1, offload="cpu"),
    # Reads and writes ahead, over several sub-groups.
    "zero3+nvme pipelined": replace(BY_CPU_ADAM, mesh=(1, 1, 1), offload="nvme", changes=PIPELINED),
    "zero3+nvme+param-nvme": replace(BY_CPU_ADAM, mesh=(1, 1, 1), offload="nvme+param-nvme"),
    "zero1 bf16": replace(TWO, zero_stage=1, precision="bf16"),
    "zero3 bf16": replace(TWO, precision="bf16"),
    "zero3 fp16": replace(TWO, precision="fp16", steps=6, changes=SCALED),
}


@cache
def unbroken(name):
    with TemporaryDirectory() as folder:
        return run_unbroken(replace(EXACT[name], folder=folder))


# One of each offload and precision that keeps its state in a way of its own. ZeRO-1, on the host:
# test_trained_engine_can_be_reset, and tests/checkpoint/test_resharding.py.
OWN_WAYS = ["zero3", "zero3+nvme+param-nvme", "zero3 fp16"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OWN_WAYS else pytest.mark.slow) for n in EXACT]
)
def test_resumed_run_is_bitwise_equal(name, tmp_path):
    case = replace(EXACT[name], folder=str(tmp_path))
    saved, ends = unbroken(name)
    assert differences(ends, run_resumed(case, saved)) == set()
    if case.precision == "fp16":
        _, _, counters = ends[0]
        assert 0 < counters["optimizer_steps"] < case.steps
        assert counters["loss_scale"]["cur_iter"] == case.steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero_stage", "precision", "offload"),
    [
        *product([(2, 2, 1), (1, 2, 2)], [0, 1, 2, 3], ["fp32", "bf16", "fp16"], ["none"]),
        *product([(2, 2, 1), (1, 2, 2)], [1, 2], ["fp32", "bf16", "fp16"], ["cpu"]),
        *product(
            [(2, 2, 1), (1, 2, 2)],
            [3],
            ["fp32", "bf16", "fp16"],
            [
                "cpu",
                "param-cpu",
                "cpu+param-cpu",
                "nvme",
                "param-nvme",
                "cpu+param-nvme",
                "nvme+param-cpu",
                "nvme+param-nvme",
            ],
        ),
    ],
    ids=str,
)
def test_resumed_run_is_bitwise_equal_in_full(
    mesh, zero_stage, precision, offload, request, tmp_path
):
    case = replace(
        BY_CPU_ADAM,
        mesh=mesh,
        zero_stage=zero_stage,
        precision=precision,
        offload=offload,
        changes=SCALED if precision == "fp16" else {},
    )
    case = replace(case, folder=str(tmp_path))
    saved, ends = run_unbroken(case)
    assert differences(ends, run_resumed(case, saved)) == set()


@pytest.mark.parametrize(
    ("name", "how", "sees"),
    [
        pytest.param("zero1", resuming.no_finish, "results", marks=pytest.mark.slow),
        pytest.param("zero3 bf16", resuming.no_finish, "results", marks=pytest.mark.slow),
        ("zero3", resuming.no_counters, "master"),
        pytest.param("zero3+cpu", resuming.no_counters, "master", marks=pytest.mark.slow),
        pytest.param("zero3 fp16", resuming.no_counters, "counters", marks=pytest.mark.slow),
    ],
)
def test_forgotten_state_is_detected(name, how, sees, tmp_path):
    case = replace(EXACT[name], folder=str(tmp_path))
    saved, ends = unbroken(name)
    others = run_resumed(case, saved, how)
    assert sees in differences(ends, others)


def go_back(rank, case):
    """Return the ends of a run twice: the second time after it was reset to its middle."""
    trainer = Trainer(case)
    engine = trainer.engine
    before = {h.name: engine.full_parameter(h) for h in engine.held}
    for block in copy_out(engine):  # reading makes nothing up, and changes nothing
        assert not any(kinds[k].any() for kinds in block for k in KINDS[1:])
    assert engine.states.counters()["optimizer_steps"] == 0
    assert all(torch.equal(engine.full_parameter(h), before[h.name]) for h in engine.held)
    train(trainer, 0, 2)
    saved = copy_out(engine), engine.states.counters()
    ends = []
    for _ in range(2):
        load(engine, saved)
        outputs = train(trainer, 2, 5)
        ends.append((outputs, copy_out(engine), engine.states.counters()))
    trainer.close()
    return ends


@pytest.mark.parametrize(
    "name",
    [
        "zero1+cpu",
        pytest.param("zero3 bf16", marks=pytest.mark.slow),
        pytest.param("zero3 kept gathered", marks=pytest.mark.slow),
        pytest.param("zero3+nvme+param-nvme", marks=pytest.mark.slow),
    ],
)
def test_trained_engine_can_be_reset(name, tmp_path):
    case = replace(EXACT[name], folder=str(tmp_path))
    ends = run_locally(go_back, case.world_size, case)
    assert differences(*zip(*ends, strict=True)) == set()
