"""The executor on real ranks: what it did, action by action, is what the program says."""

import time
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from parallel3d.pipeline.clock import timing
from parallel3d.schedule.schedule import Op, add_sharding, peak_in_flight
from parallel3d.schedule.schedules import make_schedule, splits_backward
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import first_weights
from tests.cases import Case, Trainer, any_weights, train_on_rank
from tests.mesh.mortal import mortal
from tests.verify.measuring import batches, losses_of

pytestmark = pytest.mark.gloo

slow = partial(pytest.param, marks=pytest.mark.slow)
DROPOUT = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
SHALLOW = {"num_hidden_layers": 2}
# A wide start, so that a mask moves the loss by far more than rounding or chance.
WIDE = {"embd_pdrop": 0.5, "initializer_range": 0.1}


class Saved:
    """Something that autograd keeps for the backward of one stage and microbatch."""

    def __init__(self, tensor, place):
        self.tensor = tensor
        self.place = place


def watched_step(rank, case):
    """What a step did, and for which forwards activations were alive after each action."""
    with any_weights():
        trainer = Trainer(case)
    executor = trainer.executor
    mesh = trainer.mesh
    transfers = []
    alive = []
    saved = weakref.WeakSet()

    def recording(name):
        start = getattr(mesh, name)

        def record(tensor, pp_coord, tag):
            transfers.append((name, pp_coord, tag, tuple(tensor.shape), str(tensor.dtype)))
            return start(tensor, pp_coord, tag)

        setattr(mesh, name, record)

    def watching(method):
        def run(stage, microbatch):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: keep(Saved(t, (stage, microbatch))), lambda s: s.tensor
            ):
                method(stage, microbatch)
            alive.append(({s.place for s in saved}, set(executor.flow.outputs)))

        return run

    def keep(entry):
        saved.add(entry)
        return entry

    recording("isend"), recording("irecv")
    executor.methods = {op: watching(method) for op, method in executor.methods.items()}
    with timing(executor):
        executor.run(trainer.batches()[0])
    left = [
        executor.flow.inputs,
        executor.flow.outputs,
        executor.flow.gradients,
        executor.flow.arriving,
    ]
    return executor.spans, transfers, alive, sum(map(len, left)), *mesh.coords


WATCHED = [
    slow(Case(mesh=(4, 1, 1), schedule="one_f_one_b", microbatches=6, steps=1)),
    slow(Case(mesh=(2, 1, 2), schedule="gpipe", microbatches=3, steps=1)),
    Case(
        mesh=(2, 1, 1), schedule="interleaved", stages_per_rank=2, microbatches=6, steps=1,
        weights="per_pass",
    ),
    slow(Case(mesh=(2, 2, 1), schedule="v_shape", stages_per_rank=2, microbatches=6, steps=1)),
    Case(
        mesh=(2, 1, 1), schedule="v_shape", stages_per_rank=2, microbatches=6, steps=1,
        zero_stage=1,
    ),
    Case(mesh=(2, 1, 1), schedule="zero_bubble", microbatches=4, steps=1, zero_stage=1),
    slow(Case(mesh=(4, 1, 1), schedule="zero_bubble", microbatches=6, steps=1, zero_stage=1)),
]  # fmt: skip


@pytest.mark.parametrize("case", WATCHED, ids=str)
def test_executed_actions_equal_the_program(case):
    sizes = case.mesh[0], case.microbatches, case.stages_per_rank
    schedule = add_sharding(make_schedule(case.schedule, *sizes), case.weights, True)
    ranks = run_locally(watched_step, case.world_size, case)
    shape = (case.batch // case.microbatches // case.mesh[1], 16, 32)
    channels = {"isend": {}, "irecv": {}}
    for spans, transfers, alive, left, coord, *place in ranks:
        program = schedule.programs[coord]
        assert tuple(span.action for span in spans) == program
        assert spans[0].start == 0
        assert all(span.start <= span.end for span in spans)
        assert all(a.end <= b.start for a, b in pairwise(spans))
        assert spans[-1].end > 0

        # The SENDs and RECVs of the program, with the coordinate of the stage at the other end.
        moves = [a for a in program if a.is_send or a.is_receive]
        peers = [schedule.pp_coord_of_stage[a.other_end.stage] for a in moves]
        calls = ["isend" if a.is_send else "irecv" for a in moves]
        assert [t[:2] for t in transfers] == list(zip(calls, peers, strict=True))
        assert {t[3:] for t in transfers} == {(shape, "torch.float32")}
        for call, peer, tag, *_ in transfers:
            ends = (coord, peer) if call == "isend" else (peer, coord)
            channels[call].setdefault((*ends, *place), []).append(tag)

        # Exactly the forwards whose backward is to come hold activations.
        between = set()
        for action, held in zip(program, alive, strict=True):
            if action.op is Op.F:
                between = between | {action[1:]}
            elif action.op in (Op.B, Op.I):  # autograd no longer holds the needs of W
                between = between - {action[1:]}
            assert held == (between, between), action
        if not splits_backward(case.schedule):
            assert max(len(saved) for saved, _ in alive) == peak_in_flight(schedule)[coord]
        assert left == 0
    # What leaves one end of a channel arrives at the other, in the same order, each once.
    assert channels["isend"] == channels["irecv"]
    assert all(len(set(tags)) == len(tags) for tags in channels["isend"].values())


def evaluate_on_rank(rank, case):
    """Losses of a forward-only pass at the start and after training, and what it left behind."""
    trainer = Trainer(case)
    evaluator = trainer.evaluator
    batch = trainer.batches()[0]
    replicas = trainer.mesh.replicas.size * trainer.mesh.tensor.size

    def mean_loss(executor):
        rows = trainer.mesh.messages.gather_floats([executor.run(batch)])
        return sum(row[0] for row in rows) / replicas

    before = trainer.weights()
    first = mean_loss(evaluator)
    after = trainer.weights()
    same = all(torch.equal(a[-1], b[-1]) for a, b in zip(before, after, strict=True))
    grads = [h.name for h in trainer.engine.held if h.parameter.grad is not None]
    left = len(evaluator.flow.inputs) + len(evaluator.flow.outputs) + len(evaluator.flow.sending)
    trained, _ = trainer.run()
    return first, same, grads, left, trained, mean_loss(evaluator)


@pytest.mark.parametrize(
    "case",
    [
        slow(Case(mesh=(2, 1, 1), zero_stage=1, steps=2)),
        slow(Case(mesh=(2, 2, 1), steps=2)),  # test_every_schedule.py evaluates, too
        slow(Case(mesh=(2, 1, 2), steps=1, model=WIDE)),
        Case(mesh=(2, 1, 1), steps=1, batch=8, microbatches=2, model=WIDE),
    ],
    ids=lambda c: f"{c}{' dropout' if c.model else ''}",
)
def test_forward_only_program_evaluates(case):
    """Against transformers; the dropout of the model is off in it, and on in training."""
    config = case.config
    tokens, labels, _ = next(batches(config))
    start = losses_of(config, first_weights(config), tokens, labels).mean().item()
    ranks = run_locally(evaluate_on_rank, case.world_size, case)
    for first, same, grads, left, trained, last in ranks:
        assert first == pytest.approx(start, rel=1e-6)
        assert same and not grads and left == 0
        if case.model:
            assert abs(trained[0] - start) > 1e-3
            continue
        assert trained[0] == pytest.approx(start, rel=1e-6)
        end = losses_of(config, load_file(case.reference.weights), tokens, labels).mean().item()
        assert last == pytest.approx(end, rel=1e-5)


def train_twice(rank, case):
    """The same training without evaluations, and with two before and two within each step."""
    return [train_and_evaluate(case, evaluations) for evaluations in (0, 2)]


def train_and_evaluate(case, evaluations):
    with any_weights():
        trainer = Trainer(case)
    evaluator = trainer.evaluator
    losses = []
    norms = []
    for step, batch in enumerate(trainer.batches()):
        for _ in range(evaluations):
            evaluator.run(batch)
        losses.append(float(trainer.executor.run(batch, step)))
        for _ in range(evaluations):
            evaluator.run(batch)  # the gradients wait for the step meanwhile
        norms.append(trainer.engine.step(trainer.lr).grad_norm)
    weights = [w for *_, w in trainer.weights()]
    trainer.close()
    return losses, norms, weights


@pytest.mark.parametrize(
    "case",
    [
        Case(
            mesh=(2, 1, 1),
            batch=4,
            microbatches=2,
            checkpointing="full",
            model=DROPOUT | {"num_hidden_layers": 1},
        ),
        slow(
            Case(
                mesh=(1, 2, 1),
                batch=16,
                thresholds=True,
                schedule="one_f_one_b",
                model=DROPOUT,
            )
        ),
        slow(Case(mesh=(2, 2, 1), batch=16, zero_stage=1, reduction="per_microbatch")),
    ],
    ids=lambda c: f"{c}{' thresholds' if c.thresholds else ''}{' dropout' if c.model else ''}",
)
def test_evaluation_does_not_change_training(case):
    for without, among in run_locally(train_twice, case.world_size, case):
        assert without[:2] == among[:2]
        assert all(torch.equal(a, b) for a, b in zip(without[2], among[2], strict=True))


def fail_in_the_middle(rank, case, culprit):
    """What ended this rank's second step, and after how many seconds."""
    with any_weights():
        trainer = Trainer(case)
    first, second = trainer.batches()
    trainer.executor.run(first)
    trainer.engine.step(trainer.lr)
    if rank == culprit:
        backward = trainer.executor.methods[Op.B]

        def broken(stage, microbatch):
            if microbatch == 1:
                raise ArithmeticError("this rank alone")
            backward(stage, microbatch)

        trainer.executor.methods[Op.B] = broken
    trainer.mesh.barrier()
    start = time.monotonic()
    try:
        trainer.executor.run(second, 1)
        trainer.engine.step(trainer.lr)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None


RAISING = [
    Case(mesh=(2, 1, 2), schedule="gpipe", steps=2, batch=8, microbatches=2, model=SHALLOW),
    slow(Case(mesh=(4, 1, 1), schedule="one_f_one_b", steps=2, reduction="per_microbatch")),
]


@pytest.mark.parametrize("case", RAISING, ids=str)
def test_exception_on_one_rank_ends_all_ranks(case):
    culprit = case.world_size - 1
    results = run_locally(mortal, case.world_size, fail_in_the_middle, case, culprit)
    assert results[culprit][:2] == ("ArithmeticError", "this rank alone")
    for rank, result in enumerate(results):
        assert result is not None, f"rank {rank} ended its step without an error"
        assert result[2] < 15, (rank, result)


REPLICATED = DROPOUT | {"attn_pdrop": 0.0}  # tp ranks draw these masks alike


def curves(*models, **settings):
    """Losses and gradient norms of a few steps of each model."""
    small = {"batch": 8, "microbatches": 2, "zero_stage": 1}
    cases = [Case(model=model | SHALLOW, **small, **settings) for model in models]
    return [
        numbers[:2] for numbers in run_locally(train_each_on_rank, cases[0].world_size, cases)[0]
    ]


@pytest.fixture(scope="module")
def of_one_process():
    """The curves of one process with all dropouts, with the replicated ones, and with none."""
    return curves(DROPOUT, REPLICATED, {})


def train_each_on_rank(rank, cases):
    return [train_on_rank(rank, case) for case in cases]


PIPELINES = [
    slow({"checkpointing": "full"}),
    slow({"mesh": (2, 1, 1)}),
    {"mesh": (2, 1, 1), "schedule": "one_f_one_b", "checkpointing": "full"},
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_dropout_draws_the_same_masks_on_every_pipeline(pipeline, of_one_process):
    (losses, norms), _, (undropped, _) = of_one_process
    (other,) = curves(DROPOUT, **pipeline)
    assert other[0] == pytest.approx(losses, rel=1e-6)
    assert other[1] == pytest.approx(norms, rel=1e-5)
    assert min(abs(a - b) for a, b in zip(losses, undropped, strict=True)) > 2e-5


def test_replicated_dropouts_agree_over_tensor_parallel_ranks(of_one_process):
    (split, one, _) = of_one_process
    (split_over_two, two) = curves(DROPOUT, REPLICATED, mesh=(1, 1, 2))
    for single, double in zip(one, two, strict=True):
        assert double == pytest.approx(single, rel=1e-5)
    # Where activations are split the masks are each rank's own: not those of one process.
    assert split_over_two[0] != pytest.approx(split[0], rel=1e-5)
