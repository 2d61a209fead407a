"""From a ladder file to complete configs: sizes, budgets, settings, schedules."""

import json
import time

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.learning_rate import rate
from parallel3d.extras.scaling.ladder.plan import ladder_of, to_json
from tests.scaling.ladder.cases import runs_by_name, write

pytestmark = pytest.mark.pure

VOCAB = 300
SEQ = 16


def complete(run):
    """Return the complete config of a ladder's run."""
    return run.config.resolve(run.devices).completed()


def llama(width, layers, inner):
    """Llama's arithmetic: its blocks, and its head with the last norm."""
    blocks = layers * (4 * width**2 + 3 * width * inner + 2 * width)
    return blocks, VOCAB * width + width


def test_flops_budget_sets_the_tokens_of_each_size(tmp_path):
    runs = runs_by_name(tmp_path, budgets={"flops": [1e9, 4e9]})
    assert list(runs) == ["2.59k-c1e9", "2.59k-c4e9", "10.3k-c1e9", "10.3k-c4e9"]
    for run in runs.values():
        width = run.config.model.hidden_size
        blocks, head = llama(width, 1, 2 * width)
        assert (run.counts.transformer, run.counts.head) == (blocks, head)
        assert run.counts.embedding == VOCAB * width
        budget = 4e9 if "c4e9" in run.name else 1e9
        # As near as whole steps of 64 tokens come.
        assert run.tokens % 64 == 0
        assert abs(run.tokens - budget / (6 * (blocks + head))) <= 32
        assert run.flops == 6 * (blocks + head) * run.tokens
        attention = 3 * 4 * SEQ * width  # scores and values, forward and backward
        assert run.exact_flops == pytest.approx(run.flops + attention * run.tokens, rel=0.02)
        assert run.config.train_batch_size == 4 and run.config.data.sequence_length == SEQ


def test_budget_in_tokens_per_parameter(tmp_path):
    for run in runs_by_name(tmp_path, budgets={"tokens_per_param": [1, 2.5]}).values():
        ratio = 2.5 if run.name.endswith("2.5x") else 1
        assert abs(run.tokens - ratio * run.counts.with_head) <= 32


def test_number_of_parameters_selects_width_and_depth(tmp_path):
    targets = [20e3, 300e3, 4e6]
    runs = runs_by_name(
        tmp_path, sizes=targets, aspect_ratio=24, head_size=16, budgets={"tokens": [512, 1024]}
    )
    models = {run.config.model: run.counts.transformer for run in runs.values()}
    for target, (model, num_params) in zip(targets, models.items(), strict=True):
        assert model.hidden_size == 16 * model.num_attention_heads
        assert model.num_hidden_layers == max(1, round(model.hidden_size / 24))
        assert model.intermediate_size == 2 * model.hidden_size
        for other in (model.hidden_size - 16, model.hidden_size + 16):  # no width is nearer
            blocks, _ = llama(other, max(1, round(other / 24)), 2 * other)
            assert other == 0 or abs(blocks / target - 1) >= 0.9 * abs(num_params / target - 1)


def test_named_laws_equal_their_sources(tmp_path):
    """The numbers by hand, from OLMo-core's code and from arXiv:2503.04715."""
    size = {"model": {"hidden_size": 768, "num_hidden_layers": 12}}
    sizes = [{"model": {"hidden_size": 256, "num_hidden_layers": 4}}, size]
    for law in ("olmo", "step-law"):
        settings = {"learning_rate": law, "batch_tokens": law}
        runs = runs_by_name(
            tmp_path,
            sizes=sizes,
            head_size=64,
            budgets={"tokens": [1e9, 2e9]},
            hyperparameters=settings,
        )
        run = list(runs.values())[-1]
        n = run.counts.transformer
        d = 2e9
        if law == "olmo":
            n += run.counts.head
            lr = 0.0047 * (n / 108e6) ** (-1 / 3)
            batch = 2048 * 160 * (n / 108e6) ** (2 / 3)
        else:
            lr = 1.79 * n**-0.713 * d**0.307
            batch = 0.58 * d**0.571
        assert run.config.optimizer.params.lr == pytest.approx(lr, rel=1e-3)
        assert run.batch_tokens == pytest.approx(batch, abs=SEQ / 2)


def test_cosine_ends_with_its_run_after_a_short_warmup(tmp_path):
    for run in runs_by_name(tmp_path, budgets={"tokens": [2048, 512000]}).values():
        config = complete(run)
        peak = 0.01
        warmup = config.train.lr_schedule.warmup_steps
        assert warmup * run.batch_tokens <= min(run.counts.with_head, 0.1 * run.tokens)
        assert rate(config, run.steps - 1) == pytest.approx(0.1 * peak)
        assert rate(config, warmup) == pytest.approx(peak, rel=0.05)
        assert config.train.evaluate_samples > 10**9  # all that there are


def test_one_trunk_serves_forks_of_all_budgets(tmp_path):
    runs = runs_by_name(
        tmp_path, schedule={"type": "forks", "cooldown": 0.25}, budgets={"tokens": [6400, 64000]}
    )
    trunks = [run for run in runs.values() if run.kind == "trunk"]
    forks = [run for run in runs.values() if run.trunk]
    assert len(trunks) == 2 and len(forks) == 4
    for trunk in trunks:
        own = [fork for fork in forks if fork.trunk == trunk.name]
        assert trunk.config.checkpoint.at == tuple(fork.steps_done for fork in own)
        assert trunk.steps == max(fork.steps_done for fork in own)
        for fork in own:
            config = fork.config
            assert fork.steps_done == fork.steps - config.train.lr_schedule.decay_steps
            assert fork.own_share == pytest.approx(0.25)
            begin = trunk.folder / f"checkpoints/step-{fork.steps_done}"
            assert config.checkpoint.resume == str(begin)
            # The rate of the fork until it begins is the trunk's at every step.
            whole_fork = complete(fork)
            whole_trunk = complete(trunk)
            for step in range(fork.steps_done):
                assert rate(whole_fork, step) == rate(whole_trunk, step)
            assert rate(whole_fork, fork.steps - 1) == pytest.approx(0.1 * 0.01)


def test_fork_too_short_for_a_trunk_becomes_a_run(tmp_path):
    """One step of 64 tokens has none before its cool-down; 100 steps have 80."""
    runs = runs_by_name(tmp_path, schedule={"type": "forks"}, budgets={"tokens": [64, 6400]})
    for trunk in (run for run in runs.values() if run.kind == "trunk"):
        assert trunk.config.checkpoint.at == (80,) and trunk.steps == 80
        assert trunk.config.train.lr_schedule.warmup_steps == 10  # a tenth of its shortest fork's
        (fork,) = [run for run in runs.values() if run.trunk == trunk.name]
        assert fork.steps_done == 80
    short = [run for run in runs.values() if run.kind == "fit" and not run.trunk]
    assert [run.steps for run in short] == [1, 1]
    for run in short:
        assert run.config.checkpoint.resume == "auto" and run.own_share == 1
    none = runs_by_name(tmp_path, schedule={"type": "forks"}, budgets={"tokens": [63, 64.5]})
    assert not [run for run in none.values() if run.kind == "trunk" or run.trunk]
    assert len(none) == 4


def test_warmup_of_a_trunk_ends_before_the_first_decay(tmp_path):
    held = [{"size": {"model": {"hidden_size": 64, "num_hidden_layers": 1}}, "tokens": 64000}]
    schedule = {"type": "forks", "cooldown": 0.95, "warmup": 0.5}
    runs = runs_by_name(
        tmp_path, schedule=schedule, budgets={"tokens": [640, 6400, 64000]}, held_out=held
    )
    forks = [run for run in runs.values() if run.trunk]
    assert sorted({fork.steps_done for fork in forks}) == [5, 50]
    for fork in forks:
        trunk = complete(runs[fork.trunk])
        assert trunk.train.lr_schedule.warmup_steps == 5
        for step in range(fork.steps_done):
            assert rate(complete(fork), step) == rate(trunk, step)
    held_out = next(run for run in runs.values() if run.kind == "held-out")
    assert held_out.config.train.lr_schedule.warmup_steps == 50  # then 950 of the 1,000 cool down


def test_size_may_have_its_own_seeds_budgets_and_mesh(tmp_path):
    first = {
        "model": {"hidden_size": 16, "num_hidden_layers": 1},
        "seeds": [0, 7],
        "budgets": [512],
        "mesh": {"pp": 1, "dp": 2, "tp": 1},
    }
    second = {"model": {"hidden_size": 32, "num_hidden_layers": 1}}
    held = [{"size": {"model": {"hidden_size": 64, "num_hidden_layers": 2}}, "tokens": 9e4}]
    file = write(tmp_path, sizes=[first, second], held_out=held)
    printed = to_json(ladder_of(str(file)))
    rows = {row["name"]: row for row in printed["runs"]}
    assert [row["seed"] for row in rows.values()] == [0, 7, 0, 0, 0]
    assert [row["mesh"] for row in rows.values()] == ["1x2x1"] * 2 + ["1x1x1"] * 3
    assert [row["kind"] for row in rows.values()] == ["fit"] * 4 + ["held-out"]
    assert set(printed["total"]) >= {"runs", "tokens", "flops", "device_hours", "warnings"}
    keys = {"name", "params", "tokens", "flops", "mesh", "hours", "state", "loss", "standard_error"}
    assert all(set(row) >= keys and row["state"] == "new" for row in rows.values())
    params = {"embedding", "head", "transformer"}
    assert all(set(row["params"]) == params for row in rows.values())


def test_repeats_of_the_corpus_are_counted_with_a_warning(tmp_path):
    file = write(tmp_path, budgets={"tokens": [1024, 6400]}, unique_tokens=1280)
    ladder = ladder_of(str(file))
    assert [row["repeats"] for row in to_json(ladder)["runs"]] == [0.8, 5.0] * 2
    (warning,) = [text for text in ladder.warnings if "more than 4 times" in text]
    assert warning.startswith("2 runs read the corpus of 1,280 tokens")


def test_planned_mesh_is_that_of_the_planner(tmp_path):
    base = json.loads(write(tmp_path).read_text())["base"]
    base["parallel3d"] |= {"mesh": "plan", "run": {"hardware": "A100-SXM4-80GB"}}
    base["bf16"] = {"enabled": True}
    printed = to_json(ladder_of(str(write(tmp_path, base=base, devices=2))))
    for row in printed["runs"]:
        pp, dp, tp = map(int, row["mesh"].split("x"))
        assert pp * dp * tp == 2 and row["hours"] > 0 and row["memory_bytes"] > 0
    assert printed["total"]["device_hours"] > 0


def test_configs_are_accepted_by_training(tmp_path):
    ladder = ladder_of(str(write(tmp_path)))
    ladder.write_configs()
    for rung in ladder.rungs:
        read = RunConfig.from_json(str(ladder.config_file(rung.run)))
        assert read.to_dict() == rung.run.config.to_dict()
        assert read.resolve(1).completed().num_steps == rung.run.steps


HUGE = {
    "batch_tokens": {"hyperparameters": {"learning_rate": 0.01, "batch_tokens": 1e300}},
    "learning_rate": {"hyperparameters": {"learning_rate": 10**400}},
    "mlp_ratio": {"mlp_ratio": 1e308},
    "aspect_ratio": {"aspect_ratio": 1e-308, "sizes": [1e4, 1e5]},
    "sizes.0.params": {"aspect_ratio": 1, "head_size": 4096, "sizes": [1e4, 1e5]},
    "head_size": {"head_size": 10**400, "sizes": [1e4, 1e5]},
    "sizes.1": {"sizes": [1e4, 1e300]},
    "budgets.tokens_per_param.1": {"budgets": {"tokens_per_param": [1, 1e306]}},
    "devices": {"devices": 10**400},
    # The law's batch for it has 1e16 samples, whose divisors are looked for.
    "train_batch_size": {"budgets": {"tokens": [512, 1e30]}, "hyperparameters": {}},
}


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "sizes.0.params" else name
        for name in HUGE
    ],
)
def test_excessive_sizes_are_refused_at_once(tmp_path, setting):
    started = time.process_time()
    with pytest.raises(ConfigError, match=rf"{setting} = .*: (must be|the nearest|is above)"):
        ladder_of(str(write(tmp_path, **HUGE[setting])))
    assert time.process_time() - started < 5
