"""Each config in configs/ at its full world size: the real layers of several of its ranks.

One process: torch's fake process group stands for all ranks, and the meta device for all memory.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel3d import models
from parallel3d.base.reader import CONFIGS
from parallel3d.config import RunConfig
from parallel3d.config.learning_rate import rate
from parallel3d.engine import EngineSettings
from parallel3d.mesh import mesh as mesh_module
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Shape
from parallel3d.pipeline import stages as stages_module
from parallel3d.pipeline.stages import build_stages
from parallel3d.schedule.schedules import make_schedule
from parallel3d.tensor.cut import even_split
from parallel3d.tensor.segments import Segments

pytestmark = pytest.mark.gloo

# What the papers and model cards call it, in parameters; tokens of a batch; processes.
PUBLISHED = {
    "gpt2-124m": (124.4e6, 0.5e6, 8),
    "gpt2-1.5b": (1.5576e9, 1e6, 8),
    "gpt3-13b": (13.0e9, 2e6, 64),
    "gpt3-175b": (174.6e9, 3.2e6, 1024),
    "llama-8b": (8.03e9, 4e6, 32),
    "llama-70b": (70.6e9, 8e6, 512),
    "qwen3-0.6b": (0.596e9, 0.5e6, 8),
    "qwen3-30b-a3b": (30.532e9, 2e6, 64),
    "olmoe-1b-7b": (6.919e9, 4e6, 32),
    "mixtral-8x7b": (46.703e9, 4e6, 128),
    "pythia-70m": (70.4e6, 2e6, 8),
    "pythia-1.4b": (1.4146e9, 2e6, 64),
}
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json") if path.stem != "ds")


def test_every_shipped_config_is_listed():
    assert set(NAMES) == set(PUBLISHED)


def resolved(name):
    """The config for its own number of processes, which its mesh says."""
    config = RunConfig.from_json(name)
    assert isinstance(config.mesh.dp, int)
    return config.resolve(config.mesh.pp * config.mesh.dp * config.mesh.tp).completed()


@pytest.fixture
def join(monkeypatch):
    """A function that makes this process one rank of many, on the meta device."""

    def fake(launch, device, watched):
        dist.init_process_group(
            "fake", rank=launch.rank, world_size=launch.world_size, store=FakeStore()
        )

    def no_memory(parameter):
        return nullcontext((parameter, 0))

    monkeypatch.setattr(mesh_module, "join", fake)
    monkeypatch.setattr(stages_module, "building", lambda *_: torch.device("meta"))
    monkeypatch.setattr(stages_module, "writing", no_memory)
    monkeypatch.setattr(stages_module, "fill", lambda *_: None)

    def join(config, pp, dp, tp):
        if dist.is_initialized():
            dist.destroy_process_group()
        sizes = config.mesh
        rank = (pp * sizes.dp + dp) * sizes.tp + tp
        launch = Launch(rank, sizes.pp * sizes.dp * sizes.tp, 0)
        return Mesh(**sizes.sizes._asdict(), launch=launch)

    torch.set_default_dtype(torch.bfloat16)  # grouped products take no other on the meta device
    yield join
    torch.set_default_dtype(torch.float32)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_sizes_batch_and_length(name):
    config = resolved(name)
    parameters, tokens, world_size = PUBLISHED[name]
    sizes = config.mesh
    assert sizes.pp * sizes.dp * sizes.tp == world_size
    count = sum(layer.num_params for layer in models.layers(config.model))
    assert count == pytest.approx(parameters, rel=0.02)
    batch = config.micro_batch_size * config.num_microbatches * sizes.dp
    assert config.train_batch_size == config.global_batch_size == batch
    assert config.tokens_per_step == batch * config.data.sequence_length
    assert config.tokens_per_step == pytest.approx(tokens, rel=0.06)
    assert config.data.sequence_length <= config.model.max_position_embeddings
    # The peak follows the warm-up, and the last step has the floor.
    schedule = config.train.lr_schedule
    lr = config.optimizer.params.lr
    assert rate(config, schedule.warmup_steps - 1) == lr
    assert rate(config, config.num_steps - 1) == pytest.approx(lr * schedule.min_ratio, abs=1e-12)
    # The tokenizer that the config names is no larger than the vocabulary.
    assert config.with_corpus(config.model.vocab_size, 10**9).model == config.model


def with_few_blocks(config):
    """A config with two blocks a stage, each of the full size."""
    ranks = config.mesh.sizes.ranks
    raw = config.to_dict()
    num_stages = config.mesh.pp * config.pipeline.stages_per_rank
    raw["parallel3d"]["model"]["num_hidden_layers"] = 2 * num_stages
    return RunConfig.from_dict(raw).resolve(ranks).completed()


# The largest mesh, and one of each family. tests/models/ has the ways of heads and norms.
MET = ("gpt3-175b", "llama-8b", "pythia-70m")


@pytest.mark.parametrize(
    ("name", "is_short"),
    [
        *((name, True) for name in MET),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in NAMES),
    ],
)
def test_layers_of_first_middle_and_last_rank_on_the_meta_device(name, is_short, join):
    config = resolved(name)
    if is_short:
        config = with_few_blocks(config)
    sizes = config.mesh
    pipeline = config.pipeline
    layers = models.layers(config.model)
    shape = Shape(config.micro_batch_size, config.data.sequence_length)
    schedule = make_schedule(
        pipeline.schedule, sizes.pp, config.num_microbatches, pipeline.stages_per_rank
    )
    assert schedule.num_stages == sizes.pp * pipeline.stages_per_rank
    seen = set()
    for pp in sorted({0, sizes.pp // 2, sizes.pp - 1}):
        tp = pp % sizes.tp
        mesh = join(config, pp, sizes.dp - 1, tp)
        assert mesh.coords == (pp, sizes.dp - 1, tp)
        built = build_stages(
            layers,
            schedule,
            EngineSettings.from_config(config),
            mesh=mesh,
            shape=shape,
            activation_checkpointing=pipeline.activation_checkpointing,
            sequence_parallel=sizes.sequence_parallel,
        )
        check_shapes(built, sizes.tp, tp)
        seen |= {i for s in run_forward(built, config, shape) for i in built.layers_of_stage[s]}
    assert {0, len(layers) - 1} <= seen
    assert [i for stage in built.layers_of_stage for i in stage] == list(range(len(layers)))


def check_shapes(built, tp, coord):
    """Each parameter is the part of its spec's shape that this rank is to hold."""
    assert built.held
    for held in built.held:
        expected = list(held.spec.shape)
        parameter = held.parameter
        assert parameter.is_meta
        for dim, role in held.spec.cuts({"tensor": tp}).items():
            if role != "tensor":  # each rank has all experts
                continue
            units = held.spec.units or expected[dim]  # whole heads
            start, stop = even_split(units, tp, coord)
            expected[dim] = (stop - start) * (expected[dim] // units)
        assert list(parameter.shape) == expected, held.name


def run_forward(built, config, shape):
    """Run this rank's stages, each on what the one before would send; gives their numbers."""
    last = len(built.layers_of_stage) - 1
    split = config.mesh.tp if config.mesh.sequence_parallel else 1
    hidden = (shape.batch, shape.seq // split, config.model.hidden_size)
    stages = sorted(map(int, built.module.stages))
    for stage in stages:
        with torch.device("meta"):
            tokens = torch.zeros(shape.batch, shape.seq, dtype=torch.int64)
            x = tokens if stage == 0 else torch.zeros(hidden, requires_grad=True)
        segments = None
        if config.data.isolate_documents:
            one_each = torch.zeros(shape.batch, shape.seq, dtype=torch.int64)
            segments = Segments.of(one_each).on(tokens.device)
        labels = tokens if stage == last else None
        output = built.module(stage, x, labels, segments)
        output = output if isinstance(output, torch.Tensor) else output[0]  # without side losses
        assert tuple(output.shape) == (() if stage == last else hidden)
        output.sum().backward()
    assert all(held.parameter.grad is not None for held in built.held)
    return stages
