"""Ten short runs of launch/train.py that cover what a change of the library can touch."""

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.commits.checkout import CommandFailed, Place, one_at_a_time
from benchmarks.commits.recording import MEASURED, checksums, json_lines, rows, untimed

STEPS = 4
STOP_AFTER = 2  # the step at which a run that is resumed was stopped
_ANNOUNCED = ("corpus  ", "model   ", "engine  ", "stage ")  # lines that have no times
_WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "run", "far"]

SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
GPT = {"family": "gpt", "max_position_embeddings": 64} | SMALL
LLAMA = {"family": "llama", "num_key_value_heads": 2, "intermediate_size": 64} | SMALL
NEOX = {"family": "neox"} | SMALL
MOE = LLAMA | {"family": "moe", "num_experts": 4, "moe_intermediate_size": 32}
MOE_BIAS = MOE | {
    "router": "sigmoid",
    "score_bias": True,
    "score_bias_rate": 0.01,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "partial_rotary_factor": 0.5,
}
MUON = {"type": "Muon", "params": {"lr": 2e-2, "adam_lr": 2e-3, "weight_decay": 0.1}}
TO_CPU = {"device": "cpu"}
TO_NVME = {"device": "nvme", "nvme_path": "nvme"}


@dataclass(frozen=True)
class Run:
    """A short training run, started as users start it."""

    name: str
    ranks: int
    model: dict[str, Any]
    launcher: str = "torchrun"
    zero: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Sections of the block "parallel3d", merged into the common ones."""
    top: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's own settings."""

    def config(self, place: Place) -> dict[str, Any]:
        """Return the config of this run."""
        texts = {"source": "text", "paths": [f"{place.shared}/texts/*.txt"]}
        validation = {"source": "text", "paths": [f"{place.shared}/validation/*.txt"]}
        block: dict[str, Any] = {
            "model": self.model,
            "data": texts
            | {
                "vocab_size": 270,
                "sequence_length": 32,
                "cache": f"{place.shared}/cache",
                "validation": {"other": validation},
            },
            "train": {
                "steps": STEPS,
                "seed": 7,
                "lr_schedule": {"type": "cosine", "warmup_steps": 1},
                "evaluate_every": 2,
                "evaluate_samples": 16,
                "digest_every": 1,
            },
            # The peak of a device that is named is not measured.
            "run": {"name": self.name, "hardware": "A100-SXM4-80GB"},
        }
        for section, values in self.settings.items():
            block[section] = block.get(section, {}) | values
        adam = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": adam},
            "zero_optimization": {"stage": 0} | self.zero,
            "parallel3d": block,
        } | self.top

    def start(self, place: Place, *words: str, check: bool = True) -> "Path":
        """Train in the place, record nothing, and return the folder of the run."""
        (place.work / "nvme").mkdir(exist_ok=True)
        (place.work / f"{self.name}.json").write_text(json.dumps(self.config(place), indent=1))
        arguments = ("--config", f"{self.name}.json", "--json", *words)
        done = place.launch(self.launcher, self.ranks, "train", *arguments, check=check)
        folder = place.work / "runs" / self.name
        (folder / "stdout.log").write_text(done.stdout)
        (folder / "stderr.log").write_text(done.stderr)
        return folder


RUNS = (
    Run(
        "gpt-gpipe-zero3-cpu",
        4,
        GPT | {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
        launcher="deepspeed",
        zero={"stage": 3, "offload_optimizer": TO_CPU, "offload_param": TO_CPU},
        settings={
            "mesh": {"pp": 2},
            "pipeline": {
                "schedule": "gpipe",
                "weights": "per_microbatch",
                "activation_checkpointing": "selective",
            },
        },
    ),
    Run(
        "gpt-1f1b-bf16-sequence-parallel",
        8,
        GPT,
        zero={"stage": 1},
        settings={
            "mesh": {"pp": 2, "tp": 2, "sequence_parallel": True},
            "pipeline": {
                "schedule": "one_f_one_b",
                "activation_checkpointing": ["layernorm", "core_attn", "mlp_act"],
            },
            "train": {"check_bits": {"every": 2}},
        },
        top={"bf16": {"enabled": True}},
    ),
    Run(
        "llama-interleaved-zero2-mup",
        4,
        LLAMA | {"parametrization": {"type": "mup", "base_width": 16}, "qk_norm": True},
        launcher="deepspeed",
        zero={"stage": 2, "offload_optimizer": TO_CPU},
        settings={
            "mesh": {"pp": 2},
            "pipeline": {
                "schedule": "interleaved",
                "stages_per_rank": 2,
                "activation_checkpointing": "full:1",
            },
        },
    ),
    Run(
        "llama-v-shape-cp",
        4,
        LLAMA | {"sliding_window": 12},
        settings={
            "mesh": {"pp": 2, "cp": 2},
            "pipeline": {"schedule": "v_shape", "stages_per_rank": 2},
            "data": {"isolate_documents": True, "packing": "best_fit"},
        },
    ),
    Run(
        "llama-breadth-first-zero3-nvme",
        4,
        LLAMA | {"qk_norm": True},
        launcher="deepspeed",
        zero={
            "stage": 3,
            "offload_optimizer": TO_NVME,
            "offload_param": TO_NVME | {"max_in_cpu": 0, "buffer_size": 65536},
            "stage3_param_persistence_threshold": 0,
        },
        settings={
            "mesh": {"pp": 2},
            "pipeline": {
                "schedule": "breadth_first",
                "stages_per_rank": 2,
                "weights": "per_pass",
            },
        },
    ),
    Run(
        "neox-zero-bubble-fp16",
        4,
        NEOX,
        zero={"stage": 1},
        settings={"mesh": {"pp": 2, "tp": 2}, "pipeline": {"schedule": "zero_bubble"}},
        top={"fp16": {"enabled": True, "initial_scale_power": 10}},
    ),
    Run(
        "neox-zb-v",
        2,
        NEOX | {"use_parallel_residual": False, "tie_word_embeddings": True},
        settings={
            "mesh": {"pp": 2},
            "pipeline": {"schedule": "zb_v", "stages_per_rank": 2},
        },
    ),
    Run(
        "moe-bias-ep",
        2,
        MOE_BIAS,
        zero={"stage": 1},
        settings={"mesh": {"ep": 2}},
    ),
    Run(
        "moe-side-losses-zero3",
        4,
        MOE | {"router_aux_loss_coef": 0.01, "router_z_loss_coef": 1e-3, "capacity_factor": 1.25},
        zero={"stage": 3},
        settings={
            "mesh": {"pp": 2, "ep": 2},
            "pipeline": {"schedule": "one_f_one_b", "activation_checkpointing": "mlp"},
        },
    ),
    Run(
        "llama-muon",
        4,
        LLAMA,
        zero={"stage": 1},
        settings={
            "mesh": {"tp": 2},
            "train": {"batch_schedule": [[0, 16], [32, 32]], "noise_scale_every": 2},
        },
        top={"optimizer": MUON, "gradient_accumulation_steps": None, "train_batch_size": None},
    ),
)
"""Together: all families, schedules, ZeRO stages and offloads, cp, ep, Muon, sequence parallelism,
three forms of recomputation, bf16 and fp16."""
BY_NAME = {run.name: run for run in RUNS}
RESUMED = ("gpt-gpipe-zero3-cpu", "moe-bias-ep", "llama-muon")


def write_texts(shared: Path) -> None:
    """Write the corpus and the validation set that all runs read, unless they are there."""
    random_words = random.Random(0)
    for name, count in (("texts", 40), ("validation", 8)):
        folder = shared / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            lines = [" ".join(random_words.choices(_WORDS, k=12)) for _ in range(60)]
            (folder / f"{number:02}.txt").write_text("\n".join(lines))
    (shared / "config").mkdir(exist_ok=True)


def trained(place: Place, name: str) -> Path:
    """Return the folder of one of the ten runs, after training it if it is not there."""
    folder = place.work / "runs" / name
    if not (folder / "stdout.log").exists():
        BY_NAME[name].start(place)
    return folder


def record_run(place: Place, name: str, without: frozenset[str]) -> None:
    """Record losses, norms, digests, held-out losses, config and weights of one of the ten runs."""
    _record(place, f"train/{name}", trained(place, name), without)


def stopped(place: Place, name: str) -> Path:
    """Return the folder of a run that was stopped after a checkpoint, after training it."""
    folder = place.work.parent / "stopped" / name
    there = Place(place.checkout, place.shared, place.work.parent / "stopping", place.results)
    with one_at_a_time(there.work.with_suffix(".lock")):
        if folder.exists():
            return folder
        # What an interrupted comparison left there would be resumed, and would not stop again.
        shutil.rmtree(there.work, ignore_errors=True)
        there.work.mkdir()
        # A run that stops early does not exit with 0.
        made = BY_NAME[name].start(there, "--train.stop_after", str(STOP_AFTER), check=False)
        steps = len((made / "metrics.jsonl").read_text().splitlines())
        if steps != STOP_AFTER:
            raise CommandFailed(f"{made} did {steps} steps, not {STOP_AFTER}")
        folder.parent.mkdir(exist_ok=True)
        shutil.move(made, folder)
    return folder


def record_resumed(place: Place, name: str, of_before: Path, without: frozenset[str]) -> None:
    """Resume a run that the first commit has stopped, and record it as one that ran through."""
    there = Place(place.checkout, place.shared, place.work.parent / "resuming", place.results)
    folder = there.work / "runs" / name
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(of_before, folder)
    BY_NAME[name].start(there)
    _record(there, f"resume/{name}", folder, without)


def _record(place: Place, case: str, folder: Path, without: frozenset[str]) -> None:
    """Record the files of a run that must be the same."""
    place.record(
        case, "metrics.txt", rows((folder / "metrics.jsonl").read_text(), without | MEASURED)
    )
    place.record(case, "digests.txt", (folder / "digests.jsonl").read_text())
    place.record(case, "config.txt", json_lines((folder / "config.json").read_text(), without))
    place.record(
        case, "summary.txt", json_lines(_last_json(folder / "stdout.log"), without | MEASURED)
    )
    place.record(case, "weights.txt", checksums(folder / "weights", "*.safetensors"))
    shards = checksums(folder / "checkpoints" / f"step-{STEPS}", "*.safetensors")
    place.record(case, "checkpoint.txt", shards)
    lines = (folder / "stderr.log").read_text().splitlines()
    announced = [line for line in lines if line.startswith(_ANNOUNCED)]
    place.record(case, "announced.txt", untimed("\n".join(announced), without))


def _last_json(path: Path) -> str:
    """Return the object that a launcher's output has among its own lines."""
    return [line for line in path.read_text().splitlines() if line.startswith("{")][-1]
