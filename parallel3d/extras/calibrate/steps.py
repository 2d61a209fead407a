"""Time training steps of the real engine on this machine."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.extras.calibrate.measure_device import clock_of, set_threads, slowest
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Microbatch
from parallel3d.train.assembly import Assembly, assemble

HEAD_SIZE = 64


class SmallRun(NamedTuple):
    """The sizes and choices of a small training run to time."""

    mesh: MeshSizes
    zero: int
    hidden: int
    layers: int
    family: str = "gpt"
    micro: int = 2
    microbatches: int = 2
    seq: int = 128
    vocab: int = 512
    offload: str = "none"
    recompute: str = "none"
    schedule: str = "gpipe"
    precision: str = "fp32"

    def config(self) -> CompleteConfig:
        """Return the complete config of the run."""
        model = {
            "family": self.family,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": max(1, self.hidden // HEAD_SIZE),
            "max_position_embeddings": self.seq,
            "vocab_size": self.vocab,
        }
        # Tokens are random; no text is read.
        data = {
            "source": "python-stdlib",
            "sequence_length": self.seq,
            "vocab_size": self.vocab,
        }
        raw = {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.microbatches,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "bf16": {"enabled": self.precision == "bf16"},
            "zero_optimization": {
                "stage": self.zero,
                "offload_optimizer": {"device": self.offload},
                # Shard small parameters too, as the parameters of a large model would be.
                "stage3_param_persistence_threshold": 0,
            },
            "parallel3d": {
                "mesh": self.mesh._asdict(),
                "model": model,
                "data": data,
                "pipeline": {
                    "schedule": self.schedule,
                    "activation_checkpointing": self.recompute,
                },
                "train": {"steps": 1},
            },
        }
        return RunConfig.from_dict(raw, f"the run {self}").resolve(self.mesh.ranks).completed()


class Timed(NamedTuple):
    """Seconds of a step on its slowest rank; `update`: norm, clipping, Adam and new weights."""

    seconds: float
    update: float


def small_runs(ranks: int) -> list[SmallRun]:
    """Return small runs on one process and on `ranks`, similar enough to compare."""
    tiny = SmallRun(MeshSizes(dp=ranks), 1, 64, 2, micro=1, seq=32)
    wide = SmallRun(MeshSizes(dp=ranks), 1, 256, 2, micro=4)
    # Few tokens and more parameters than fit a cache: dominated by reduction, norm, Adam, gathers.
    heavy = SmallRun(MeshSizes(dp=ranks), 1, 1024, 1, micro=1, microbatches=1, seq=32)
    heads = ranks * -(-4 // ranks)  # at least four, and a multiple of the tp ranks
    alone: dict[str, Any] = {"mesh": MeshSizes(), "zero": 0}
    return [
        tiny,
        tiny._replace(**alone),
        wide,
        wide._replace(**alone),
        tiny._replace(layers=6),
        tiny._replace(zero=3),
        tiny._replace(zero=3, layers=6),
        tiny._replace(zero=3, microbatches=6),
        wide._replace(zero=3),
        wide._replace(family="llama", layers=3),
        wide._replace(mesh=MeshSizes(tp=ranks), zero=0, hidden=heads * HEAD_SIZE),
        wide._replace(
            mesh=MeshSizes(pp=ranks), zero=0, layers=max(4, ranks), microbatches=4, micro=2
        ),
        heavy,
        heavy._replace(zero=3),
        tiny._replace(**alone, layers=6),
        tiny._replace(mesh=MeshSizes(), zero=3, layers=6),
        tiny._replace(**alone, microbatches=6),
        wide._replace(**alone, layers=4, microbatches=1),
        wide._replace(**alone, family="llama"),
        wide._replace(**alone, recompute="full"),
        heavy._replace(**alone),
        heavy._replace(mesh=MeshSizes(), offload="cpu"),
    ]


def time_steps(
    rank: int, runs: Sequence[SmallRun | dict[str, object]], steps: int, own_time: bool = False
) -> list[list[Timed]]:
    """Return the seconds of `steps` training steps of each run, all on this world's ranks.

    A run is small, or a complete config, as `CompleteConfig.to_dict` returns.

    The runs take turns, so that disturbances affect all alike. The first round is a warm-up.

    - `own_time`: for a single process, use `clock_of`, which leaves out waits.
    """
    built = []
    for run in runs:
        if isinstance(run, SmallRun):
            built.append(_build(run.config()))
        else:
            built.append(_build(RunConfig.from_dict(run).completed()))
    timings: list[list[Timed]] = [[] for _ in runs]
    for step in range(1 + steps):
        for one, times in zip(built, timings, strict=True):
            times.append(_step(*one, step, own_time))
    return [times[1:] for times in timings]


def _step(
    mesh: Mesh, parts: Assembly, batch: list[Microbatch], lr: float, step: int, own_time: bool
) -> Timed:
    backend = torch.get_device_module(mesh.device)
    now = clock_of(mesh) if own_time and mesh.world.size == 1 else time.perf_counter
    mesh.barrier()
    start = now()
    parts.executor.run(batch, step)
    backend.synchronize()
    reduced = now()
    parts.engine.step(lr)
    backend.synchronize()
    end = now()
    return Timed(slowest(mesh, end - start), slowest(mesh, end - reduced))


def _build(config: CompleteConfig) -> tuple[Mesh, Assembly, list[Microbatch], float]:
    mesh = Mesh(**config.mesh.groups)
    set_threads(mesh)
    parts = assemble(config, mesh)
    shape = (config.num_microbatches, config.micro_batch_size, config.data.sequence_length + 1)
    text = torch.randint(int(config.model.vocab_size), shape, device=mesh.device)
    batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]
    return mesh, parts, batch, config.optimizer.params.lr
