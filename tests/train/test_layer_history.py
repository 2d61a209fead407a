"""Why a loss jumped: planted causes are named, by what the layers did in the steps before."""

import json

import pytest
import torch

from parallel3d.base.layer_ranges import in_words
from parallel3d.engine import layer_norms
from parallel3d.engine.layer_norms import SAMPLE, LayerNorms
from parallel3d.tensor.attention import CausalAttention
from parallel3d.train import layer_history
from parallel3d.train import observers as observers_module
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer
from tests.checkpoint.drill import changed, prepared_config
from tests.train.running import folder_of, start_all
from tests.verify.measuring import number_anew

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

AT = 22  # steps before the planted one, of which a score needs 16
EARLY = 2  # such steps where no score is needed
AFTER = 4  # steps after an event at which its file is written again: as few as tell it
ASKED = AT + 4
HISTORY = 24
STEPS = {"batch": AT + 1 + AFTER, "fast": ASKED + 2, "overflow": EARLY + 1}


# What is planted, on a rank.


def plant(rank, cause, *details):
    """Let `cause` change the parts of the run that is started next, and no later one."""
    make = observers_module.observed_trainer
    layer_history.AFTER = AFTER

    def made(start, mesh, parts, **options):
        observers_module.observed_trainer = make
        cause(start, parts, *details)
        return make(start, mesh, parts, **options)

    observers_module.observed_trainer = made


def bad_batch(start, parts):
    """Give the batch of a step labels that have nothing to do with its tokens."""
    run = parts.executor.run

    def spoiled(batch, step=0):
        generator = torch.Generator().manual_seed(step)
        if step == AT:
            for number, part in enumerate(batch):
                if part.labels is not None:
                    labels = torch.randint(0, 250, part.labels.shape, generator=generator)
                    batch[number] = part._replace(labels=labels)
        return run(batch, step)

    parts.executor.run = spoiled


def noted_steps(parts):
    """Return a list whose last number is the step that runs."""
    steps = [0]
    run = parts.executor.run

    def noted(batch, step=0):
        steps.append(step)
        return run(batch, step)

    parts.executor.run = noted
    return steps


def fast_layer(start, parts, layer, factor):
    """Multiply the updates of a layer from one step on, as a learning rate of its own would.

    Some steps later the user asks for a save.
    """
    steps = noted_steps(parts)
    states = parts.engine.states
    places = {states.masters[block[0].group]: block for block in states._blocks}
    before = {}

    def pieces(master):
        for place in places.get(master, []):
            if place.piece.held.name.startswith(f"{layer}."):
                yield master.detach().narrow(0, place.offset, place.piece.numel)

    def masters(optimizer):
        return [master for group in optimizer.param_groups for master in group["params"]]

    def keep(optimizer, *_):
        if steps[-1] == ASKED:
            (start.folder / "SAVE").touch()
        for master in masters(optimizer):
            before[master] = [piece.clone() for piece in pieces(master)]

    def move(optimizer, *_):
        for master in masters(optimizer):
            for piece, old in zip(pieces(master), before[master], strict=True):
                if steps[-1] >= AT:
                    piece.copy_(old + factor * (piece - old))

    optimizer = parts.engine.deepspeed.optimizer.optimizer
    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(move)


def overflowing_attention(start, parts, layer):
    """Let the scores of a layer's attention overflow in one step."""
    steps = noted_steps(parts)
    names = [spec.name for spec in parts.layers]
    stages = parts.stages

    def overflow(module, args):
        q, *rest = args
        return (q * 1e30 * 1e30 if steps[-1] == EARLY else q, *rest)

    for stage, layers in stages.module.layers.items():
        for number, module in zip(stages.layers_of_stage[stage], layers, strict=True):
            for inner in module.modules():
                if names[number] == layer and isinstance(inner, CausalAttention):
                    inner.register_forward_pre_hook(overflow)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    raw = prepared_config(tmp_path_factory.mktemp("layers"))
    settings = {f"parallel3d.model.{n}_pdrop": 0.0 for n in ("embd", "resid", "attn")}
    return changed(
        raw,
        {
            **settings,
            "parallel3d.model.num_hidden_layers": 4,
            "parallel3d.train.lr_schedule": {"type": "constant"},
            "parallel3d.train.spike_score": 4,
            "parallel3d.train.layer_history": HISTORY,
            "parallel3d.checkpoint.every": 0,
            "parallel3d.pipeline.activation_checkpointing": "none",
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "optimizer.params.lr": 4e-3,
        },
    )


def named(raw, name, **changes):
    changes = {f"parallel3d.{k.replace('__', '.')}": v for k, v in changes.items()}
    return changed(raw, {"parallel3d.run.name": name} | changes)


WORDS = {
    "batch": "update left its range: a bad batch (samples from 88 on)",
    "fast": "blocks.2 left its own range first, at step 23: its norm of the update",
    "overflow": "blocks.1 left its own range first, at step 3: its largest output is not finite",
}


@pytest.fixture(scope="module")
def ends(config):
    """What each run printed and wrote: names of causes -> (ends of ranks, records by step).

    The last one has two stages, whose numbers are put together.
    """
    causes = {
        "batch": (plant, bad_batch),
        "fast": (plant, fast_layer, "blocks.2", 10),
        "overflow": (plant, overflowing_attention, "blocks.1"),
    }
    runs = [
        (named(config, name, train__steps=STEPS[name]), *cause) for name, cause in causes.items()
    ]
    results = start_all(runs[:2], (1, 1, 1)) + start_all(runs[2:], (2, 1, 1))
    ends = {}
    for (raw, *_), ended in zip(runs, results, strict=True):
        records = {}
        for path in folder_of(raw).glob("layers/step-*.json"):
            record = json.loads(path.read_text())
            assert path.name == f"step-{record['step']}.json"
            records[record["step"]] = record
        ends[raw["parallel3d"]["run"]["name"]] = ended, records
    return ends


@pytest.mark.parametrize("name", WORDS)
def test_planted_cause_is_named(name, ends):
    ended, records = ends[name]
    event = {"batch": AT, "fast": ASKED, "overflow": EARLY}[name] + 1
    record = records[event]
    assert WORDS[name] in in_words(record)
    # It is also said at once, by the rank that reports.
    printed = [line for line in ended[0].printed if line.startswith(f"step {event}: ")]
    assert len(printed) == 1 and WORDS[name] in printed[0]
    assert record["reason"] in printed[0]
    # The file is written again with the steps after the event, unless the run is over before.
    last = min(event + AFTER, STEPS[name]) if name == "batch" else event
    assert record["steps"] == [*range(max(1, last + 1 - HISTORY), last + 1)]
    assert record["layers"][0] == "embedding" and len(record["layers"]) == 6
    if name == "overflow":
        place = record["steps"].index(event)
        outputs = record["largest_output"][place]
        # Layers before it are finite; the last one's output is the loss.
        assert [value is None for value in outputs] == [False, False, True, True, True, False]
        for name in ("gradient_norm", "update_over_weight"):
            assert all(value > 0 for value in record[name][0]), "both stages have written"
        assert all("nan at step 3" in end.error for end in ended)


CASES = [
    Case(mesh=(1, 2, 1), zero_stage=2, offload="cpu"),
    Case(mesh=(2, 1, 1), zero_stage=1),
]
OTHERS = [
    Case(mesh=(1, 1, 2), zero_stage=2, precision="bf16"),
    Case(mesh=(1, 2, 1), zero_stage=0),
]


def norms_on_rank(rank, cases, sample=SAMPLE):
    """Return for each case what LayerNorms measures in a step, DeepSpeed's norm, and the weights.

    The weights are the whole parameters of this rank's tp part before and after the step.
    """
    layer_norms.SAMPLE = sample
    results = []
    for case in cases:
        number_anew()
        trainer = Trainer(case)
        engine = trainer.engine
        names = [layer.name for layer in trainer.parts.layers]
        norms = LayerNorms(engine, names)
        trainer.executor.run(trainer.batches()[0], 0)
        weights = []
        gradients = norms.gradient_squares()
        with norms.updates() as updates:
            weights.append({h.name: engine.full_parameter(h).clone() for h in engine.held})
            done = engine.step(trainer.lr)
            weights.append({h.name: engine.full_parameter(h).clone() for h in engine.held})
        counted = {h.name for h in engine.held if h.counts and h.replicas.coord == 0}
        squares = torch.zeros(2, len(names))
        for name in counted:
            layer = next(n for n, x in enumerate(names) if name.startswith(f"{x}."))
            before, after = (own[name].double() for own in weights)
            squares[0, layer] += (after - before).square().sum()
            squares[1, layer] += before.square().sum()
        results.append((gradients, updates.clone(), squares, done.grad_norm))
        trainer.close()
    return results


@pytest.mark.parametrize("cases", [CASES, pytest.param(CASES[:1] + OTHERS, marks=pytest.mark.slow)])
def test_norms_of_layers_are_those_of_whole_parameters(cases):
    ranks = run_locally(norms_on_rank, 2, cases, 10**6)
    by_layer = []
    for case, of_ranks in zip(cases, zip(*ranks, strict=True), strict=True):
        gradients, updates, squares = (sum(row[n] for row in of_ranks) for n in range(3))
        norm = of_ranks[0][3]
        assert float(gradients.sum()) ** 0.5 == pytest.approx(norm, rel=1e-3), case
        assert torch.allclose(updates, squares, rtol=1e-3), case
        by_layer.append(gradients / gradients.sum())
    for shares in by_layer[1:]:
        assert torch.allclose(shares, by_layer[0], rtol=0.05)
    assert float(by_layer[0].max()) > 2 * float(by_layer[0].min())


def test_ratio_is_estimated_from_a_sample():
    case = Case(mesh=(1, 1, 1), zero_stage=1, model={"hidden_size": 256, "num_hidden_layers": 1})
    ((_, updates, squares, _),) = run_locally(norms_on_rank, 1, [case])[0]
    ratios = (updates[0] / updates[1], squares[0] / squares[1])
    assert torch.allclose(*ratios, rtol=0.08)
    assert not torch.allclose(*ratios, rtol=1e-5)


@pytest.mark.slow  # the ones above have longer histories
def test_short_history_is_written_once(config):
    """A history of few steps: the file has the event, and the report can name its cause."""
    raw = named(config, "short", train__layer_history=AFTER - 2, train__steps=AT + AFTER + 3)
    start_all([(raw, plant, bad_batch)], (1, 1, 1))
    record = json.loads((folder_of(raw) / f"layers/step-{AT + 1}.json").read_text())
    assert record["steps"] == [*range(AT + 2 - (AFTER - 2), AT + 2)]
    assert in_words(record)
