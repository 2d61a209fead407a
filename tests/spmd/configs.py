"""Configs for tests of types: any family, on tp ranks."""

from parallel3d.config import RunConfig
from tests.verify.configs import config_of


def tp_config(
    model="gpt", tp=2, sequence_parallel=False, checkpointing="none", isolate=False, dp=1,
    **settings,
):  # fmt: skip
    """A resolved config of `dp` replicas on `tp` ranks; `settings` are the model's."""
    raw = config_of(
        model=model, zero=1, sequence_parallel=sequence_parallel, checkpointing=checkpointing,
        isolate=isolate,
    )  # fmt: skip
    block = raw["parallel3d"]
    block["mesh"] |= {"tp": tp}
    block["model"] = block["model"] | settings
    return RunConfig.from_dict(raw).resolve(tp * dp)
