"""launch/plan.py as a user types it, and what a config's `"mesh": "plan"` trains."""

import json
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

import pytest

from launch import plan as plan_command
from launch import train as train_command
from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.train.dry_run import dry_run
from parallel3d.train.inputs import missing_inputs
from tests.launch.launching import PYTHON, Place, environment, torchrun

pytestmark = pytest.mark.drill

PLAN = str(Path(__file__).parents[2] / "launch/plan.py")
DONE = 0
FAILED = 1
KEYS = {
    "pp",
    "dp",
    "tp",
    "zero_stage",
    "offload",
    "micro_batch",
    "num_microbatches",
    "schedule",
    "recompute",
    "fits",
    "reason",
    "memory_bytes",
    "step_seconds",
    "time",
    "tokens_per_second",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
    "mfu_full",
    "mfu_causal",
}
ON_A_NODE = ("--config", "gpt2-1.5b.json", "--hardware", "a100-80gb", "--devices", 8)
# A table is as true of fewer plans, whose search is shorter.
NARROW = ("--fix", "zero_stage=1", "offload_optimizer=none", "recompute=none")


def plan(*arguments, cwd=None):
    command = [sys.executable, PLAN, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment() | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_table_and_json_agree():
    done = plan(*ON_A_NODE, "--rows", 4, "--json", *NARROW)
    assert done.returncode == DONE, done.stderr
    result = json.loads(done.stdout)  # and nothing else on standard output
    rows = result["plans"]
    fitting = [row for row in rows if row["fits"]]
    assert len(fitting) == 4 and all(row.keys() >= KEYS for row in rows)
    times = [row["step_seconds"] for row in fitting]
    assert times == sorted(times)
    assert result["devices"] == 8 and result["global_batch_size"] == 1024
    assert len({(row["pp"], row["dp"], row["tp"]) for row in fitting}) == 4
    for row in rows:
        assert row["pp"] * row["dp"] * row["tp"] == 8
        assert row["micro_batch"] * row["num_microbatches"] * row["dp"] == 1024
        assert (row["reason"] == "") == row["fits"]
    # The table is on standard error, in plain text where that is no terminal, and says the same.
    assert "\x1b" not in done.stderr and max(map(len, done.stderr.splitlines())) < 160
    for number, row in enumerate(fitting, 1):
        mesh = f"{row['pp']}×{row['dp']}×{row['tp']}"
        line = next(line for line in done.stderr.splitlines() if line.split()[:1] == [str(number)])
        assert mesh in line and row["schedule"] in line
        assert f"{row['micro_batch']}×{row['num_microbatches']}" in line
    # The second table has the parts of the same rows.
    lines = done.stderr.split("by parts:")[1].splitlines()
    heads = lines[1].split()
    for number, row in enumerate(fitting, 1):
        cells = next(line.split() for line in lines if line.split()[:1] == [str(number)])
        weights = float(cells[heads.index("weights")])
        assert weights == pytest.approx(row["memory_bytes"]["weights"] / 2**30, rel=0.01, abs=0.05)
        assert float(cells[heads.index("comp.")]) == pytest.approx(row["time"]["compute"], rel=0.01)


@pytest.fixture
def planned(called, monkeypatch):
    """Call `plan` in this process."""
    monkeypatch.setenv("COLUMNS", "160")
    return partial(called, plan_command.main, "plan.py")


def test_fixed_choices_are_in_every_row(planned):
    fixed = ("--fix", "zero_stage=3", "recompute=full", "pp=1")
    code, out, err = planned(*ON_A_NODE, "--rows", 3, *fixed)
    assert (code, err) == (DONE, "")
    assert "gpt of 1.56B parameters in bf16 on 8 x A100-SXM4-80GB" in out
    assert "fixed: zero_stage = 3, recompute = full, pp = 1" in out
    assert out.count(" full ") >= 3
    assert "weights" in out and out.count(" step ") >= 3


def test_explain_shows_a_row_in_detail(tmp_path, planned):
    svg = tmp_path / "row.svg"
    trace = tmp_path / "row.json"
    drawn = ("--svg", svg, "--trace", trace)
    code, out, err = planned(*ON_A_NODE, "--rows", 2, "--fix", "pp=4", "--explain", 2, *drawn)
    assert code == DONE, err
    for word in ("optimizer", "activations", "an estimate", "bubble", "MFU", "device-hours"):
        assert word in out
    picture = ET.parse(svg).getroot()
    texts = [text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("pp 4 × dp") for text in texts)
    assert any(text.startswith("device memory of rank") for text in texts)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


def test_exit_code_is_1_if_nothing_fits(planned):
    fixed = ("--fix", "zero_stage=0", "offload_optimizer=none", "pp=1", "tp=1")
    code, out, err = planned(
        "--config",
        "gpt3-13b.json",
        "--hardware",
        "a100-40gb",
        "--devices",
        8,
        *fixed,
        "--parallel3d.mesh",
        "plan",
        "--train_batch_size",
        1024,
    )
    assert code == FAILED, err
    assert "NOTHING FITS on 8 x A100-SXM4-40GB: the smallest plan needs" in out
    assert "use fewer fixed choices (now zero_stage" in out


def test_plan_starts_in_a_second():
    """Without torch, scipy or matplotlib; its own seconds, whatever else the machine does."""
    code = (
        "import sys, runpy, time; sys.argv = ['plan.py', '--help']\n"
        f"try: runpy.run_path({PLAN!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'scipy', 'matplotlib', 'deepspeed', 'numpy', 'transformers'}\n"
        "print('heavy:', sorted(heavy & sys.modules.keys()), time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "heavy: []" in done.stdout, done.stdout[-500:] + done.stderr
    assert float(done.stdout.split()[-1]) < 4


PLANNED = (
    "--parallel3d.mesh",
    "plan",
    "--parallel3d.run.hardware",
    "A100-SXM4-80GB",
    "--bf16.enabled",
    "true",
    "--train_batch_size",
    16,
    "--gradient_accumulation_steps",
    1,
    "--parallel3d.plan.fix",
    '["offload"]',
)


@pytest.mark.slow  # tests/train/test_claim.py plans the mesh of a start
def test_planned_mesh_trains(tmp_path):
    """On two ranks, with what a dry run for two says."""
    place = Place(tmp_path)
    dry = place.run(PYTHON, *PLANNED, "--dry-run", 2, "--json", steps=2)
    assert dry.returncode == DONE, dry.stderr
    report = json.loads(dry.stdout)
    assert report["dry_run"] and report["plan"]["fits"]
    assert report["checkpoint_bytes"] > 12 * 700_000
    assert "dry run: nothing was trained" in dry.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"texts"}  # neither a corpus nor a run

    name = ("--parallel3d.run.name", "planned")
    done = place.run(torchrun(2), *PLANNED, *name, steps=2)
    assert done.returncode == DONE, done.stderr[-4000:]
    assert done.stderr.count('parallel3d.mesh: "plan" for 2 x A100-SXM4-80GB') == 1
    assert [line["step"] for line in place.lines("planned")] == [1, 2]
    config = json.loads((tmp_path / "runs/planned/config.json").read_text())
    row = report["plan"]
    mesh = config["parallel3d"]["mesh"]
    assert {axis: mesh[axis] for axis in ("pp", "dp", "tp")} == {
        axis: row[axis] for axis in ("pp", "dp", "tp")
    }
    assert config["train_micro_batch_size_per_gpu"] == row["micro_batch"]
    assert config["zero_optimization"]["stage"] == row["zero_stage"]
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"  # fixed
    files = (tmp_path / "runs/planned/checkpoints/step-2").iterdir()
    size = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
    # It was asked for the 2048 tokens of ds.json's vocabulary or fewer: the corpus has 270.
    assert report["checkpoint_bytes"] == pytest.approx(size, rel=0.05)


@pytest.mark.slow
def test_dry_run_under_a_launcher_prints_once(tmp_path):
    place = Place(tmp_path)
    dry = place.run(torchrun(2), *PLANNED, "--dry-run", "--json", steps=2)
    alone = place.run(PYTHON, *PLANNED, "--dry-run", 2, "--json", steps=2)
    assert dry.returncode == DONE, dry.stderr
    assert json.loads(dry.stdout) == json.loads(alone.stdout)
    assert dry.stderr.count("dry run: nothing was trained") == 1


def test_dry_run_on_an_unknown_machine(tmp_path, monkeypatch, capsys):
    """The default config on any machine: memory and checkpoint at least, and no corpus."""
    monkeypatch.chdir(tmp_path)
    config = RunConfig.from_json("ds.json", [])
    assert dry_run(config, Launch(rank=0, local_rank=0, world_size=1), devices=0, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["memory_bytes"]["total"] > 12 * 1_000_000 / 2
    # 4 blocks of 12 h^2 + 13 h, the table of tokens, that of positions, the last norm.
    h = 128
    num_params = 4 * (12 * h * h + 13 * h) + 2048 * h + 128 * h + 2 * h
    assert report["checkpoint_bytes"] == pytest.approx(12 * num_params, rel=0.02)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("data.paths", "nowhere/*.txt", "data.paths: 'nowhere/*.txt' matches no file"),
        ("data.tokenizer", "./nowhere", "data.tokenizer = './nowhere' is not a directory"),
        ("checkpoint.resume", "nowhere/step-1", 'resume = "nowhere/step-1": is not a folder'),
    ],
)
def test_dry_run_says_what_would_stop_a_run_here(tmp_path, monkeypatch, path, text, message):
    monkeypatch.chdir(tmp_path)
    config = RunConfig.from_json(
        "ds.json", ["--data.source", "text", "--data.paths", text, f"--{path}", text]
    )
    assert any(message in line for line in missing_inputs(config))


NVME = '{"device": "nvme", "nvme_path": "taken"}'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--run.directory taken/runs", 'run.directory = "taken/runs": cannot be written ('),
        ("--run.directory broken", "broken is a link to nowhere, which does not exist"),
        ("--data.cache taken", 'parallel3d.data.cache = "taken": '),
        ("--checkpoint.in_memory_every 1 --checkpoint.in_memory_folder taken", "memory_folder = "),
        (f"--zero_optimization.offload_optimizer {NVME!r}", "offload_optimizer.nvme_path = "),
    ],
)
def test_dry_run_names_files_where_folders_are_due(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    Path("broken").symlink_to("nowhere")
    (line,) = missing_inputs(RunConfig.from_json("ds.json", shlex.split(words)))
    assert message in line


def test_dry_run_plans_for_named_hardware_of_plain_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    numbers = {"peak_flops": {"bf16": "1P"}, "memory_bytes": "80GB", "memory_bandwidth": 3e12}
    numbers |= {"devices_per_node": 8, "link": {"bandwidth": "450GB", "latency": 3e-6}}
    Path("mine.json").write_text(json.dumps(numbers))
    words = ["train.py", "--config", "ds.json", "--dry-run", "1e0", "--hardware", "mine.json"]
    monkeypatch.setattr(sys, "argv", [*words, "--bf16.enabled", "true", "--json"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--zero_optimization.offload_optimizer", "null"])
    args, overrides = train_command.parse_args()
    config = RunConfig.from_json(args.config, overrides)
    assert dry_run(config, Launch(rank=0, local_rank=0, world_size=1), devices=1, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hardware"] == "mine" and report["plan"]["step_seconds"] > 0
