"""A small model to plan, and a made-up cluster to plan it for."""

from parallel3d.config import RunConfig
from parallel3d.config.hardware import Cores, Figure, Hardware, Host, Link

GIB = 2**30


def config(batch=16, layers=6, hidden=2048, heads=4, seq=512, **changes):
    raw = {
        "train_batch_size": batch,
        "bf16": {"enabled": True},
        "optimizer": {"params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
        "parallel3d": {
            "mesh": "plan",
            "model": {
                "family": "gpt",
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "vocab_size": 8192,
                "max_position_embeddings": seq,
            },
            "data": {"sequence_length": seq},
            "train": {"steps": 100},
        },
    }
    return RunConfig.from_dict(raw | changes)


def machine(memory=80 * GIB, host_memory=32 * GIB, per_node=4, cores=0):
    """A made-up cluster; a memory of some GiB makes even a small model too large."""

    def figure(value):
        return Figure(value=value, source="made up")

    return Hardware(
        name="toy",
        device_names=("toy",),
        peak_flops={"bf16": figure(3e14)},
        memory_bytes=figure(memory),
        memory_bandwidth=figure(2e12),
        devices_per_node=figure(per_node),
        link=Link(bandwidth=figure(3e11), latency=figure(4e-6)),
        network=Link(bandwidth=figure(2.5e10), latency=figure(1.4e-5)),
        host=Host(
            memory_bytes=figure(host_memory),
            device_bandwidth=figure(2.5e10 if not cores else 1e15),
            adam_params=figure(4e8 if not cores else 1e13),
        ),
        # Processes that share a machine's cores, on which the host's Adam may be the faster one.
        cores=Cores(count=figure(cores), alone={}) if cores else None,
    )
