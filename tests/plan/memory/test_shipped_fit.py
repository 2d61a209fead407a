"""Each shipped config fits the GPUs that its first lines name, with the planner's margin."""

import pytest

from parallel3d.config import RunConfig
from parallel3d.config.hardware import load
from parallel3d.plan.memory.peak import fullest
from parallel3d.plan.setting import Setting

pytestmark = pytest.mark.pure

GB = {
    "gpt2-124m": 24, "gpt2-1.5b": 24, "gpt3-13b": 80, "gpt3-175b": 80,
    "llama-8b": 80, "llama-70b": 80, "qwen3-0.6b": 80,
    "pythia-70m": 24, "pythia-1.4b": 40,
}  # fmt: skip


@pytest.mark.parametrize("name", GB)
def test_it_fits(name):
    config = RunConfig.from_json(name)
    sizes = config.mesh
    config = config.resolve(sizes.pp * sizes.dp * sizes.tp)
    memory = fullest(Setting.from_config(config), load("H100-SXM5-80GB"))
    print(f"{name}: {memory.total / 1e9:.1f} GB of {GB[name]}")
    assert memory.total < GB[name] * 1e9
