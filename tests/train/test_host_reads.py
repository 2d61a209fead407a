"""How often the host waits for the device in a step of a whole run: once, beside DeepSpeed."""

import gc
import json
from pathlib import Path

import pytest

from parallel3d.train import trainer as trainer_module
from parallel3d.train.ending import DONE
from parallel3d.verify.local_ranks import run_locally
from tests.train.test_trainer import on_mesh, raw, run_on_rank  # noqa: F401

pytestmark = pytest.mark.gloo

READ = "tolist parallel3d/mesh/messages.py:gather_floats"
SUMMED = "tolist parallel3d/mesh/messages.py:sum_floats"
# that are evaluated, and rounds of each
SETS = 2
ROUNDS = 2


def count_waits(rank, folder):
    """Write to a file of this rank what each step waited for, from its start to the next one's."""
    from tests.asynchronous import asynchronous

    device = asynchronous()
    waits = device.__enter__()
    file = Path(folder, f"{rank}.jsonl")
    go_on = trainer_module.fault_point

    def starts(place):
        if place == "trainer.step":
            gc.collect()  # the self-test's engine waits for the device when it is freed
            counts = {" ".join(key): times for key, times in waits.take().items()}
            with file.open("a") as lines:
                lines.write(json.dumps(counts) + "\n")
        go_on(place)

    trainer_module.fault_point = starts
    trainer_module.on_this_device = device  # it is what it is for as long as this lives


def test_step_reads_device_once(raw, tmp_path):  # noqa: F811
    """All that the ranks say of a step is one copy to the host; an evaluation's rounds one each.

    At the end of each set there is one more: the losses of its documents.
    """
    evaluation = {"evaluate_every": 2, "evaluate_samples": 8 * ROUNDS}
    config = on_mesh(raw, 2, 1, 1, steps=3, save_weights=False, **evaluation)
    config |= {"zero_optimization": {"stage": 1}}
    ranks = run_locally(run_on_rank, 2, config, count_waits, str(tmp_path))
    assert [ended for ended, _ in ranks] == [DONE] * 2
    for rank in (0, 1):
        _, *steps = map(json.loads, (tmp_path / f"{rank}.jsonl").read_text().splitlines())
        ours = [{k: n for k, n in step.items() if "deepspeed/" not in k} for step in steps]
        assert ours == [{READ: 1}, {READ: 1 + SETS * ROUNDS, SUMMED: SETS}]
        assert {k.split(":")[-1] for step in steps for k in step if "deepspeed/" in k} == {
            "is_invalid_grad_norm"
        }
