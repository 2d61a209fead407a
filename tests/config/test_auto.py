"""What "auto" becomes, against transformers' own integration (one process)."""

from copy import deepcopy

import pytest
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from parallel3d.config import RunConfig
from parallel3d.config.auto import RULES
from tests.config.configs import raw

pytestmark = pytest.mark.gloo

HIDDEN = 72
STEPS = 500
SCHEDULERS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
}
# bf16 is where parallel3d has a rule of its own: Hugging Face's gives fp32.
PATHS = [rule.path for rule in RULES if rule.path not in ("bf16.enabled", "train_batch_size")]


class Model:
    """As much of a model as the integration asks for."""

    class config:
        hidden_size = HIDDEN


def at(tree, path):
    for name in path.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_auto_resolves_as_in_hugging_face(name, tmp_path):
    autos = {path: "auto" for path in PATHS if not path.startswith("scheduler")}
    autos["train_batch_size"] = "auto"
    autos["scheduler"] = {"type": name, "params": dict.fromkeys(SCHEDULERS[name], "auto")}
    file = raw(**{"zero_optimization.stage": 3, "parallel3d.mesh": {}} | autos)
    file["parallel3d"]["model"]["hidden_size"] = HIDDEN
    file["parallel3d"]["model"]["num_attention_heads"] = 8
    file["parallel3d"]["train"]["steps"] = STEPS

    theirs = HfTrainerDeepSpeedConfig(deepcopy(file))
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    theirs.trainer_config_process(arguments)
    theirs.trainer_config_finalize(arguments, Model(), STEPS)

    ours = RunConfig.from_dict(file).resolve(1).to_dict()
    scheduler = [f"scheduler.params.{key}" for key in SCHEDULERS[name]]
    paths = [p for p in PATHS if not p.startswith("scheduler")] + scheduler + ["train_batch_size"]
    for path in paths:
        assert at(file, path) == "auto"
        assert at(ours, path) == at(theirs.config, path), path
