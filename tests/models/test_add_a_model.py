"""docs/add-a-model.md, followed to the letter in a copy of the project."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
QUANTITIES = (
    "saved",
    "peak",
    "resident",
    "forward_collectives",
    "backward_collectives",
    "products",
    "flops",
    "traffic",
)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3},
    "parallel3d": {
        "mesh": {"sequence_parallel": True},
        "model": {
            "family": "opt",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        },
        "data": {"sequence_length": 32},
        "train": {"steps": 10},
    },
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project with the page's files in it, and no other file changed."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("parallel3d", "models", "launch", "tests", "configs", "docs", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    page = (ROOT / "docs/add-a-model.md").read_text()
    files = re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL)
    assert [Path(name).name for name, _ in files] == ["spec.py", "blocks.py", "huggingface.py"]
    for name, text in [("models/opt/__init__.py", ""), *files]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(folder, *command):
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_new_family_is_found_by_the_tests(copy):
    models = ("test_model", "test_layer_cost_of_torch", "test_transformers")
    tests = [f"tests/models/{name}.py" for name in models]
    tests += [f"tests/test_{name}.py" for name in ("floors", "docs")]
    # A shipped family would also raise its room's budget and add its settings to docs/config.md.
    which = ("-k", "(opt or test_floors or test_docs) and not budget and not settings")
    printed = run(copy, "-m", "pytest", "-n0", "-v", "-rN", *which, *tests)
    for name in (
        "test_spec_describes_the_built_module[opt] PASSED",
        *(
            f"test_predicted_cost_of_a_layer_equals_the_measured_one[opt-{name}] PASSED"
            for name in QUANTITIES
        ),
        "test_wrong_setting_of_a_cost_is_detected[opt] PASSED",
        "test_models_equal_transformers[opt-few] PASSED",
        "test_names_and_sizes_equal_those_of_transformers[opt] PASSED",
    ):
        assert name in printed, printed
    for name in ("floors", "docs"):
        assert f"tests/test_{name}.py::" in printed
    run(copy, "-m", "mypy", "parallel3d/models/opt")
    run(copy, "-m", "ruff", "check", "models/opt")
    run(copy, "-m", "ruff", "format", "--check", "models/opt")


@pytest.mark.slow
def test_new_family_trains_like_one_process(copy):
    (copy / "opt.json").write_text(json.dumps(CONFIG))
    meshes = "1x1x1,2x1x2"
    command = ("launch/verify.py", "--config", "opt.json", "--meshes", meshes, "--json")
    report = json.loads(run(copy, *command))
    assert report["passed"], report
    assert {case["mesh"] for case in report["cases"]} == set(meshes.split(",")), report
