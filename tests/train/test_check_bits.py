"""A single wrong bit in what several ranks hold is seen, and its rank and parameter are named."""

import json
import re
from functools import partial

import pytest
import torch

from parallel3d.base.errors import TrainingError
from parallel3d.train.check_bits import WrongBits, check_bits, noting_messages
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer
from tests.checkpoint.drill import changed, prepared_config
from tests.train.running import folder_of, start

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

CLEAN = 1  # steps before the faults; each is checked


def flip(trainer, kind, name, bit):
    """Flip a bit of the last element of a weight, or of a state's piece, on this rank."""
    if kind == "weight":
        held = next(h for h in trainer.engine.held if h.name == name)
        held.parameter.data.view(torch.int32).view(-1)[-1] ^= _mask(bit)
        return
    for number, pieces in enumerate(trainer.engine.states.blocks):
        for place, piece in enumerate(pieces):
            if piece.held.name == name:
                with trainer.engine.states.opened(number, write=True) as tensors:
                    tensors[place][kind].view(torch.int32)[-1] ^= _mask(bit)
                return
    raise AssertionError(f"{name} is not on this rank")


def _mask(bit):
    return -(2**31) if bit == 31 else 1 << bit


def check_on_rank(rank, case, faults):
    """What the check says about clean steps, and about each fault (rank, kind, name, bit)."""
    trainer = Trainer(case)
    messages = []
    stages = trainer.parts.schedule.pp_coord_of_stage
    ends = stages[0], stages[-1]
    for step, batch in zip(range(CLEAN), trainer.batches(), strict=True):
        trainer.executor.run(batch, step)
        norm = trainer.engine.step(trainer.lr).grad_norm
        check_bits(trainer.engine, trainer.mesh, norm, ends)
    for culprit, kind, name, bit in faults:
        is_norm = kind == "norm"
        if rank == culprit and not is_norm:
            flip(trainer, kind, name, bit)
        with pytest.raises(TrainingError) as raised:
            wrong = norm * (1 + 2**-50) if is_norm and rank == culprit else norm
            check_bits(trainer.engine, trainer.mesh, wrong, ends)
        messages.append(str(raised.value))
        if rank == culprit and not is_norm:
            flip(trainer, kind, name, bit)
    check_bits(trainer.engine, trainer.mesh, norm, ends)
    trainer.close()
    return messages


def check_all_on_rank(rank, checks):
    return [check_on_rank(rank, case, faults) for case, faults, _ in checks]


def check(*checks):
    """Run checks (case, faults, expected) in the same ranks.

    Each fault must name its kind of copy, its parameter and these ranks, on all ranks alike.
    """
    results = run_locally(check_all_on_rank, checks[0][0].world_size, checks)
    for (_, _, expected), ranks in zip(checks, zip(*results, strict=True), strict=True):
        check_messages(ranks, expected)


def check_messages(ranks, expected):
    assert all(messages == ranks[0] for messages in ranks)
    for text, (what, name, named) in zip(ranks[0], expected, strict=True):
        assert text.startswith(f"{what} differ in {name}: "), text
        assert [int(part.split()[0]) for part in text.split(" rank ")[1:]] == named, text
        assert ("one of" in text) == (len(named) > 1)


REPLICAS = "data-parallel replicas"
TP = "tensor-parallel copies"
TIED = "tied weights"
SHARDS = "copies of shards"
NORMS = "gradient norms"
CUT = "blocks.0.mlp.up.weight"
UNCUT = "blocks.0.norm1.weight"
TOKENS = "embedding.token.weight"
LAST = "head.norm.bias"
BITS = [0, 12, 22, 23, 30, 31]


def two_shards(number=2):
    return {"changes": {"parallel3d.mesh.dp_shards": number}}


def settings(**more):
    sizes = {"batch": 12, "microbatches": 2, "steps": CLEAN, "model": {"num_hidden_layers": 1}}
    return sizes | more


def test_replicas_and_copies_of_shards_over_dp():
    """Of three, the one that differs from two is named; each kind of state is compared.

    Masters and moments that are sharded have copies, too.
    """
    faults = [(2, "weight", CUT, 0), (1, "exp_avg_sq", UNCUT, 31), (0, "norm", "", 0)]
    expected = [(REPLICAS, CUT, [2]), (REPLICAS, UNCUT, [1]), (NORMS, NORMS, [0])]
    replicas = Case((1, 3, 1), zero_stage=0, **settings()), faults, expected
    faults = [(2, "master", CUT, 0), (1, "exp_avg_sq", UNCUT, 31)]
    expected = [(SHARDS, CUT, [2]), (SHARDS, UNCUT, [1])]
    shards = Case((1, 3, 1), zero_stage=1, **settings(**two_shards(1))), faults, expected
    check(replicas, shards)


def test_copies_over_tp_and_tied_weights():
    """Two copies do not tell which of them is wrong, so both ranks are named."""
    faults = [(3, "master", LAST, 22), (1, "exp_avg", TOKENS, 0)]
    expected = [(TP, LAST, [2, 3]), (TIED, TOKENS, [1, 3])]
    check((Case((2, 1, 2), zero_stage=1, **settings()), faults, expected))


MORE = [
    (
        (1, 4, 1),
        {"zero_stage": 3, "offload": "cpu", **two_shards()},
        (3, "exp_avg", CUT),
        (SHARDS, CUT, [1, 3]),
    ),
    ((1, 6, 1), {"zero_stage": 3, **two_shards()}, (4, "master", TOKENS), (SHARDS, TOKENS, [4])),
    ((1, 1, 4), {"zero_stage": 3}, (3, "master", UNCUT), (TP, UNCUT, [3])),
    ((1, 2, 2), {"zero_stage": 3}, (3, "exp_avg", UNCUT), (TP, UNCUT, [2, 3])),
    ((1, 2, 2), {"zero_stage": 1, "offload": "cpu"}, (0, "master", UNCUT), (TP, UNCUT, [0, 1])),
    ((2, 2, 1), {"zero_stage": 3}, (0, "master", TOKENS), (TIED, TOKENS, [0, 2])),
    ((1, 3, 1), {"zero_stage": 2}, (1, "weight", CUT), (REPLICAS, CUT, [1])),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "more", "fault", "expected"), MORE)
def test_every_bit_on_other_meshes(mesh, more, fault, expected):
    case = Case(mesh, **settings(**more))
    check((case, [(*fault, bit) for bit in BITS], [expected] * len(BITS)))


def swap_two_messages(send, tensor, pp_coord, tag):
    """The first two activations of the first stage reach each other's receives."""
    return send(tensor, pp_coord, {2: 6, 6: 2}.get(tag, tag))


def flip_on_the_way(send, tensor, pp_coord, tag):
    """A bit of the first gradient that a stage sends back, once it is on its way."""
    if tag == 1:
        tensor = tensor.clone()
        tensor.view(torch.int32).view(-1)[-1] ^= 1
    return send(tensor, pp_coord, tag)


def messages_on_rank(rank, case, culprit, plant):
    """What the check says of a clean step, and of a step whose messages `plant` changes."""
    trainer = Trainer(case)
    batch = None
    errors = []
    for fault in (None, plant):
        send = trainer.mesh.isend
        if fault and rank == culprit:
            trainer.mesh.isend = partial(fault, send)
        batch = batch or next(iter(trainer.batches()))
        with noting_messages(trainer.executor, True) as messages:
            trainer.executor.run(batch)
        trainer.mesh.isend = send
        norm = trainer.engine.step(trainer.lr).grad_norm
        try:
            check_bits(trainer.engine, trainer.mesh, norm, (0, case.mesh[0] - 1), messages)
        except WrongBits as error:
            errors.append(str(error))
    trainer.close()
    return errors


@pytest.mark.parametrize(
    ("case", "culprit", "plant", "expected"),
    [
        (
            Case((2, 1, 1), zero_stage=1, **settings()),
            0,
            swap_two_messages,
            r"rank 1 on \S+ received other bits in 1RECV_F0 than rank 0 on \S+ sent: those of "
            r"1RECV_F1; rank 1 on \S+ received other bits in 1RECV_F1 .*: those of 1RECV_F0\. ",
        ),
        pytest.param(
            Case((2, 2, 1), zero_stage=3, **settings()),
            3,
            flip_on_the_way,
            r"rank 1 on \S+ received other bits in 0RECV_B0 than rank 3 on \S+ sent\. ",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["swapped", "flipped"],
)
def test_changed_message_is_named(case, culprit, plant, expected):
    """No copy differs, and no layer computes wrong bits: the ends of the channel differ."""
    ranks = run_locally(messages_on_rank, case.world_size, case, culprit, plant)
    assert all(errors == ranks[0] for errors in ranks)
    (text,) = ranks[0]
    assert re.match(expected, text), text


def spoil_a_replica(rank):
    """Rank 1 flips a bit of a weight after its second step."""
    from parallel3d.train import trainer as trainer_module

    take_step = trainer_module.Trainer.take_step

    def spoiled(self, step, *args):
        taken = take_step(self, step, *args)
        if rank == 1 and step == 1:
            self.engine.held[-1].parameter.data.view(torch.int32).view(-1)[0] ^= 1
        return taken

    trainer_module.Trainer.take_step = spoiled


def test_run_with_wrong_bits_stops_without_saving_step(tmp_path):
    raw = prepared_config(tmp_path)
    own = {"run.name": "bits", "train.check_bits": {"every": 1}, "checkpoint.asynchronous": False}
    changes = {f"parallel3d.{name}": value for name, value in own.items()}
    raw = changed(raw, changes | {"zero_optimization.stage": 0})
    ranks = start(raw, (1, 2, 1), spoil_a_replica)
    assert all("after step 2 data-parallel replicas differ in" in r.error for r in ranks), ranks
    folder = folder_of(raw)
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-1"]
    event = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["step"]) == ("wrong_bits", 2)
