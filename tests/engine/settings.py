"""Settings of an engine without a run."""

from parallel3d.config.deepspeed import AioConfig, Fp16Config, OptimizerConfig, ZeroConfig
from parallel3d.config.parallel3d_block import PipelineConfig
from parallel3d.engine import EngineSettings
from parallel3d.model.parametrization import Scales


def settings_of(
    micro_batch_size=1,
    *,
    zero_stage=3,
    offload_optimizer="none",
    offload_param="none",
    folder=None,
    zero=None,
    gradient_reduction="auto",
    weights="auto",
    optimizer="AdamW",
    params=None,
    precision="fp32",
    gradient_clipping=0.0,
):
    """Return the settings; `folder` is for NVMe, `zero` has more settings of zero_optimization."""
    block = {
        "stage": zero_stage,
        "offload_optimizer": {"device": offload_optimizer, "nvme_path": folder},
        "offload_param": {"device": offload_param, "nvme_path": folder},
    }
    pipeline = PipelineConfig(gradient_reduction=gradient_reduction, weights=weights)
    return EngineSettings(
        micro_batch_size=micro_batch_size,
        zero=ZeroConfig.model_validate(block | (zero or {})),
        weights=pipeline.gathered_weights,
        reduces_once=pipeline.reduces_once(zero_stage),
        optimizer=OptimizerConfig(type=optimizer, params={"lr": 1e-3} | (params or {})),
        rates=Scales().rates(),
        precision=precision,
        reduced_in="fp32",
        gradient_clipping=gradient_clipping,
        overlap_update=False,
        fp16=Fp16Config(),
        aio=AioConfig(),
    )
