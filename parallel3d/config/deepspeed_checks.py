"""Rules between DeepSpeed's settings: precision, ZeRO, offload and the optimizer."""

from collections.abc import Iterator

from parallel3d.base.section import Problem
from parallel3d.config.deepspeed import Bf16Config, Fp16Config, OptimizerConfig, ZeroConfig
from parallel3d.model import optimizers
from parallel3d.model.config import ModelConfig
from parallel3d.model.parametrization import parametrization_of
from parallel3d.model.spec import MASTER_BYTES

_LEAST_ON_NVME = 2**18  # elements; DeepSpeed keeps less than 1 MiB in host memory


def check_precision(bf16: Bf16Config, fp16: Fp16Config) -> Iterator[Problem]:
    """Check that there is one precision."""
    if bf16.enabled and fp16.enabled:
        yield Problem(
            "fp16.enabled",
            True,
            "cannot be combined with bf16.enabled",
            "disable one of them (bf16 needs no loss scale)",
        )


def check_communication_type(
    bf16: Bf16Config, communication_data_type: str | None
) -> Iterator[Problem]:
    """Check that gradients travel in bf16 in bf16 training only."""
    if communication_data_type == "bf16" and not bf16.enabled:
        yield Problem(
            "communication_data_type",
            "bf16",
            "would round gradients that are not bf16",
            "use fp32, or set bf16.enabled = true",
        )


def check_offload(zero_optimization: ZeroConfig) -> Iterator[Problem]:
    """Check that the ZeRO stage supports the offload, and that NVMe has a path."""
    zero = zero_optimization
    path = "zero_optimization"
    param = zero.offload_param.device
    optimizer = zero.offload_optimizer.device
    rule = "requires nvme_path"
    remedy = 'add "nvme_path": "/local/nvme" to '
    if optimizer == "nvme" and not zero.offload_optimizer.nvme_path:
        yield Problem(
            f"{path}.offload_optimizer.device", "nvme", rule, f"{remedy}offload_optimizer"
        )
    if param == "nvme" and not zero.offload_param.nvme_path:
        yield Problem(f"{path}.offload_param.device", "nvme", rule, f"{remedy}offload_param")
    if param != "none" and zero.stage != 3:
        yield Problem(
            f"{path}.offload_param.device",
            param,
            f"requires sharded parameters (stage 3), but stage is {zero.stage}",
            "use stage 3, or remove it",
        )
    if optimizer == "nvme" and zero.stage != 3:
        yield Problem(
            f"{path}.offload_optimizer.device",
            optimizer,
            f"requires stage 3, but stage is {zero.stage}",
            'use stage 3, or device "cpu"',
        )


def check_nvme(optimizer: OptimizerConfig, zero_optimization: ZeroConfig) -> Iterator[Problem]:
    """Refuse combinations of NVMe settings in which DeepSpeed fails or goes wrong."""
    zero = zero_optimization
    path = "zero_optimization"
    threshold = zero.stage3_param_persistence_threshold
    offload = zero.offload_optimizer
    on_nvme = zero.offload_param.device == "nvme"
    # The swapper reads master, gradient and states into one buffer each.
    states = (optimizers.kinds(optimizer.type, role) for role in (optimizers.MATRIX, None))
    each = max(4, *(1 + len(kinds) for kinds in states))
    needed = each * (1 + offload.pipeline_read + offload.pipeline_write)
    what = "pipeline_read or pipeline_write" if needed > each else f"the state of {optimizer.type}"
    if on_nvme and threshold > _LEAST_ON_NVME:
        yield Problem(
            f"{path}.stage3_param_persistence_threshold",
            threshold,
            "would keep parameters unsharded that offload_param puts on NVMe",
            f"use at most {_LEAST_ON_NVME}",
        )
    for name in ("buffer_count", "buffer_size"):
        if on_nvme and getattr(zero.offload_param, name) == 0:
            yield Problem(
                f"{path}.offload_param.{name}",
                0,
                "leaves no buffer through which parameters come from NVMe",
                "remove it, or write a larger number",
            )
    if offload.device == "nvme" and offload.buffer_count < needed:
        yield Problem(
            f"{path}.offload_optimizer.buffer_count",
            offload.buffer_count,
            f"is too few buffers for {what}",
            f"use {needed} or more, or disable pipeline_read and pipeline_write",
        )


def check_optimizer(
    optimizer: OptimizerConfig, zero_optimization: ZeroConfig, model: ModelConfig
) -> Iterator[Problem]:
    """Refuse what the engine, DeepSpeed or a checkpoint cannot do with an optimizer."""
    file = optimizers.load(optimizer.type)
    name = optimizer.type
    params = optimizer.params
    device = zero_optimization.offload_optimizer.device
    kind = parametrization_of(model).type
    usable = ("none", *file.OFFLOADS)
    if device not in usable:
        yield Problem(
            "zero_optimization.offload_optimizer.device",
            device,
            f"cannot hold the state of {name}",
            "use " + " or ".join(f'"{place}"' for place in usable),
        )
    if kind not in file.PARAMETRIZATIONS:
        yield Problem(
            "parallel3d.model.parametrization.type",
            kind,
            f"sets learning rates that do not transfer with {name}",
            'use "standard", or optimizer.type = "AdamW"',
        )
    if kind == "mup" and getattr(params, "width_power", 1.0) is None:
        yield Problem(
            "optimizer.params.scale",
            getattr(params, "scale", None),
            "has no learning rate that transfers over the width, as muP needs",
            'use "spectral" or "match_rms_adamw"',
        )
    for state in file.STATE:
        if state.num_bytes != MASTER_BYTES:
            yield Problem(
                "optimizer.type",
                name,
                f"keeps {state.name} in {state.num_bytes} bytes an element",
                "keep it in fp32 (4 bytes), as checkpoints and DeepSpeed's swap buffers do",
            )
