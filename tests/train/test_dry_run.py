"""A dry run of what trains, on hardware of which a figure is not known."""

import json

import pytest

from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.train.dry_run import dry_run
from tests.config.configs import raw

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({}, 0, "hardware H100-SXM5-80GB: no FLOP/s is known for fp32"),
        ({"parallel3d.model.hidden_size": 65536}, 1, "This does not fit: device memory"),
    ],
)
def test_time_of_a_step_may_be_unknown(changes, code, message, capsys):
    named = {"parallel3d.run.hardware": "H100-SXM5-80GB"}
    config = RunConfig.from_dict(raw(**named | changes))
    launch = Launch(rank=0, world_size=4, local_rank=0)
    assert dry_run(config, launch, devices=0, as_json=True) == code
    printed = capsys.readouterr()
    words = " ".join(printed.err.split())  # lines end where the terminal does
    assert message in words and "The time of a step is unknown" in words
    report = json.loads(printed.out)
    assert report["hardware"] == "H100-SXM5-80GB"
