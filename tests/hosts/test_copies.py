"""mesh.dp_shards = "node" on two hosts: weights are gathered inside each, as the link shows."""

import pytest

from parallel3d import models
from parallel3d.config import RunConfig
from parallel3d.model.spec import count_params
from tests.checkpoint import drill
from tests.hosts.launches import Run, torchrun, without_dropout

pytestmark = [pytest.mark.drill, pytest.mark.slow]

FEW = 4
MANY = 20
SECONDS = 300


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = without_dropout(drill.prepared_config(tmp_path_factory.mktemp("copies")))
    config["train_micro_batch_size_per_gpu"] = 4
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    block = config["parallel3d"]
    block["model"] |= {"hidden_size": 128, "num_attention_heads": 4}
    block["pipeline"] = {"weights": "per_microbatch"}
    block["checkpoint"] = {"every": 0}
    block["run"]["save_weights"] = False
    block["train"] |= {"evaluate_every": 0}
    return config


def sent_bytes(host):
    """The bytes that a host has sent over its cable."""
    lines = host.do("cat", "/proc/net/dev").stdout.splitlines()
    [numbers] = [line.partition(":")[2].split() for line in lines if "eth0:" in line]
    return int(numbers[8])


def bytes_of_a_step(hosts, config, name, root, **changes):
    """The bytes that the first host sends in a step, without those of start and end."""
    sent = []
    for steps in (FEW, MANY):
        run = Run(config, f"{name}-{steps}", root, parallel3d__train__steps=steps, **changes)
        before = sent_bytes(hosts[0])
        launched = torchrun(hosts, run.words((1, 4, 1)), run.log, root, ranks=2)
        assert set(launched.codes(SECONDS)) == {0}, launched.output
        sent.append(sent_bytes(hosts[0]) - before)
    return (sent[1] - sent[0]) / (MANY - FEW), launched, run


@pytest.mark.timeout(4 * SECONDS)
def test_shards_of_a_node_keep_gathers_off_the_link(given_hosts, config, tmp_path):
    hosts = given_hosts()
    copied, launched, run = bytes_of_a_step(
        hosts, config, "node", tmp_path, parallel3d__mesh__dp_shards="node"
    )
    assert "dp_shards: node = 2 (a host has 2 ranks)" in launched.output
    assert "2 copies of 2 shards" in launched.output and "SPANS HOSTS" not in launched.output
    flat, _, plain = bytes_of_a_step(hosts, config, "flat", tmp_path)
    run.check_same(plain)
    model = RunConfig.from_json(str(run.folder / "config.json")).model
    elements = count_params(models.layers(model))
    # Each of two ranks sums its half of the fp32 gradients with one rank of the other host.
    print(f"{copied:,.0f} bytes a step, {4 * elements:,} of gradients; plain ZeRO-3 {flat:,.0f}")
    assert copied == pytest.approx(4 * elements, rel=0.1)
    assert flat > 2.5 * copied
