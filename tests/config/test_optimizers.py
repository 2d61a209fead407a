"""Optimizers are found by their files, read without torch, and refused by name where necessary."""

import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.deepspeed import OptimizerConfig
from parallel3d.model import optimizers
from parallel3d.plan.memory.peak import per_rank
from parallel3d.plan.report.plan_rows import checkpoint_bytes
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.step import step_time
from tests.config.configs import error_of, raw
from tests.own_optimizers import SGD, scratch
from tests.plan.settings import A100, changed

pytestmark = pytest.mark.pure

NAME = "optimizer.type"
FOLDERS = "parallel3d.run.optimizer_folders"
OFFLOAD = "zero_optimization"
STATE = 'STATE = (State("momentum_buffer", 4),)'
THREE = "STATE = tuple(State(name, 4) for name in 'abc')"
NVME = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
CPU = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


@pytest.fixture
def mine(tmp_path):
    files = {
        "narrow": SGD.replace(STATE, STATE.replace("4", "2")),
        "three": SGD.replace(STATE, THREE),
        "pinned": SGD.replace('OFFLOADS = ("cpu", "nvme")', "OFFLOADS = ()"),
        "slip": SGD.replace("optimizers import State", "optimizers import kinds"),
        "part": SGD.replace(STATE, "").replace("def reference", "def _reference"),
    }
    assert len({SGD, *files.values()}) == 6
    with scratch(tmp_path / "mine", **files) as folder:
        yield folder


def test_optimizer_files_are_read_without_torch():
    code = (
        "import sys\nfrom parallel3d.config import RunConfig\n"
        "from parallel3d.model import optimizers as o\n"
        "for name in o.names(): o.load(name), o.kinds(name), o.state_bytes(name)\n"
        "assert 'parallel3d.model.optimizers.adamw' in sys.modules\n"
        "assert not {'torch', 'deepspeed', 'parallel3d.engine'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    assert done.returncode == 0


def test_file_in_the_user_folder_is_an_optimizer(mine):
    message = error_of(**{NAME: "SGD"})
    assert 'must be "AdamW" or "Adam" or "muon"; write "AdamW", or set run.opt' in message
    config = RunConfig.from_dict(raw(**{NAME: "SGD", FOLDERS: [mine]}))
    assert config.optimizer.type == "sgd"
    params = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}
    assert config.optimizer.params.model_dump() == params
    assert RunConfig.from_dict(config.to_dict()) == config
    message = error_of(**{NAME: "sgd", FOLDERS: [mine], "optimizer.params.momentums": 0.5})
    assert 'optimizer.params.momentums = 0.5: is not a setting; the nearest one is "mom' in message
    message = error_of(**{NAME: "sgd", FOLDERS: [mine], "optimizer.params.momentum": 1.5})
    assert "optimizer.params.momentum = 1.5: must be less than 1" in message
    # Its own settings are not AdamW's, whose name is taken.
    message = error_of(**{FOLDERS: [mine], "optimizer.params.momentum": 0.5})
    assert "momentum = 0.5: is only a setting of type" in message
    (Path(mine) / "adamw.py").write_text(SGD)
    assert "contains 'adamw', a name that parallel3d uses itself" in error_of(**{FOLDERS: [mine]})


UNSUPPORTED = [
    ({NAME: "narrow"}, "keeps momentum_buffer in 2 bytes an element; keep it in fp32"),
    ({NAME: "three", OFFLOAD: NVME}, "buffer_count = 4: is too few buffers for the state of"),
    ({NAME: "pinned", OFFLOAD: CPU}, 'device = "cpu": cannot hold the state of pinned; use "n'),
    ({NAME: "slip"}, "= \"slip\": its file cannot be imported (NameError: name 'State' is no"),
    ({NAME: "part"}, "part.py lacks STATE, reference; add what docs/add-an-optimizer.md lists"),
    ({NAME: "sgd", "parallel3d.model.parametrization": {"type": "mup", "base_width": 32}},
     '.type = "mup": sets learning rates that do not transfer with sgd; use "standard", or'),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), UNSUPPORTED)
def test_unsupported_use_of_an_optimizer_is_refused_by_name(mine, changes, words):
    message = error_of(**{FOLDERS: [mine], **changes})
    assert words in message and message.startswith("1 problem "), message


def test_supported_uses_of_the_same_optimizers_are_accepted(mine):
    more = {"stage": 3, "offload_optimizer": NVME["offload_optimizer"] | {"buffer_count": 5}}
    for changes in (
        {NAME: "three"},
        {NAME: "three", OFFLOAD: more},
        {NAME: "pinned"},
        {NAME: "sgd", OFFLOAD: CPU},
        {NAME: "sgd", OFFLOAD: NVME},
    ):
        accepted = RunConfig.from_dict(raw(**{FOLDERS: [mine], **changes}))
        assert accepted.optimizer.type == changes[NAME]


def test_incomplete_file_is_named_when_loaded(mine):
    optimizers.__path__.append(mine)
    with pytest.raises(ConfigError, match=r"part\.py lacks STATE, reference"):
        optimizers.load("part")


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_planner_counts_state_and_step_of_a_user_optimizer(mine, offload):
    """8 bytes of master and momentum an element, of which 16 move in a step; AdamW: 12 and 24."""
    changes = {"parallel3d.model.vocab_size": 4096, "bf16.enabled": True, FOLDERS: [mine]}
    config = RunConfig.from_dict(raw(**changes, **{NAME: "sgd"})).resolve(8)
    sgd = changed(Setting.from_config(config), zero_stage=3, offload_optimizer=offload)
    adamw = changed(sgd, optimizer=OptimizerConfig(params={"lr": 1e-3}))
    on_device = per_rank(changed(sgd, offload_optimizer="none"))
    for one, other, on_device_peak in zip(per_rank(adamw), per_rank(sgd), on_device, strict=True):
        differences = {
            "none": one.parts["optimizer"] - other.parts["optimizer"],
            "cpu": one.host - other.host,
            "nvme": one.nvme - other.nvme,
        }
        elements = on_device_peak.parts["optimizer"] // 8
        assert elements and differences[offload] == 4 * elements
    assert checkpoint_bytes(adamw) - checkpoint_bytes(sgd) > 4 * sgd.workload.num_params
    seconds = [step_time(s, A100).parts["optimizer"] for s in (sgd, adamw)]
    assert seconds[0] < seconds[1]
