"""A run under muP: rates of roles in metrics.jsonl, and the same losses where it goes on."""

import json

import pytest

from parallel3d.train.ending import DONE, STOPPED
from tests.checkpoint.drill import changed, prepared_config
from tests.train.running import folder_of, start

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.usefixtures("cpu_adam")]

MUP = {"type": "mup", "base_width": 8}
STEPS = 6
HALF = 3
OTHERS = [
    ((2, 1, 1), {"zero_optimization.stage": 1}),
    ((1, 1, 2), {"zero_optimization.offload_optimizer": {"device": "cpu"}}),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    raw = prepared_config(tmp_path_factory.mktemp("roles"))
    settings = dict.fromkeys(
        [f"parallel3d.model.{name}" for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop")], 0.0
    )
    settings |= {"parallel3d.train.steps": STEPS, "parallel3d.checkpoint.every": 1}
    settings |= {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    settings |= {"parallel3d.model.parametrization": MUP}
    raw = changed(raw, settings | {"parallel3d.pipeline.activation_checkpointing": "none"})
    del raw["gradient_accumulation_steps"]
    return raw


def lines(raw):
    return list(map(json.loads, (folder_of(raw) / "metrics.jsonl").read_text().splitlines()))


def named(raw, name, **settings):
    return changed(raw, {"parallel3d.run.name": name, **settings})


@pytest.fixture(scope="module")
def unbroken(config):
    raw = named(config, "unbroken")
    assert [ended.code for ended in start(raw, (1, 2, 1))] == [DONE] * 2
    return lines(raw)


def test_each_line_says_the_rate_of_each_role(unbroken, config):
    wider = config["parallel3d"]["model"]["hidden_size"] / 8
    assert wider > 1
    for line in unbroken:
        assert line["role_lr"] == pytest.approx(
            {
                "input": line["lr"],
                "hidden": line["lr"] / wider,
                "output": line["lr"],
                "vector": line["lr"],
            }
        )


@pytest.mark.parametrize(("mesh", "settings"), OTHERS, ids=str)
def test_run_resumes_on_another_mesh(mesh, settings, config, unbroken):
    name = f"on-{'x'.join(map(str, mesh))}"
    half = named(config, name, **{"parallel3d.train.stop_after": HALF})
    assert [ended.code for ended in start(half, (1, 2, 1))] == [STOPPED] * 2
    rest = named(config, name, **settings)
    ranks = start(rest, mesh)
    assert [ended.code for ended in ranks] == [DONE] * 2, ranks
    for key in ("loss", "grad_norm"):
        values, expected = ([line[key] for line in run] for run in (lines(rest), unbroken))
        assert values == pytest.approx(expected, rel=1e-5), key


def test_another_parametrization_is_refused_by_name(config):
    half = named(config, "half", **{"parallel3d.train.stop_after": HALF})
    start(half, (1, 2, 1))
    for number, other in enumerate(({"type": "standard"}, MUP | {"base_width": 4})):
        ranks = start(
            named(config, "half", **{"parallel3d.model.parametrization": other}), (1, 2, 1)
        )
        for ended in ranks:
            assert "parallel3d.model.parametrization was" in ended.error, (number, ended)
            assert "set it back, or start a new run with another run.name" in ended.error
