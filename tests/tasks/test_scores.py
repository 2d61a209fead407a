"""Scores on tasks: each log-likelihood is that of lm_eval's own model on the export.

Rank 0 alone loads lm_eval, here as in a run.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from launch import convert
from parallel3d.base.errors import ConfigError, TrainingError
from parallel3d.extras.tasks.scorer import Scorer
from parallel3d.train import evaluate_checkpoint
from parallel3d.train.ending import DONE, STOPPED
from parallel3d.train.feed import Cutter
from parallel3d.verify.local_ranks import run_locally
from tests.huggingface.checkpoints import checkpoint_of, small, tokenizer_in
from tests.train.test_evaluate import evaluate_on_rank

pytestmark = pytest.mark.gloo

HERE = Path(__file__).parent
TASKS = [str(HERE / f"{name}.yaml") for name in ("questions", "last_words", "whole_texts")]
LENGTH = 32  # shorter than the longest question with its answer, and than a whole text
TOLERANCE = 1e-4


def requests_of(results):
    """The responses to each request of each task, in order."""
    outcome = {}
    for name, samples in results["samples"].items():
        ordered = sorted(samples, key=lambda sample: sample["doc_id"])
        outcome[name] = [response for sample in ordered for response in sample["resps"]]
    return outcome


GREEDY = "texts of the model's own"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose checkpoint has weights far from their start, and its export."""
    root = tmp_path_factory.mktemp("llama")
    texts = [(HERE / "questions.jsonl").read_text()] * 2
    run = checkpoint_of(small("llama"), root, tokenizer_in(root / "tokenizer", texts))
    with pytest.MonkeyPatch.context() as patch:
        words = ["convert.py", "export", str(run), "--to", str(root / "out")]
        patch.setattr(sys, "argv", words)
        assert convert.main() == DONE
    return run


@pytest.fixture(scope="module")
def expected(run):
    """What lm_eval's own model comes to: the responses, the scores, and the greedy requests."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    from parallel3d.extras.tasks import library

    folder = run.parent / "out"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = HFLM(model, tokenizer=str(folder), batch_size=3, max_length=LENGTH, device="cpu")
    results = evaluate(
        own, library.load_tasks(TASKS), bootstrap_iters=library.DRAWS, log_samples=True
    )
    greedy = []
    for first in (7, 70, 170):
        context = list(range(first, first + 9))
        ids = torch.tensor([context])
        whole = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=-1)
        continuation = whole[0, len(context) :].tolist()
        greedy.append((None, context, continuation))
        greedy.append((None, context, [*continuation[:2], first, *continuation[3:]]))
    responses = requests_of(results)
    responses[GREEDY] = [(response,) for response in own._loglikelihood_tokens(greedy)]
    assert [is_greedy for ((_, is_greedy),) in responses[GREEDY]] == [True, False] * 3
    return responses, results["results"], greedy


def keep_responses(patch, responses, greedy):
    """Put each task's responses into `responses`, and those to the greedy requests."""
    from parallel3d.extras.tasks import library

    evaluate = library.evaluate

    def with_samples(lm, tasks, **options):
        outcome = evaluate(lm, tasks, **options | {"log_samples": True})
        responses.update(requests_of(outcome))
        responses[GREEDY] = [(response,) for response in lm._loglikelihood_tokens(greedy)]
        return outcome

    patch.setattr(library, "evaluate", with_samples)


def score_on_rank(rank, words, greedy, plants):
    """What the command comes to with each planted bug, and the responses that rank 0 had."""
    results = []
    for plant in plants:
        responses = {}
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                keep_responses(patch, responses, greedy)
            plant(patch)
            ((code, printed),) = evaluate_on_rank(rank, [words])
        results.append((code, printed, responses))
    return results


def nothing(patch):
    """Plant no bug."""


def predict_one_later(patch):
    """The continuation's losses are those of the tokens one place further on."""
    cut = Cutter.cut

    def shifted(self, *given, labelled, **others):
        return cut(self, *given, labelled=np.roll(labelled, 1, axis=1), **others)

    patch.setattr(Cutter, "cut", shifted)


def count_padding(patch):
    """The padding behind a continuation counts as well."""
    cut = Cutter.cut

    def counted(self, *given, labelled, **others):
        nobody = labelled.max()
        padding = np.maximum.accumulate(labelled != nobody, axis=1) & (labelled == nobody)
        filled = np.where(padding, labelled.min(axis=1, keepdims=True), labelled)
        return cut(self, *given, labelled=filled, **others)

    patch.setattr(Cutter, "cut", counted)


def forget_the_order(patch):
    """The scores stay in the order of the batches, the longest request first."""
    lead = Scorer.lead

    def unordered(self, requests):
        return lead(self, sorted(requests, key=lambda request: -len(request.ids)))

    patch.setattr(Scorer, "lead", unordered)


def words_for(run, mesh, **settings):
    """The arguments of the command that scores a run on a mesh pp x dp x tp."""
    pp, _, tp = mesh
    words = [run, "--json", "--tasks", *TASKS, "--mesh.pp", pp, "--mesh.tp", tp]
    given = {
        "data.sequence_length": LENGTH,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    } | settings
    for name, value in given.items():
        words += [f"--{name}", value]
    return words


def read(results):
    """Responses and scores of each result of rank 0."""
    outcomes = []
    for code, printed, responses in results:
        assert code == DONE, printed
        outcomes.append((responses, json.loads(printed)["tasks"]))
    return outcomes


def scored(run, mesh, expected, **settings):
    """Responses and scores on the ranks of a mesh pp x dp x tp."""
    pp, dp, tp = mesh
    words = words_for(run, mesh, **settings)
    results, *_ = run_locally(score_on_rank, pp * dp * tp, words, expected[2], (nothing,))
    (outcome,) = read(results)
    return outcome


def compare(outcome, expected):
    """Compare each response and each score with those of lm_eval's own model."""
    responses, scores = outcome
    their_responses, their_scores, _ = expected
    assert responses.keys() == their_responses.keys()
    for name, own in responses.items():
        for ours, theirs in zip(own, their_responses[name], strict=True):
            if isinstance(theirs[0], float):
                assert ours[0] == pytest.approx(theirs[0], abs=TOLERANCE)
            else:
                assert ours[0] == (pytest.approx(theirs[0][0], abs=TOLERANCE), theirs[0][1])
    for name, metrics in scores.items():
        for metric, value in metrics.items():
            assert value == pytest.approx(their_scores[name][f"{metric},none"], rel=1e-4), metric
    assert scores.keys() == their_scores.keys()


TWO_RANKS = ((1, 2, 1), (2, 1, 1), (1, 1, 2))
PLANTS = (predict_one_later, count_padding, forget_the_order)


def everything_on_rank(rank, run, greedy, bad):
    """The scores on each mesh, and what else ends a scoring."""
    scores = []
    for mesh in TWO_RANKS:
        scores += score_on_rank(rank, words_for(run, mesh), greedy, (nothing,))
    return scores, fail_on_rank(rank, words_for(run, (1, 2, 1)), bad)


@pytest.fixture(scope="module")
def on_two_ranks(run, expected):
    """What each of two ranks comes to, in one launch."""
    bad = run.parent / "bad.yaml"
    bad.write_text("task: bad\ndoc_to_txt: b\n")
    return run_locally(everything_on_rank, 2, run, expected[2], bad)


def test_log_likelihoods_are_those_of_lm_evals_own_model(on_two_ranks, expected):
    outcomes = read(on_two_ranks[0][0])
    assert len(outcomes) == len(TWO_RANKS)
    for outcome in outcomes:
        compare(outcome, expected)


@pytest.mark.slow  # it proves that the comparison above can fail
def test_planted_bugs_are_seen(run, expected):
    words = words_for(run, (1, 2, 1))
    outcomes = read(run_locally(score_on_rank, 2, words, expected[2], PLANTS)[0])
    assert len(outcomes) == len(PLANTS)
    for outcome in outcomes:
        with pytest.raises(AssertionError):
            compare(outcome, expected)


@pytest.mark.slow  # the test above has every axis
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_log_likelihoods_on_one_and_eight_ranks(run, expected, mesh):
    outcome = scored(run, mesh, expected)
    compare(outcome, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ((1, 2, 1), {"zero_optimization.stage": 3}),
        ((1, 1, 2), {"mesh.sequence_parallel": "true"}),
        ((1, 2, 1), {"mesh.cp": 2}),
        ((2, 1, 1), {"pipeline.schedule": "interleaved", "pipeline.stages_per_rank": 2}),
        ((1, 1, 1), {"data.isolate_documents": "true"}),
    ],
)
def test_log_likelihoods_with_every_setting(run, expected, mesh, settings):
    outcome = scored(run, mesh, expected, **settings)
    compare(outcome, expected)


FILES = {
    "unknown.yaml": (
        "task: a\ndoc_to_txt: b\n",
        "doc_to_txt: is not a field of a task; did you mean",
    ),
    "nameless.yaml": ("doc_to_text: b\n", "task: is missing"),
    "list.yaml": ("- a\n", "cannot be read"),
    "writes.yaml": (
        f"include: {HERE / 'questions.yaml'}\ntask: writes\noutput_type: generate_until\n"
        f"dataset_kwargs: {{data_files: {{test: {HERE / 'questions.jsonl'}}}}}\n",
        "generates text",
    ),
    "no_data.yaml": (
        f"include: {HERE / 'questions.yaml'}\ntask: no_data\n",
        "cannot be loaded",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_task_is_refused_by_name(tmp_path, name):
    from parallel3d.extras.tasks import library

    content, message = FILES[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        library.load_tasks([str(tmp_path / name)])
    assert message in str(caught.value) and name.removesuffix(".yaml") in str(caught.value)


def test_stops_and_errors_end_all_ranks(run, on_two_ranks):
    """A request to stop, a bad task before the weights are read, an error between forwards."""
    (_, first), (_, second) = on_two_ranks
    assert first == second
    unknown = "doc_to_txt: is not a field of a task; did you mean doc_to_text?"
    assert first == [
        (STOPPED, ""),
        ("ConfigError", f"--tasks: {run.parent / 'bad.yaml'}: {unknown}"),
        ("TrainingError", "lm_eval failed: 'of a task'"),
    ]


def fail_on_rank(rank, words, bad):
    def fail(lm, tasks, **_):
        lm._loglikelihood_tokens([(None, [1], [2])])
        raise KeyError("of a task")

    results = evaluate_on_rank(rank, [words], stops=True)
    with patch.object(evaluate_checkpoint, "load_weights", None):
        results += evaluate_on_rank(rank, [[*words, "--tasks", bad]])
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 0:
            monkeypatch.setattr("parallel3d.extras.tasks.library.evaluate", fail)
        try:
            evaluate_on_rank(rank, [words])
        except TrainingError as error:
            results.append((type(error).__name__, str(error)))
    return results
