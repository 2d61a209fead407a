"""The start-up self-test: train a toy stage for two steps and compare it with plain PyTorch.

It fails in the first second of a run if a DeepSpeed release breaks one of the remedies of
docs/deepspeed.md, which would otherwise show only as a slightly wrong loss curve.
"""

import logging
from dataclasses import replace

import deepspeed
import torch
from torch import Tensor, nn

from parallel3d.base.errors import TrainingError
from parallel3d.base.say import Say
from parallel3d.engine.construction import building, writing
from parallel3d.engine.engine import Engine
from parallel3d.engine.engine_settings import EngineSettings
from parallel3d.engine.quirks import nvme
from parallel3d.mesh.mesh import Mesh
from parallel3d.model import optimizers
from parallel3d.model.optimizers import MATRIX
from parallel3d.model.parametrization import Scales
from parallel3d.model.spec import Init, ParamSpec
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import Cut, held_parameters
from parallel3d.tensor.initialise import fill
from parallel3d.tensor.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.tensor.random_key import RandomKey

KNOWN_GOOD = "==0.19.8"  # pyproject.toml has the same; a test compares the two
_HIDDEN = 32
_BATCH = 4
_LR = 0.1
_MICROBATCHES = 2
# Relative; the faults that the test looks for cause errors above 0.1.
_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
_BLOCK = 1024  # bytes of one read from NVMe
_log = logging.getLogger(__name__)


def _specs(settings: EngineSettings, mesh: Mesh) -> list[ParamSpec]:
    """Return the toy's parameters; on NVMe, shards are a few blocks and a fraction of one."""
    zero = settings.zero
    on_nvme = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)
    inner = mesh.tensor.size * (32 * mesh.shards.size + 1 if on_nvme else 8)
    init = Init(std=0.3)
    # A role has rates of its own under muP, which the test leaves out.
    role = MATRIX if _uses_matrices(settings) else None
    return [
        ParamSpec("up.weight", (inner, _HIDDEN), ("tensor",), init, weight_decay=True, role=role),
        ParamSpec("up.bias", (inner,), ("tensor",), init, weight_decay=False),
        ParamSpec(
            "down.weight", (_HIDDEN, inner), (None, "tensor"), init, weight_decay=True, role=role
        ),
        ParamSpec("down.bias", (_HIDDEN,), (), init, weight_decay=False),
    ]


def _uses_matrices(settings: EngineSettings) -> bool:
    return optimizers.load(settings.optimizer.type).WHOLE_MATRICES


class _Stage(nn.Module):
    """A stage of two tensor-parallel layers with a residual connection."""

    def __init__(self, inner: int, mesh: Mesh) -> None:
        super().__init__()
        context = LayerContext(mesh.tensor.group, RandomKey(0))
        self.up = ColumnParallelLinear(_HIDDEN, inner, context=context)
        self.down = RowParallelLinear(inner, _HIDDEN, context=context)

    def forward(self, stage: int, x: Tensor, on_input_grad: object = None) -> Tensor:
        """x [batch, hidden] -> [batch, hidden]; the other arguments are unused."""
        added: Tensor = self.down(torch.tanh(self.up(x)))
        return x + added


def _plain(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Compute the toy stage in plain PyTorch: x [batch, hidden] -> [batch, hidden]."""
    inner = torch.tanh(x @ w["up.weight"].T + w["up.bias"])
    return x + inner @ w["down.weight"].T + w["down.bias"]


def self_test(settings: EngineSettings, mesh: Mesh, say: Say = _log.info) -> None:
    """Compare two steps (F0 F1 B0 B1) on a toy stage with plain PyTorch; takes half a second.

    The steps use the run's own settings. The first runs backward from an output gradient, as a
    middle stage does, the second from a loss, as the last stage does. Collective: raise
    TrainingError on every rank if the gradient norm or the weights differ on any.
    """
    settings = _scaled_down(settings)
    try:
        with nvme.swapping_small_tensors(_BLOCK):
            norms, weights = _run(settings, mesh, say)
    except (AssertionError, AttributeError, RuntimeError, TypeError) as error:
        reason = f"it raised {type(error).__name__}: {error}"
        raise TrainingError(_message(settings, "could not be run", reason)) from error
    _compare(norms, weights, settings, mesh)


def _scaled_down(settings: EngineSettings) -> EngineSettings:
    """Return the run's settings, scaled so that a toy stage uses every feature of them."""
    # DeepSpeed allocates its buckets and buffers at full size.
    sizes: dict[str, object] = {"reduce_bucket_size": 2**16, "allgather_bucket_size": 2**16}
    offload = settings.zero.offload_param
    if offload.device == "nvme":
        sizes["stage3_param_persistence_threshold"] = 0
        sizes["offload_param"] = offload.model_copy(update={"buffer_size": 2**12, "max_in_cpu": 0})
    # With a large eps Adam's step is proportional to the gradient; otherwise it is nearly the
    # gradient's sign.
    changed: dict[str, object] = {"eps": 1.0}
    rates = settings.rates
    if settings.optimizer.type == "muon":
        # One rate for all. More steps of Newton-Schulz multiply half precision's rounding by
        # several hundred.
        changed |= {"ns_steps": 1, "muon_lr": None, "adam_lr": None}
        rates = Scales().rates()
    params = settings.optimizer.params.model_copy(update=changed)
    # The toy's output gradients are about 1; they would overflow at DeepSpeed's default scale.
    scale = {"initial_scale_power": 4, "loss_scale": 16.0 if settings.fp16.loss_scale else 0.0}
    return replace(
        settings,
        micro_batch_size=_BATCH,
        optimizer=settings.optimizer.model_copy(update={"params": params}),
        rates=rates,
        gradient_clipping=1.0,
        zero=settings.zero.model_copy(update=sizes),
        aio=settings.aio.model_copy(update={"block_size": _BLOCK}),
        fp16=settings.fp16.model_copy(update=scale),
    )


def _run(
    settings: EngineSettings, mesh: Mesh, say: Say
) -> tuple[list[float], dict[str, tuple[Cut, Tensor]]]:
    specs = _specs(settings, mesh)
    with building(settings, mesh, say=say):
        stage = _Stage(specs[0].shape[0], mesh)
    held = list(held_parameters(stage, specs, mesh))
    for h in held:
        with writing(h.parameter) as (shard, start), torch.no_grad():
            fill(shard, start, h.spec, h.name, h.cut, seed=mesh.pipeline.coord)
    engine = Engine(stage, held, settings, mesh=mesh, say=say)
    try:
        norms = [_step(engine, by_loss) for by_loss in (False, True)]
        return norms, {h.name: (h.cut, engine.full_parameter(h)) for h in held}
    finally:
        engine.close()


def _step(engine: Engine, by_loss: bool) -> float:
    mesh = engine.mesh
    dtype = engine.settings.dtype
    samples = _samples(mesh.samples.size)[mesh.samples.coord].to(mesh.device, dtype)
    outputs = []
    with engine.accumulation():
        engine.gather(0)
        for x, _ in samples:
            output = engine.forward(0, x.clone().requires_grad_())
            assert isinstance(output, Tensor)
            outputs.append(output)
        for output, (_, grad) in zip(outputs, samples, strict=True):
            if by_loss:
                engine.backward((output * grad).sum())
            else:
                engine.backward(output, grad * engine.loss_scale)
        engine.release(0)
    return engine.step(_LR).grad_norm


def _samples(dp: int) -> Tensor:
    """Return inputs and output gradients: [dp, microbatch, 2, batch, hidden], on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(dp, _MICROBATCHES, 2, _BATCH, _HIDDEN, generator=generator)


def _reference(
    settings: EngineSettings, mesh: Mesh
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Run the two steps in plain PyTorch.

    Return both gradient norms, and this stage's full weights before and after. A norm is
    sqrt(sum of g^2) over all elements of all stages, each counted once; g is summed over
    microbatches and averaged over dp.
    """
    specs = _specs(settings, mesh)
    stages = [_full_weights(specs, p, settings.dtype) for p in range(mesh.pipeline.size)]
    own_weights = stages[mesh.pipeline.coord]
    before = {name: weight.detach().clone() for name, weight in own_weights.items()}
    decay = [weights[s.name] for weights in stages for s in specs if s.weight_decay]
    no_decay = [weights[s.name] for weights in stages for s in specs if not s.weight_decay]
    group = {"lr": _LR, "eps": settings.eps}
    groups = [
        group | {"params": decay, "weight_decay": settings.weight_decay},
        group | {"params": no_decay, "weight_decay": 0.0},
    ]
    clipped = decay + no_decay
    if getattr(settings.optimizer.params, "clip", "all") == "adam_only":
        clipped = no_decay
    if _uses_matrices(settings):
        groups[0]["views"] = _whole
    own = settings.optimizer
    optimizer = optimizers.load(own.type).reference(groups, own.params)
    x, grad = _samples(mesh.samples.size).flatten(0, 1).transpose(0, 1).flatten(1, 2)
    norms = []
    for _ in range(2):
        for weights in stages:
            (_plain(weights, x) * grad / mesh.samples.size).sum().backward()
        norm = nn.utils.get_total_norm([w.grad for w in decay + no_decay if w.grad is not None])
        nn.utils.clip_grads_with_norm_(clipped, settings.gradient_clipping, norm)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms, before, {name: weight.detach() for name, weight in own_weights.items()}


def _whole(weight: Tensor) -> list[Tensor]:
    """Return the matrices of a weight, which is one."""
    return [weight]


def _full_weights(specs: list[ParamSpec], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    weights = {}
    for spec in specs:
        flat = torch.empty(spec.numel, dtype=dtype)
        fill(flat, 0, spec, spec.name, Cut(spec.shape), seed)
        weights[spec.name] = flat.view(spec.shape).float().requires_grad_()
    return weights


def _compare(
    norms: list[float], weights: dict[str, tuple[Cut, Tensor]], settings: EngineSettings, mesh: Mesh
) -> None:
    expected_norms, before, after = _reference(settings, mesh)
    errors = {}
    sources = ("an output gradient", "a loss")
    for source, norm, expected in zip(sources, norms, expected_norms, strict=True):
        errors[f"gradient norm, backward from {source}"] = abs(norm - expected) / expected
    for name, (cut, weight) in weights.items():
        error = (weight - cut.part_of(after[name])).abs().max()
        errors[f"{name} after the steps"] = float(error / (after[name] - before[name]).abs().max())
    # `not <=` also catches NaN.
    bad = {k: error for k, error in errors.items() if not error <= _TOLERANCE[settings.precision]}
    counts = [int(row[0]) for row in mesh.messages.gather_floats([len(bad)])]
    if any(counts):
        problems = "\n  ".join(
            f"{kind}: off by {error:.2g}, relatively" for kind, error in bad.items()
        )
        where = f"differ from plain PyTorch on {sum(c > 0 for c in counts)} of {len(counts)} ranks"
        raise TrainingError(_message(settings, where, problems or "not on this rank"))


def _message(settings: EngineSettings, outcome: str, problems: str) -> str:
    zero = settings.zero
    reduction = "per_step" if settings.reduces_once else "per_microbatch"
    remedy = f"deepspeed{KNOWN_GOOD} is known to be correct: pip install 'deepspeed{KNOWN_GOOD}'"
    if deepspeed.__version__.partition("+")[0] == KNOWN_GOOD.removeprefix("=="):
        remedy = (
            f"deepspeed{KNOWN_GOOD} is known to be correct with the other versions in "
            "constraints.txt: install those; if it fails again, leave this host out, whose device "
            "may be faulty"
        )
    return (
        f"the self-test of DeepSpeed {deepspeed.__version__} failed: two steps of a toy stage "
        f"(ZeRO {zero.stage}, optimizer offload {zero.offload_optimizer.device}, parameter "
        f"offload {zero.offload_param.device}, {settings.precision}, gradient_reduction "
        f"{reduction}) {outcome}\n  {problems}\n{remedy}"
    )
