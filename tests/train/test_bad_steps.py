"""Batches whose loss or gradient is wrong: skipped or rewound, as one process would skip them."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from parallel3d.base import robust
from parallel3d.base.robust import FEWEST, robust_score
from parallel3d.config.deepspeed import Fp16Config
from parallel3d.config.parallel3d_block import TrainConfig
from parallel3d.pipeline.executor import Executor
from parallel3d.train import feed as feed_module
from parallel3d.train import trainer as trainer_module
from parallel3d.train.bad_steps import MOST_OVERFLOWS, WINDOW, BadSteps, Overflows
from parallel3d.train.ending import DONE, STOPPED
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import weight_error, weight_errors
from parallel3d.verify.reference import Course, train_reference
from tests.cases import Case, Trainer
from tests.checkpoint.drill import changed, prepared_config
from tests.train.running import folder_of, start, start_all
from tests.verify.measuring import batches

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

BATCH = 8
LEFT_OUT = 1
FEW = 4


# The engine: a refused step changes nothing, whatever holds the state.


def refuse_one(rank, case, reference):
    """Losses of the steps that are kept, and the errors of the weights after all of them."""
    trainer = Trainer(case)
    losses = []
    for step, batch in enumerate(trainer.batches()):
        rows = trainer.mesh.messages.gather_floats([trainer.executor.run(batch, step)])
        norms = []

        def is_kept(norm, step=step, norms=norms):
            norms.append(float(norm))
            return step != LEFT_OUT

        done = trainer.engine.step(trainer.lr, is_kept)
        assert norms == [done.grad_norm] and norms[0] > 0
        assert done.applied == (step != LEFT_OUT) and not done.overflow
        if done.applied:
            losses.append(sum(row[0] for row in rows) / (case.mesh[1] * case.mesh[2]))
    errors = weight_errors(trainer.parts, trainer.config, reference)
    counters = trainer.engine.states.counters()
    trainer.close()
    return losses, errors, counters


def check_refusal(case, tolerance=1e-5):
    config = case.config
    kept = [batch for step, batch in enumerate(batches(config)) if step != LEFT_OUT]
    course = Course(kept, [config.optimizer.params.lr] * len(kept), kept[-1])
    with TemporaryDirectory() as folder:
        reference = train_reference(config, Path(folder), course)
        ranks = run_locally(refuse_one, case.world_size, case, reference)
    for losses, _, counters in ranks:
        assert losses == pytest.approx(reference.losses, rel=tolerance)
        assert counters["optimizer_steps"] == len(kept)
    assert weight_error(config, [errors for _, errors, _ in ranks]) < 10 * tolerance


FP16 = {"precision": "fp16", "changes": {"fp16.initial_scale_power": 8}}
CASES = [
    ((1, 2, 1), {"zero_stage": 3, "offload": "cpu"}),
    ((1, 2, 1), {"zero_stage": 1}),
    *(((1, 2, 1), {"zero_stage": z}) for z in (0, 2, 3)),
    *(((1, 2, 1), {"zero_stage": z, "offload": "cpu"}) for z in (1, 2)),
    ((2, 1, 1), {"zero_stage": 3, "offload": "cpu"}),
    ((1, 2, 1), {"zero_stage": 3, "offload": "cpu+param-cpu"}),
    ((1, 2, 1), {"zero_stage": 3, "offload": "nvme+param-nvme"}),
    ((1, 2, 1), {"zero_stage": 3, "reduction": "per_microbatch"}),
    ((2, 2, 1), {"zero_stage": 3, "weights": "per_step"}),
    ((2, 1, 2), {"zero_stage": 2, "sequence_parallel": True}),
    *(((2, 1, 1), {"zero_stage": z} | FP16) for z in (1, 3)),
]


@pytest.mark.slow  # by default the trainer's runs skip at ZeRO-3
@pytest.mark.parametrize(("mesh", "settings"), CASES)
def test_refused_step_changes_nothing(tmp_path, mesh, settings):
    settings = settings | {"folder": str(tmp_path)}
    check_refusal(
        Case(mesh, batch=8, microbatches=2, steps=4, **settings),
        tolerance=1e-3 if "precision" in settings else 1e-5,
    )


# The trainer: what it decides, and the batches that it leaves out.


SPOILED = {"batches": [], "factor": 1.0, "at": None}


def spoil(rank, batches, factor):
    """Multiply the loss of some batches by a factor, on the ranks that have it."""
    is_new = SPOILED["at"] is None
    SPOILED.update(batches=batches, factor=factor, at=0)
    step_of = trainer_module.Trainer.take_step
    run = Executor.run

    def placed(self, *args):
        SPOILED["at"] = self.position.next_sample // BATCH
        return step_of(self, *args)

    def spoiled(self, batch, step=0):
        loss = run(self, batch, step)
        is_bad = SPOILED["at"] in SPOILED["batches"]
        return loss * SPOILED["factor"] if is_bad else loss

    if is_new:
        trainer_module.Trainer.take_step = placed
        Executor.run = spoiled


def spoil_soon(rank, batches, factor):
    """As `spoil`, where a score can be told from FEW earlier values."""
    robust.FEWEST = FEW
    spoil(rank, batches, factor)


def leave_out(rank, batches, first_sample=feed_module.first_sample):
    """Let training do without some batches: those behind them move up."""

    def moved(begin, *args, **options):
        kept = (n for n in range(10**6) if n not in batches)
        batch = next(n for i, n in enumerate(kept) if i == begin // BATCH)
        return first_sample(batch * BATCH, *args, **options)

    feed_module.first_sample = moved


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Equal on every mesh and for every place of a batch: no dropout, one learning rate."""
    raw = prepared_config(tmp_path_factory.mktemp("bad-steps"))
    settings = {f"parallel3d.model.{n}_pdrop": 0.0 for n in ("embd", "resid", "attn")}
    settings |= {"parallel3d.train.lr_schedule": {"type": "constant"}}
    settings |= {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 2}
    raw = changed(raw, settings | {"parallel3d.checkpoint.asynchronous": False})
    del raw["gradient_accumulation_steps"]
    return raw


def named(raw, name, **changes):
    changes = {f"parallel3d.{k.replace('__', '.')}": v for k, v in changes.items()}
    return changed(raw, {"parallel3d.run.name": name} | changes)


def lines(raw, file="metrics.jsonl"):
    return list(map(json.loads, (folder_of(raw) / file).read_text().splitlines()))


def events(raw):
    journal = lines(raw, "events.jsonl")
    return [e for e in journal if e["event"] in ("skip", "rewind")]


# One microbatch, for runs of one process whose numbers are those of any.
QUICK = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization.stage": 1}
ONE_LAYER = {"parallel3d.model.num_hidden_layers": 1}
CPU = {"device": "cpu"}
ZERO = [
    {"stage": 3},
    *(
        pytest.param(zero, marks=pytest.mark.slow)
        for zero in (
            {"stage": 0},
            {"stage": 1},
            {"stage": 2},
            {"stage": 1, "offload_optimizer": CPU},
            {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
        )
    ),
]


@pytest.mark.parametrize("zero", ZERO, ids=str)
def test_batches_are_left_out_as_one_process_would(config, zero):
    """Skip batches 1 and 2, or rewind from 2 to step 1: one process trains on the others."""
    options = {"checkpoint__every": 0, "checkpoint__at": [1]}
    changes = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": BATCH}
    changes["parallel3d.pipeline.activation_checkpointing"] = "none"
    config = changed(config, changes)
    kind = f"{zero['stage']}-{len(zero)}"
    options["train__on_nonfinite"] = "skip"
    skip = named(config, f"skip-{kind}", train__steps=5, **options)
    options["train__on_nonfinite"] = "rewind"
    rewind = named(config, f"rewind-{kind}", train__steps=3, **options)
    runs = [(skip, spoil, [1, 2], float("nan")), (rewind, spoil, [2], float("inf"))]
    for ended in start_all(runs, (2, 1, 1)):
        assert [e.code for e in ended] == [DONE] * 2, ended
    config = changed(config, QUICK | {"zero_optimization": {"stage": 1}})
    plain = named(config, f"plain-{kind}", train__steps=3, **options)
    (ended,) = start(plain, (1, 1, 1), leave_out, [1, 2])
    assert ended.code == DONE, ended
    kept = lines(skip)
    skipped = [kept.pop(1), kept.pop(1)]
    assert all(line["loss"] is None and line["grad_norm"] > 0 for line in skipped)
    theirs = lines(plain)
    for ours in (kept, lines(rewind)):
        assert len(ours) == len(theirs) == 3
        for key in ("loss", "grad_norm"):
            assert [x[key] for x in ours] == pytest.approx([x[key] for x in theirs], rel=1e-5)
    first, second = events(skip)
    (third,) = events(rewind)
    assert (first["step"], first["samples"], first["count"]) == (2, [8, 15], 1)
    assert (second["step"], second["samples"], second["count"]) == (3, [16, 23], 2)
    assert (third["step"], third["to"], third["samples"]) == (3, 1, [8, 23])
    assert first["reason"].startswith("the loss on rank ") and third["reason"].endswith(" is nan")


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_resumed_run_decides_alike(config, dp):
    """A spike after the resume is measured by the steps before it; the bits are the same."""
    bad = FEW + 2
    options = {"train__steps": bad + 2, "checkpoint__every": 50, "train__on_spike": "skip"}
    options |= {"train__digest_every": 3, "pipeline__activation_checkpointing": "none"}
    quick = QUICK | ONE_LAYER | {"train_micro_batch_size_per_gpu": BATCH // dp}
    config = changed(config, quick)
    whole, half = (named(config, f"{name}-{dp}", **options) for name in ("whole", "half"))
    first = changed(half, {"parallel3d.train.stop_after": bad - 1})
    runs = start_all([(whole, spoil_soon, [bad], 3.0), (first,), (half,)], (1, dp, 1))
    codes = [[e.code for e in ended] for ended in runs]
    assert codes == [[DONE] * dp, [STOPPED] * dp, [DONE] * dp]
    ours = lines(half)
    theirs = lines(whole)
    assert len(ours) == bad + 2
    for key in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [line[key] for line in ours] == [line[key] for line in theirs]
    digests = lines(half, "digests.jsonl")
    assert [line["step"] for line in digests] == [3, 6]
    assert digests == lines(whole, "digests.jsonl")  # one chain, whoever wrote it
    states = [
        json.loads((folder_of(raw) / f"checkpoints/step-{bad + 2}/state.json").read_text())
        for raw in (half, whole)
    ]
    assert states[0]["bad_steps"] == states[1]["bad_steps"]
    assert states[0]["bad_steps"]["count"] == 1 and states[0]["optimizer_steps"] == bad + 1
    kept = [line["loss"] for line in theirs if line["step"] != bad + 1]
    assert states[0]["bad_steps"]["losses"] == kept  # later steps are not measured by the spike
    (event,) = events(half)
    assert event["step"] == bad + 1 and "the loss spikes to" in event["reason"]
    assert [e["samples"] for e in events(whole)] == [event["samples"]]


def test_too_many_bad_batches_stop_the_run(config):
    config = changed(config, QUICK | ONE_LAYER)
    options = {"train__steps": 3, "checkpoint__every": 2, "train__max_skips": 1}
    skip = named(config, "most", train__on_nonfinite="skip", **options)
    early = named(config, "early", train__on_nonfinite="rewind", **options)
    first = changed(early, {"parallel3d.run.name": "first", "parallel3d.checkpoint.every": 1})
    batches = ((skip, [1, 2]), (first, [0]), (early, [1]))
    runs = start_all([(raw, spoil, bad, float("nan")) for raw, bad in batches], (1, 1, 1))
    for most, at_once, rewound in zip(*runs, strict=True):
        assert "all ranks stop. Set train.on_nonfinite, train.on_spike and" in at_once.error
        assert most.error.startswith("TrainingError: the loss on rank 0 is nan, after 1 skipped")
        assert "at step 3" in most.error and "max_skips" in most.error
        assert "Step 2 has no checkpoint before it" in rewound.error
        assert "Lower checkpoint.every, or set train.on_nonfinite" in rewound.error


def test_score_is_robust_score_of_scipy():
    from scipy.stats import median_abs_deviation  # at the top each rank would load it, too

    rng = np.random.default_rng(0)
    earlier = [*rng.normal(3.0, 0.2, 100), 50.0]
    deviation = median_abs_deviation(earlier, scale="normal")
    for value in (2.0, 3.1, 9.0):
        expected = (value - np.median(earlier)) / deviation
        assert robust_score(value, earlier) == pytest.approx(expected, rel=1e-4)
    assert robust_score(1e9, earlier[: FEWEST - 1]) == 0.0
    assert robust_score(3.0, [3.0] * FEWEST) == 0.0  # equal values have no deviation


@pytest.mark.parametrize(
    ("fp16", "place"),
    [({"loss_scale": 2.0**32}, "fp16.loss_scale"), ({"hysteresis": 3}, "fp16.min_loss_scale")],
)
def test_scale_that_overflows_for_ever_stops_the_run(fp16, place):
    """Such a run ended with exit code 0, without one update."""
    config = Fp16Config(enabled=True, **fp16)
    overflows = Overflows(config.hysteresis, bool(config.loss_scale))
    most = config.hysteresis + MOST_OVERFLOWS
    for scale in (8.0, 8.0, None, *(most - 1) * [4.0], None, 2.0, *(most - 1) * [1.0]):
        assert overflows.add(scale).action == "train"
    verdict = overflows.add(1.0)
    assert verdict.action == "stop" and f"last {most} steps overflowed" in verdict.reason
    assert verdict.reason.endswith(f"({place})") and f"Lower {place}" in verdict.remedy


@pytest.mark.slow  # by default the verdict above, and the short run below
@pytest.mark.parametrize(
    "fp16",
    [{"initial_scale_power": 32, "min_loss_scale": 2.0**31}, {"loss_scale": 2.0**32}],
)
def test_run_in_fp16_that_cannot_update_fails_by_name(tmp_path, fp16):
    changes = {"fp16": {"enabled": True, **fp16}, "parallel3d.train.steps": 30}
    (ended,) = start(changed(prepared_config(tmp_path), changes), (1, 1, 1))
    assert "steps overflowed in fp16" in ended.error
    assert f"does not fall (fp16.{list(fp16)[-1]})" in ended.error


def test_short_run_in_fp16_without_an_update_is_reported(tmp_path):
    fp16 = {"enabled": True, "loss_scale": 2.0**32}
    changes = {"fp16": fp16, "parallel3d.train.steps": 2, "zero_optimization.stage": 1}
    (ended,) = start(changed(prepared_config(tmp_path), changes), (1, 1, 1))
    assert ended.code == 0 and ended.says("NOT TRAINED: the gradients of all 2 steps overflowed")
    assert ended.says("lower fp16.loss_scale")


def test_false_alarms_are_rare_and_spikes_are_seen():
    """Noise around a falling loss and a norm with a long tail: no spike in 5,000 steps."""
    rng = np.random.default_rng(1)
    bad = BadSteps(TrainConfig(steps=1, on_spike="skip"))
    alarms = 0
    for step in range(5_000):
        loss = 3 + 5 / (1 + step / 200) + rng.normal(0, 0.03)
        norm = float(np.exp(rng.normal(0, 0.25)))
        alarms += bad.judge({"loss": [loss]}, loss, norm).action != "train"
        bad.add(loss, norm)
    assert alarms == 0
    assert len(bad.state()["bad_steps"]["losses"]) == WINDOW
    assert bad.judge({"loss": [3.5]}, 3.5, 1.0).action == "skip"
    assert bad.judge({"loss": [3.0]}, 3.0, 9.0).action == "skip"
    again = BadSteps(TrainConfig(steps=1, on_spike="skip"), json.loads(json.dumps(bad.state())))
    assert again.judge({"loss": [3.5]}, 3.5, 1.0) == bad.judge({"loss": [3.5]}, 3.5, 1.0)
