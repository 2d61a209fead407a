"""The planner's activations of every shipped config at its full size, by its programs really run.

On the meta device, where tensors have sizes and no memory; each storage is counted while the
executor runs a rank's whole program. Two operators are replaced there by what a GPU runs, as meta
would take another path: attention by torch's own fused operators (meta makes the scores), and
RMSNorm by one kernel. Not here is what the engine does: ZeRO's shards, gathers and buckets.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from parallel3d import models
from parallel3d.base.reader import CONFIGS, read
from parallel3d.config import RunConfig
from parallel3d.config.hardware import load
from parallel3d.engine import EngineSettings
from parallel3d.model.spec import Shape
from parallel3d.pipeline.executor import Executor, Microbatch
from parallel3d.pipeline.stages import build_stages
from parallel3d.plan.memory.peak import peak_of
from parallel3d.plan.setting import Setting
from parallel3d.schedule.schedule import peak_in_flight
from parallel3d.schedule.schedules import make_schedule
from parallel3d.tensor import documents
from parallel3d.tensor.segments import Segments
from tests.counting import Counting
from tests.pipeline.test_shipped_configs import NAMES, join, resolved  # noqa: F401

pytestmark = pytest.mark.gloo


def attention(q, k, v, dropout_p=0.0, is_causal=False, enable_gqa=False, scale=None):
    """What a GPU's kernel keeps: q, k, v as they are, the result, a logsumexp for each query."""
    return torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, dropout_p, True, scale=scale
    )[0]


class FusedRMSNorm(torch.autograd.Function):
    """What one kernel keeps: its input, and of each row the reciprocal root in fp32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def kernels_of_a_gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attention)
        patch.setattr(documents, "in_one_kernel", lambda q, dropout, sinks=False: True)
        patch.setattr(F, "rms_norm", lambda x, shape, weight, eps: FusedRMSNorm.apply(x, weight))
        yield


class MetaEngine:
    """As much of an Engine as the executor asks for: the stages themselves."""

    settings = SimpleNamespace(dtype=torch.bfloat16)

    def __init__(self, module):
        self.forward = self.evaluate = module

    def backward(self, output, gradient=None, side_loss=None, stage=0, last=False):
        output.backward(gradient)

    def wait_for_weights(self, stage):
        pass

    def accumulation(self):
        return nullcontext()


def shortened(name, layers):
    """The config with just the microbatches that its fullest moment needs, and some that follow.

    `layers`: so many blocks, if not all.
    """
    config = resolved(name)
    sizes = config.mesh
    pipeline = config.pipeline
    count = min(config.num_microbatches, 2 * sizes.pp) if sizes.pp > 1 else config.num_microbatches
    raw = config.to_dict() | {"gradient_accumulation_steps": count, "train_batch_size": None}
    if layers:
        raw["parallel3d"]["model"]["num_hidden_layers"] = layers
    short = RunConfig.from_dict(raw).resolve(sizes.pp * sizes.dp * sizes.tp)
    was, now = (
        peak_in_flight(make_schedule(pipeline.schedule, sizes.pp, m, pipeline.stages_per_rank))
        for m in (config.num_microbatches, count)
    )
    assert was == now and short.num_microbatches == count
    return short


def measured(config, pp, join):  # noqa: F811
    """Most bytes of activations and gradients alive on a coordinate while its program runs."""
    sizes = config.mesh
    pipeline = config.pipeline
    shape = Shape(config.micro_batch_size, config.data.sequence_length)
    schedule = make_schedule(
        pipeline.schedule, sizes.pp, config.num_microbatches, pipeline.stages_per_rank
    )
    mesh = join(config, pp, 0, 0)
    mesh.device = torch.device("meta")
    built = build_stages(
        models.layers(config.model),
        schedule,
        EngineSettings.from_config(config),
        mesh=mesh,
        shape=shape,
        activation_checkpointing=pipeline.activation_checkpointing,
        sequence_parallel=sizes.sequence_parallel,
    )
    module = built.module.bfloat16()
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    split = sizes.tp if sizes.sequence_parallel else 1
    hidden = shape.batch, shape.seq // split, config.model.hidden_size
    executor = Executor(schedule, mesh, MetaEngine(module), key=built.key, hidden_shape=hidden)
    documents_of_a_sample = torch.arange(shape.seq).div(512).long().expand(shape.batch, -1)
    isolated = config.data.isolate_documents
    segments = Segments.of(documents_of_a_sample) if isolated else None
    with Counting(meta=True) as counting:
        for parameter in module.parameters():
            parameter.detach()
        weights = counting.bytes
        batch = torch.empty(
            config.num_microbatches,
            2,
            shape.batch,
            shape.seq,
            dtype=torch.int64,
            device="meta",
        )
        segments = segments and segments.on(mesh.device)
        executor.run([Microbatch(*microbatch, segments) for microbatch in batch])
    return counting.peak - weights


def compare(name, pp, join, layers=None, kernels=kernels_of_a_gpu):  # noqa: F811
    """Bytes of a coordinate on a GPU, as planned and as its program had them alive."""
    config = shortened(name, layers)
    coord = pp % config.mesh.pp
    memory = peak_of(Setting.from_config(config), coord, load("H100-SXM5-80GB"))
    planned = sum(memory.parts[part] for part in ("gradients", "activations", "logits"))
    with kernels():
        peak = measured(config, coord, join)
    print(f"{name} pp {coord}: {planned / 1e9:.2f} GB for {peak / 1e9:.2f}, {planned / peak:.3f}")
    return planned, peak


COORDS = []
for name in NAMES:
    # The whole config would be checked: seconds for a model whose parts are looked for.
    pp = read(CONFIGS / f"{name}.json")["parallel3d"]["mesh"]["pp"]
    COORDS += [(name, 0), (name, -1)] if pp > 1 else [(name, 0)]


def test_short_programs_of_wide_layers_hold_the_planned_memory(join):  # noqa: F811
    """Of the config that has all: grouped queries, sequence parallelism, documents, a large end."""
    for coord in (0, -1):
        planned, peak = compare("llama-8b", coord, join, layers=4)
        assert planned == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pp"), COORDS)
def test_program_at_full_size_holds_the_planned_memory(name, pp, join):  # noqa: F811
    planned, peak = compare(name, pp, join)
    assert planned == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
def test_default_path_on_meta_holds_more(join):  # noqa: F811
    """Scores of all heads: what the replaced operators are replaced for."""
    planned, peak = compare("gpt2-124m", 0, join, kernels=nullcontext)
    assert planned < 0.8 * peak
