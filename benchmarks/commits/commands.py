"""The other commands: plans of all shipped configs, published runs, and --json of each command."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.commits.checkout import Place
from benchmarks.commits.recording import MEASURED, checksums, json_lines, untimed
from benchmarks.commits.runs import BY_NAME, trained

HARDWARE = {
    "ds.json": ("A100-SXM4-80GB", 8),
    "gpt2-124m.json": ("V100-SXM2-16GB", 8),
    "gpt2-1.5b.json": ("V100-SXM2-32GB", 8),
    "gpt3-13b.json": ("A100-SXM4-80GB", 64),
    "gpt3-175b.json": ("A100-SXM4-80GB", 1024),
    "llama-8b.json": ("H100-SXM5-80GB", 32),
    "llama-70b.json": ("H200-SXM-141GB", 512),
    "mixtral-8x7b.json": ("MI300X", 128),
    "olmoe-1b-7b.json": ("H100-SXM5-80GB", 32),
    "pythia-70m.json": ("A100-SXM4-40GB", 8),
    "pythia-1.4b.json": ("A100-SXM4-40GB", 64),
    "qwen3-0.6b.json": ("B200-SXM-180GB", 8),
    "qwen3-30b-a3b.json": ("GB200-NVL72", 64),
}
"""Hardware and devices for the plans of each shipped config."""
_ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {
    path.stem: path
    for path in (
        _ROOT / "benchmarks" / "published" / "experts.csv",
        _ROOT / "tests" / "published" / "published_sample.csv",
        _ROOT.parent / "shared" / "data" / "throughput" / "published_throughput.csv",
    )
    if path.exists()
}
"""Tables of published runs, by name; the same ones for both commits."""
SCHEDULES = (
    ("gpipe", 1),
    ("one_f_one_b", 1),
    ("interleaved", 2),
    ("v_shape", 2),
    ("breadth_first", 2),
    ("zero_bubble", 1),
    ("zb_v", 2),
)
COMMANDS = (
    "train",
    "plan",
    "draw",
    "prepare",
    "verify",
    "evaluate",
    "generate",
    "checkpoint",
    "convert",
    "scale",
    "report",
    "runs",
    "replay",
    "doctor",
)
REFUSALS: dict[str, dict[str, object]] = {
    "unknown key": {"parallel3d.mesh.tq": 2},
    "wrong type": {"parallel3d.mesh.tp": "two"},
    "heads": {"parallel3d.mesh.tp": 3},
    "schedule": {"parallel3d.pipeline.schedule": "one_f_one_c"},
    "stages": {"parallel3d.pipeline.stages_per_rank": 2},
    "recomputation": {"parallel3d.pipeline.activation_checkpointing": "half"},
    "recomputed layers": {"parallel3d.pipeline.activation_checkpointing": "full:x"},
    "recomputed parts": {"parallel3d.pipeline.activation_checkpointing": "core_attn+mlp+x"},
    "layers": {"parallel3d.model.num_hidden_layers": 0},
    "offload": {"zero_optimization.stage": 0, "zero_optimization.offload_param.device": "cpu"},
    "bits": {"fp16.enabled": True, "bf16.enabled": True},
    "experts": {"parallel3d.mesh.ep": 2},
    "batch": {"train_batch_size": 7},
    "removed by DeepSpeed": {"sparse_gradients": True},
    "too deep": {"parallel3d.mesh.pp": 8, "parallel3d.mesh.dp": 1},
}
"""Settings that are refused, with a message that stays the same."""
GPT_RUN = "gpt-gpipe-zero3-cpu"
TWO_MESHES = "1x1x1,2x1x2"


def record_plan(place: Place, config: str, without: frozenset[str]) -> None:
    """Record the plans of a shipped config: rows, table, the first row in detail, a dry run."""
    hardware, devices = HARDWARE[config]
    case = f"plan/{config.removesuffix('.json')}"
    words = ("--config", config, "--hardware", hardware)
    done = place.command("plan", *words, "--devices", devices, "--json", check=False)
    place.record(case, "rows.txt", f"{done.returncode}\n{_json_or_text(done.stdout, without)}")
    place.record(case, "table.txt", untimed(done.stderr, without))
    # The config's own devices, or those of a node.
    done = place.command("plan", *words, "--explain", 1, check=False)
    text = f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    place.record(case, "explained.txt", untimed(text, without))
    done = place.command("plan", "--config", config, "--json", check=False)
    place.record(case, "no-hardware.txt", f"{done.returncode}\n{done.stdout}\n{done.stderr}")


def record_published(place: Place, table: str, without: frozenset[str]) -> None:
    """Record the comparison of the planner with published runs."""
    done = place.python("-m", "benchmarks.published", "--json", PUBLISHED[table])
    place.record(f"published/{table}", "rows.txt", json_lines(done.stdout))
    done = place.python("-m", "benchmarks.published", "--markdown", PUBLISHED[table])
    place.record(f"published/{table}", "table.txt", done.stdout)


def record_draw(place: Place, without: frozenset[str]) -> None:
    """Record the programs of all schedules."""
    for schedule, stages in SCHEDULES:
        sizes = ("--pp", 4, "--microbatches", 8, "--stages-per-rank", stages)
        for weights in ((), ("--weights", "per_pass")):
            done = place.command(
                "draw", "--schedule", schedule, *sizes, *weights, "--json", "--svg", "drawn.svg"
            )
            case = "-".join(("draw", schedule, *weights[1:]))
            place.record("json/draw", f"{case}.txt", json_lines(done.stdout, without))
            place.record("json/draw", f"{case}-svg.txt", (place.work / "drawn.svg").read_text())


def record_checkpoint(place: Place, without: frozenset[str]) -> None:
    """Record what is said about checkpoints, and runs trained from them."""
    run = trained(place, GPT_RUN).relative_to(place.work)
    other = trained(place, "moe-bias-ep").relative_to(place.work)
    for name, words in (
        ("inspect", ("checkpoint", "inspect", "--json", run)),
        ("inspect-experts", ("checkpoint", "inspect", "--json", other)),
        ("verify", ("checkpoint", "verify", "--json", run)),
        ("diff", ("runs", "diff", "--json", run, run)),
        ("diff-others", ("runs", "diff", "--json", run, other)),
        ("report", ("report", "--json", run, other, "--to", "page.html")),
        ("evaluate", ("evaluate", "--json", run)),
        ("evaluate-experts", ("evaluate", "--json", other)),
    ):
        done = place.command(*words, check=False)
        text = done.stdout
        if words[1] == "inspect" and without:
            text = _without_size_of_config(text)
        text = f"{done.returncode}\n{json_lines(text, without)}"
        place.record("json/checkpoint", f"{name}.txt", text)


def _without_size_of_config(text: str) -> str:
    """Return the description of a checkpoint without the size of state.json, and the sums with it.

    It has the run's config, with settings that only one of the commits has.
    """
    described = json.loads(text)
    for name in ("other", "total"):
        del described["bytes"][name]
    described["files"] = [x for x in described["files"] if x["file"] != "state.json"]
    return json.dumps(described)


def record_convert(place: Place, without: frozenset[str]) -> None:
    """Record exports to transformers, with the files that they write, and imports."""
    for name in BY_NAME:
        run = trained(place, name).relative_to(place.work)
        folders = [f"converted/{name}", f"converted/{name}-back"]
        for folder in folders:
            shutil.rmtree(place.work / folder, ignore_errors=True)
        exported, imported = folders
        done = place.command("convert", "export", run, "--to", exported, "--json")
        text = json_lines(done.stdout, without)
        place.record("json/convert", f"export-{name}.txt", text)
        files = checksums(place.work / exported)
        place.record("json/convert", f"files-{name}.txt", _without_readme(files))
        if name == GPT_RUN:
            done = place.command("convert", "import", exported, "--to", imported, "--json")
            place.record("json/convert", "import.txt", json_lines(done.stdout, without))
            words = ("--prompt", "the cat", "--greedy", "--max-new-tokens", 12)
            done = place.command("generate", imported, *words)
            place.record("json/convert", "generate.txt", done.stdout)


def record_prepare(place: Place, without: frozenset[str]) -> None:
    """Record the corpus of a config: its summary, samples and files."""
    folder = "prepared"
    shutil.rmtree(place.work / folder, ignore_errors=True)
    config = BY_NAME[GPT_RUN].config(place)
    config["parallel3d"]["data"] |= {"cache": folder}
    (place.work / "prepare.json").write_text(json.dumps(config))
    words = ("--config", "prepare.json", "--json", "--show", 3, "--to", "megatron", "exported")
    done = place.command("prepare", *words)
    place.record("json/prepare", "summary.txt", json_lines(done.stdout, without))
    files = [checksums(place.work / folder, "**/*.bin"), checksums(place.work, "exported.*")]
    place.record("json/prepare", "files.txt", "\n".join(files))


def record_scale(place: Place, without: frozenset[str]) -> None:
    """Record the runs of a ladder, a fit of made-up runs, and forecasts from it."""
    lines = ["params,tokens,loss"]
    for flops in (1e18, 3e18, 1e19, 3e19):
        for share in (0.3, 0.6, 1.0, 1.6, 3.0):
            params = share * math.sqrt(flops / 120)
            tokens = flops / 6 / params
            loss = 1.69 + 406.4 / params**0.34 + 410.7 / tokens**0.28
            lines.append(f"{params},{tokens},{loss}")
    (place.work / "runs.csv").write_text("\n".join(lines))
    squares = ("--estimator", "squares", "--bootstraps", 20, "--no-report", "--json")
    forecast = ("predict", "--fit", "fit.json", "--json")
    for name, words in (
        ("plan", ("plan", "--ladder", "cpu.json", "--json")),
        ("plan-muon", ("plan", "--ladder", "cpu-muon.json", "--json")),
        ("fit", ("fit", "runs.csv", *squares)),
        ("predict", (*forecast, "--flops", "1e21")),
        ("predict-run", (*forecast, "--params", "1e9", "--tokens", "2e10")),
    ):
        if name.startswith("plan"):
            ladder = place.checkout.folder / "configs" / "ladders" / words[2]
            words = (*words[:2], ladder, *words[3:])
        done = place.command("scale", *words)
        place.record("json/scale", f"{name}.txt", json_lines(done.stdout, without))


def record_verify(place: Place, without: frozenset[str]) -> None:
    """Record the comparison with plain transformers, on two meshes."""
    for name in (GPT_RUN, "moe-bias-ep"):
        config = BY_NAME[name].config(place)
        (place.work / "verify.json").write_text(json.dumps(config))
        words = ("--config", "verify.json", "--meshes", TWO_MESHES, "--json")
        done = place.command("verify", *words, check=False)
        text = f"{done.returncode}\n{json_lines(done.stdout, without)}"
        place.record("json/verify", f"{name}.txt", text)


def record_replay(place: Place, without: frozenset[str]) -> None:
    """Record a step that is trained again, and the dry run of a config."""
    config = BY_NAME["neox-zb-v"].config(place)
    config["parallel3d"]["checkpoint"] = {"every": 2}
    config["parallel3d"]["run"] |= {"name": "replayed"}
    (place.work / "replayed.json").write_text(json.dumps(config))
    words = ("--config", "replayed.json")
    in_bf16 = ("--bf16.enabled", "true")  # the hardware has no speed in fp32
    done = place.command("train", *words, "--dry-run", 2, "--json", *in_bf16)
    place.record("json/replay", "dry-run.txt", json_lines(done.stdout, without))
    shutil.rmtree(place.work / "runs" / "replayed", ignore_errors=True)
    place.launch("torchrun", 2, "train", *words)
    done = place.launch("torchrun", 2, "replay", "runs/replayed", "--step", 3, "--json")
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    place.record("json/replay", "replay.txt", json_lines(line, without | MEASURED))


def record_doctor(place: Place, without: frozenset[str]) -> None:
    """Record which checks of the machine there are; their values are the machine's."""
    (place.work / "doctor.json").write_text(json.dumps(BY_NAME[GPT_RUN].config(place)))
    done = place.command("doctor", "--config", "doctor.json", "--json", "--mesh.pp", 1)
    place.record("json/doctor", "checks.txt", json_lines(done.stdout, without | {"value"}))


def record_texts(place: Place, without: frozenset[str]) -> None:
    """Record the help of all commands, and the messages about settings that are refused."""
    for name in COMMANDS:
        done = place.command(name, "--help")
        place.record("texts/help", f"{name}.txt", untimed(done.stdout, without))
    for name, settings in REFUSALS.items():
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        text = ""
        for command, *machine in (("plan", "--hardware", "A100-SXM4-80GB"), ("train",)):
            done = place.command(command, "--config", "ds.json", *machine, *words, check=False)
            text += f"{command} {done.returncode}\n{untimed(done.stderr, without)}\n"
        place.record("texts/refusals", f"{name.replace(' ', '-')}.txt", text)


def _json_or_text(text: str, without: frozenset[str]) -> str:
    """Return the lines of JSON, or the text of a command that failed before it had any."""
    return json_lines(text, without) if text.startswith("{") else text


def _without_readme(files: str) -> str:
    """Return checksums without that of the page that has the run's speed in it."""
    return "\n".join(line for line in files.splitlines() if not line.endswith("README.md"))


Recorder = Callable[[Place, frozenset[str]], None]
JSON: dict[str, Recorder] = {
    "draw": record_draw,
    "checkpoint": record_checkpoint,
    "convert": record_convert,
    "prepare": record_prepare,
    "scale": record_scale,
    "verify": record_verify,
    "replay": record_replay,
    "doctor": record_doctor,
}
