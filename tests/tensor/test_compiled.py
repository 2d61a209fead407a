"""torch.compile of what lies between products, and of blocks: the same losses, compiled once."""

import sys
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from parallel3d.tensor import compiled
from parallel3d.tensor.pointwise import layer_norm
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE
from tests.cases import Case, Trainer
from tests.verify.measuring import errors_of

pytestmark = pytest.mark.gloo

LLAMA = {
    "family": "llama",
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
}
UNTIED = {"num_hidden_layers": 2, "tie_word_embeddings": False}
SMALL = {"steps": 3, "batch": 8, "microbatches": 2}
SEED = "the seed of a dropout mask"
ACROSS = "a collective of tensor parallelism"
APART = "documents, whose lengths are known at run time"


@contextmanager
def by(backend):
    """`inductor` needs a compiler; `aot_eager` runs the graphs that it would be given."""
    torch._inductor.config.compile_threads = 1
    with patch.object(compiled, "BACKEND", backend):
        yield


def train_each(rank, jobs, backend, evaluations):
    """Return for each case its differences from the reference, and what `compiled_by_each` saw."""
    results = []
    for case, reference in jobs:
        with by(backend):
            trainer = Trainer(case)
            results.append(compiled_by_each(trainer, reference, evaluations))
            trainer.close()
        assert compiled.describe(mode_of(case)).startswith(f"compile {mode_of(case)}: ")
    return results


def compiled_by_each(trainer, reference, evaluations):
    """Train and evaluate; return the differences, and what was compiled before and by each."""
    counted = [compiled.counts()]
    step = trainer.engine.step

    def counts_after(lr):
        counted.append(compiled.counts())
        return step(lr)

    trainer.engine.step = counts_after
    measured = trainer.compare(reference)
    for batch in trainer.batches()[:evaluations]:
        trainer.evaluator.run(batch)
        counted.append(compiled.counts())
    return measured, counted


def mode_of(case):
    return case.config.train.compile


def check(cases, backend, timeout=60, evaluations=2):
    """Train cases of one mesh, each with the breaks of its graphs, one after another."""
    jobs = [(case, case.reference) for case, _ in cases]
    ranks = run_locally(
        train_each, jobs[0][0].world_size, jobs, backend, evaluations, timeout=timeout
    )
    assert_equal_and_compiled(cases, ranks, evaluations)
    return ranks


def assert_equal_and_compiled(cases, ranks, evaluations):
    """Compare what `train_each` returned on each rank with the reference and the breaks."""
    for (case, breaks), *results in zip(cases, *ranks, strict=True):
        errors = errors_of(case.config, [measured for measured, _ in results])
        assert errors.within(TOLERANCE["fp32"]), errors
        for _, (before, *counted) in results:
            trained = counted[: case.steps]
            evaluated = counted[case.steps :]
            last = trained[-1]
            assert {counts.graphs for counts in trained} == {last.graphs}
            assert last.graphs > before.graphs
            # Without gradients it is another graph.
            assert len({counts.graphs for counts in evaluated}) == min(evaluations, 1)
            assert last.breaks.keys() == set(breaks), last.breaks
            assert not last.limits


def case(mode, **settings):
    changes = {"parallel3d.train.compile": mode}
    return Case(**{"model": LLAMA, "tied": False, "changes": changes, **SMALL, **settings})


# Under ZeRO-3, whose hooks stay outside, and with blocks that are computed again. Blocks with
# documents of changing lengths: each was guarded, so that after eight microbatches all blocks ran
# as they are, in silence.
BY_DEFAULT = [
    case("pointwise", steps=2, checkpointing="full", model=LLAMA | {"num_hidden_layers": 1}),
    case(
        "block",
        steps=2,
        zero_stage=1,
        batch=10,
        microbatches=10,
        changes={"parallel3d.train.compile": "block", "parallel3d.data.isolate_documents": True},
        model=UNTIED | {"num_hidden_layers": 1},
    ),
]
BREAKS = [[], [APART]]


def everything_on_rank(rank, jobs, widths):
    """Each in turn in one process, in which torch's compiler starts once: it takes seconds."""
    graphs = graphs_of_norms(widths)
    forget_graphs()
    breaks = break_that_comes_late()
    forget_graphs()
    return train_each(rank, jobs, "aot_eager", 0), graphs, breaks


def forget_graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(scope="module")
def compiled_in_one_process():
    """Trained cases, counts of graphs before and beyond the limit, and breaks by a late import."""
    jobs = [(case, case.reference) for case in BY_DEFAULT]
    (results,) = run_locally(everything_on_rank, 1, jobs, range(8, 17), timeout=120)
    return results


def test_functions_between_products_and_blocks_are_compiled_once(compiled_in_one_process):
    trained, _, _ = compiled_in_one_process
    assert_equal_and_compiled(list(zip(BY_DEFAULT, BREAKS, strict=True)), [trained], evaluations=0)


MOE = {"family": "moe", "num_experts": 4, "num_hidden_layers": 1}


def losses_on_rank(rank, cases):
    with by("aot_eager"):
        trainers = map(Trainer, cases)
        return [(trainer.run()[0], compiled.counts().graphs) for trainer in trainers]


@pytest.mark.slow
def test_rows_sent_to_experts_are_not_compiled():
    """Their number changes: torch gives up after eight."""
    settings = {"model": MOE, "mesh": (1, 2, 1), "steps": 2, "batch": 24, "microbatches": 12}
    cases = []
    for mode in ("none", "pointwise"):
        changes = {"parallel3d.train.compile": mode, "parallel3d.mesh.ep": 2}
        cases.append(Case(changes=changes, **settings))
    for (plain, none), (losses, graphs) in run_locally(losses_on_rank, 2, cases, timeout=60):
        assert losses == pytest.approx(plain, rel=1e-5) and graphs > none == 0


MASKED = {"num_hidden_layers": 2, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}

IN_FULL = {
    "llama": case("pointwise", zero_stage=3, mesh=(2, 1, 2), sequence_parallel=True),
    "gpt untied": case("pointwise", model=UNTIED, checkpointing="selective"),
    "gpt": case("pointwise", model={"num_hidden_layers": 2}, tied=True, zero_stage=2),
    "llama block": case("block", zero_stage=1),
    "llama block again": case("block", zero_stage=0, checkpointing="full"),
    "llama block selective": case("block", zero_stage=2, checkpointing="selective"),
    "llama block tp": case("block", zero_stage=1, mesh=(1, 1, 2)),
    "llama block sp": case("block", zero_stage=2, mesh=(1, 1, 2), sequence_parallel=True),
    "gpt block untied": case("block", model=UNTIED, zero_stage=2),
    "gpt block tp": case("block", model=UNTIED, zero_stage=0, mesh=(1, 1, 2)),
    "gpt block documents": case(
        "block",
        model=UNTIED,
        zero_stage=1,
        changes={"parallel3d.train.compile": "block", "parallel3d.data.isolate_documents": True},
    ),
    "gpt block": case("block", model={"num_hidden_layers": 2}, tied=True, zero_stage=1),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", IN_FULL)
def test_losses_by_inductor(name):
    """Up to 40 CPU seconds where no kernel is cached: minutes on a busy machine."""
    this = IN_FULL[name]
    across = this.config.train.compile == "block" and this.config.mesh.tp > 1
    breaks = [ACROSS] if across else []
    if this.config.data.isolate_documents:
        breaks.append(APART)
    check([(this, breaks)], "inductor", timeout=850)


def masked_on_rank(rank, cases):
    """Losses and norms of each, whose masks are drawn in compiled blocks, and what was compiled."""
    results = []
    for case in cases:
        with by("aot_eager"):
            trainer = Trainer(case)
            results.append((*trainer.run(), compiled.counts()))
            trainer.close()
    return results


@pytest.mark.slow
def test_recomputed_compiled_block_has_the_same_masks():
    kinds = ("none", "full", "selective")
    cases = [case("block", model=MASKED, zero_stage=1, checkpointing=kind) for kind in kinds]
    ((kept, full, selective),) = run_locally(masked_on_rank, 1, cases, timeout=200)
    for losses, norms, counted in (full, selective):
        assert losses == pytest.approx(kept[0], rel=1e-6) and losses[0] != losses[1]
        assert norms == pytest.approx(kept[1], rel=1e-5)
        assert counted.breaks.keys() == {SEED}


@pytest.mark.slow
def test_equal_layers_are_compiled_once():
    """Torch gives up after eight graphs of one function."""
    graphs = set()
    for layers in (2, 10):
        deep = case("block", model=LLAMA | {"num_hidden_layers": layers}, zero_stage=1)
        (((_, counted),),) = check([(deep, [])], "aot_eager")
        graphs.add(counted[-1].graphs)
    assert len(graphs) == 1


def test_auto_compiles_on_devices_that_triton_knows(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)  # it does not import
    assert compiled.mode_on(device, "auto") == "none"
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert compiled.mode_on(device, "auto") == "pointwise"
    assert compiled.mode_on(torch.device("cpu"), "auto") == "none"
    assert compiled.mode_on(device, "none") == "none"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 0))
    assert compiled.mode_on(device, "auto") == "none"


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def graphs_of_norms(widths):
    """What was compiled for norms of many widths, then for a block of even more shapes."""
    with by("eager"), patch.object(compiled, "GRAPHS", 9):
        for width in widths:
            ones = torch.ones(width)
            layer_norm.compiled(torch.ones(2, width), ones, ones, 1e-5)
        first = compiled.counts()
        block = Doubled()
        compiled.compile_block(block)
        for rows in range(compiled.GRAPHS + 2):
            block(torch.ones(rows + 2))
        return first, compiled.counts(), compiled.describe("block")


def test_many_widths_of_norms_are_compiled_and_a_reached_limit_is_reported(
    compiled_in_one_process,
):
    """torch's limit of eight raised FailOnRecompileLimitHit at the first evaluation after it."""
    _, (first, second, text), _ = compiled_in_one_process
    assert first.graphs == 9 and not first.limits
    assert second.limits and "WARNING" in text


def break_that_comes_late():
    """Graph breaks in a block that calls a function whose file is imported after another's."""
    with by("eager"):  # to import inductor takes a second
        compiled.compile_block(torch.nn.Linear(2, 2))
    late = compiled.graph_break("imported late")(lambda x: x + 1)
    return torch._dynamo.explain(lambda x: late(x * 2) * 2)(torch.ones(2)).graph_break_count


def test_functions_imported_late_are_skipped_too(compiled_in_one_process):
    """A family's blocks are; experts' products, traced into a graph, stopped the run."""
    assert compiled_in_one_process[2] == 1
