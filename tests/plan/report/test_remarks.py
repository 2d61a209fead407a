"""A large buffer is named, with the key, the cause and a value that makes it small."""

import re

import pytest

from parallel3d.base.reader import CONFIGS
from parallel3d.config import RunConfig
from parallel3d.plan.memory.peak import fullest
from parallel3d.plan.report.plan_table import largest_layer, on_buffers
from parallel3d.plan.setting import Setting

pytestmark = pytest.mark.pure


def setting(*settings: str) -> Setting:
    config = RunConfig.from_json(str(CONFIGS / "ds.json"), settings).with_vocab_size(2048)
    return Setting.from_config(config.resolve(1))


def test_remark_on_the_reduce_bucket():
    assert not list(on_buffers(setting(), fullest(setting()), None))  # reduced once a step
    deep = "--parallel3d.model.num_hidden_layers", "24", "--train_micro_batch_size_per_gpu", "1"
    of = setting("--pipeline.gradient_reduction", "per_microbatch", *deep)
    memory = fullest(of)
    (remark,) = on_buffers(of, memory, None)
    assert "GiB: DeepSpeed's reduce_bucket_size = 500,000,000 elements" in remark
    # Token table and positions, 2,048 + 128 rows of 128; a block has 12 h^2 + 13 h.
    assert largest_layer(of) == 280_000 >= (2048 + 128) * 128 > 12 * 128**2 + 13 * 128
    match = re.search(r"--zero_optimization.reduce_bucket_size (\d+)$", remark)
    assert match
    lower = setting("--pipeline.gradient_reduction", "per_microbatch", *deep, *match[0].split())
    # The bucket of ZeRO-3 is in fp32, there all the time, and no larger than the model.
    saved = memory.total - fullest(lower).total
    elements = memory.parts["weights"] // 4
    assert saved >= 4 * (elements - 280_000) > 0
    assert list(on_buffers(lower, fullest(lower), None)) == []
