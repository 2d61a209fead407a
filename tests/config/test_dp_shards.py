"""mesh.dp_shards: the number that "node" means, and settings that follow from it."""

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.digest import digest_of
from tests.config.configs import error_of, raw

pytestmark = pytest.mark.pure

SHARDS = "parallel3d.mesh.dp_shards"


def read(**changes):
    return RunConfig.from_dict(raw(**changes))


@pytest.mark.parametrize(
    ("mesh", "ranks", "host_size", "shards"),
    [
        ({"pp": 1, "tp": 2}, 16, 8, 4),
        ({"pp": 2, "tp": 2}, 16, 8, 4),  # a host has a whole stage
        ({"pp": 2, "tp": 1}, 16, 4, 4),
        ({"pp": 1, "tp": 1}, 24, 12, 12),
        ({"pp": 1, "tp": 1}, 12, 8, 4),  # 8 would leave a group of 4 on the second host
        ({"pp": 1, "tp": 1, "cp": 2}, 16, 8, 4),  # cp lies inside
        ({"pp": 1, "tp": 1}, 4, 1, 1),
        ({"pp": 1, "tp": 1}, 8, None, 8),  # one host
    ],
)
def test_node_means_the_dp_ranks_of_a_host(mesh, ranks, host_size, shards):
    changes = {"parallel3d.mesh": mesh | {"dp_shards": "node"}}
    config = read(**changes).resolve(ranks, host_size=host_size)
    assert config.mesh.dp_shards == shards
    assert config.mesh.num_copies == config.mesh.dp // shards
    (note,) = [note for note in config.notes if note.startswith(SHARDS)]
    assert f"node = {shards} (a host has {host_size or ranks} rank" in note
    # A saved config names the number, for any hosts.
    again = RunConfig.from_dict(config.to_dict()).resolve(ranks, host_size=1)
    assert again.mesh == config.mesh


def test_node_that_cannot_hold_a_dp_coordinate_is_refused():
    config = read(**{"parallel3d.mesh": {"pp": 1, "tp": 4, "dp_shards": "node"}})
    with pytest.raises(ConfigError) as caught:
        config.resolve(12, host_size=6)
    expected = f'{SHARDS} = "node": a host has 6 ranks, not a multiple of cp x tp = 4; use a number'
    assert expected in str(caught.value)


def test_number_must_divide_the_dp_that_the_processes_make():
    with pytest.raises(ConfigError, match=r"= 4: does not divide mesh\.dp=6; use 1, 2, 3 or 6"):
        read(**{SHARDS: 4}).resolve(24)


def test_reduction_of_zero2_is_once_a_step():
    config = read(**{SHARDS: 2, "zero_optimization.stage": 2})
    assert config.pipeline.reduces_once(2) and config.pipeline.gradient_reduction == "per_step"
    assert 'gradient_reduction: auto = "per_step" (mesh.dp_shards)' in config.notes[-1]
    chosen = {"parallel3d.pipeline.gradient_reduction": "per_microbatch"}
    assert not read(**{SHARDS: 2, "zero_optimization.stage": 2} | chosen).pipeline.reduces_once(2)
    flat = read(**{"zero_optimization.stage": 2})
    assert not flat.pipeline.reduces_once(2) and not flat.notes


def test_config_without_copies_keeps_its_digest_and_its_text():
    """A run without a name is found by the digest, also by a release that has the key."""
    assert "dp_shards" not in read().to_dict()["parallel3d"]["mesh"]
    assert digest_of(read()) == digest_of(read(**{SHARDS: None})) != digest_of(read(**{SHARDS: 2}))


@pytest.mark.parametrize("name", ["zero_hpz_partition_size", "mics_shard_size"])
def test_keys_of_deepspeed_are_refused_with_this_one(name):
    message = error_of(**{f"zero_optimization.{name}": 8})
    assert f"zero_optimization.{name} = 8: is not supported" in message
    assert "set parallel3d.mesh.dp_shards" in message


@pytest.mark.parametrize(
    "name", ["data_parallel_shard_degree", "num_replicas", "dp_replicate_size"]
)
def test_names_of_other_frameworks_name_this_one(name):
    assert SHARDS in error_of(**{f"parallel3d.mesh.{name}": 2})
