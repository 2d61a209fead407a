"""Hybrid sharding under the names of other frameworks: the number of shards, or of their copies."""

from collections.abc import Iterator
from typing import Any

from parallel3d.extras.foreign.rules import Row, Rule

_OURS = "parallel3d.mesh.dp_shards"
_SHARDS = Rule(f"{_OURS}@shards", plain=(-1,))
_COPIES = Rule(f"{_OURS}@copies", plain=(1,))
_NAMES = {
    "data_parallel_shard_degree": _SHARDS,
    "dp_shard_size": _SHARDS,
    "shard_degree": _SHARDS,
    "mics_shard_size": _SHARDS,
    "data_parallel_replicate_degree": _COPIES,
    "dp_replicate_size": _COPIES,
    "num_replicas": _COPIES,
    "num_distributed_optimizer_instances": _COPIES,
    "zero_hpz_partition_size": Rule(plain=(1,), why=f"set {_OURS}, which shards all states"),
}


def rule_of(setting: str) -> Rule | None:
    """Return the rule of a setting, in any block and with hyphens or underscores."""
    return _NAMES.get(setting.rpartition(".")[2].replace("-", "_"))


def add(values: dict[str, Any], _: str) -> Iterator[Row]:
    """Set mesh.dp_shards in `values`; yield a row if the number does not follow from the file."""
    copies = values.get("@copies", 1)
    dp = values.get("parallel3d.mesh.dp", 0)
    if "@shards" in values:
        values[_OURS] = values["@shards"]
    elif copies > 1 and dp and dp % copies == 0:
        values[_OURS] = dp // copies
    elif copies > 1:
        why = f"of an unknown number of data-parallel ranks; set {_OURS}"
        yield Row("UNKNOWN", "copies of shards", copies, why=why)
