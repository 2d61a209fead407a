"""A card of a shipped config: what was proved of it, what the planner says, and what nobody tried.

    python -m benchmarks.card NAME [NAME ...]      # or all of them, without a name

Writes docs/cards/NAME.md. Each figure is measured or planned here, from the config at this commit;
tests/benchmarks/test_cards.py compares the card with the config and the commit it names.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from parallel3d import models
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.config.pretrained import derive_model_block
from parallel3d.huggingface import conversion
from parallel3d.verify.shrink import shrink

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "docs" / "cards"
PUBLISHED = Path(__file__).parent / "published" / "development.csv"
# What each config was made for, as its first lines say.
MADE_FOR = {
    "gpt2-124m": ("RTX4090-24GB", "A100"),
    "gpt2-1.5b": ("RTX4090-24GB", "A100"),
    "gpt3-13b": ("A100-SXM4-80GB", "A100"),
    "gpt3-175b": ("A100-SXM4-80GB", "A100"),
    "llama-8b": ("H100-SXM5-80GB", "H100"),
    "llama-70b": ("H100-SXM5-80GB", "H100"),
    "mixtral-8x7b": ("H100-SXM5-80GB", "H100"),
    "olmoe-1b-7b": ("H100-SXM5-80GB", "H100"),
    "pythia-70m": ("RTX4090-24GB", "A100"),
    "pythia-1.4b": ("A100-SXM4-40GB", "A100"),
    "qwen3-0.6b": ("H100-SXM5-80GB", "H100"),
    "qwen3-30b-a3b": ("H100-SXM5-80GB", "H100"),
}
# Parameters as published: in the paper, or in the model's card on the hub.
SIZES = {
    "gpt2-124m": "124M (github.com/openai/gpt-2)",
    "gpt2-1.5b": "1.5B (Radford et al. 2019, table 2: 1542M)",
    "gpt3-13b": "13.0B (arXiv:2005.14165, table 2.1)",
    "gpt3-175b": "175.0B (arXiv:2005.14165, table 2.1)",
    "llama-8b": "8.03B (the hub's safetensors)",
    "llama-70b": "70.6B (the hub's safetensors)",
    "mixtral-8x7b": "46.7B, active 12.9B (arXiv:2401.04088)",
    "olmoe-1b-7b": "6.9B, active 1.3B (arXiv:2409.02060)",
    "pythia-70m": "70.4M (arXiv:2304.01373, table 1: 18.9M without embeddings)",
    "pythia-1.4b": "1.41B (arXiv:2304.01373, table 1: 1.21B without embeddings)",
    "qwen3-0.6b": "0.6B, 0.44B without the embedding (the model's card)",
    "qwen3-30b-a3b": "30.5B, active 3.3B (the model's card)",
}


def run_json(*words: str) -> dict[str, Any]:
    """Run a command of parallel3d with --json; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "parallel3d", *words, "--json"], capture_output=True, text=True
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def huggingface_lines(name: str) -> list[str]:
    """Import and export the published config.json and a small model of its class."""
    config = RunConfig.from_json(f"{name}.json")
    family = models.huggingface(config.model.family)
    assert family is not None
    settings = family.architecture(config.model)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        settings.save_pretrained(whole)
        block = derive_model_block(whole, json.loads((whole / "config.json").read_text()))
        again = models.config_class(block["family"]).model_validate(block)
        same = models.num_params(again) == models.num_params(config.model)
        lines.append(
            f"Its config.json as transformers writes it (`{settings.architectures[0]}`) is read "
            f"back as a model of {'the same' if same else 'ANOTHER'} number of parameters."
        )
        mesh = MeshSizes.parse("1x1x1")
        (small,) = shrink(config, (mesh,)).values()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(family.architecture(small.model))
        model.save_pretrained(Path(folder) / "small")
        proof = conversion.import_folder(Path(folder) / "small", Path(folder) / "imported")
        lines.append(
            f"A small {proof.architecture} with random weights, made by transformers, goes in and "
            f"out: {'; '.join(re.sub(r' against /.*', '', check) for check in proof.checked)}"
            f"{'' if proof.ok else '; DIFFERS: ' + '; '.join(proof.differs)}."
        )
    return lines


def published_row(params: int, devices: int, chip: str) -> dict[str, str] | None:
    """Return a published run of a dense model of about this size on this chip, or None.

    In 16 bits, within a tenth of its size and half to twice its devices (or else any number of
    them), the fastest.
    """
    rows = []
    for row in csv.DictReader(PUBLISHED.open()):
        is_near = abs(int(row["params"]) / params - 1) < 0.1
        if is_near and row["chip"].startswith(chip) and row["precision"] in ("bf16", "fp16"):
            rows.append(row)
    alike = [row for row in rows if 0.5 <= int(row["devices"]) / devices <= 2]
    return max(alike or rows, key=teraflops, default=None)


def teraflops(row: dict[str, str]) -> float:
    """Return the TFLOP/s of a device, without recomputation."""
    return float(row["model_flops"]) / float(row["seconds"]) / 1e12


def plan_lines(name: str, params: int, active: int) -> list[str]:
    """Say what the planner says of the config on its own mesh, and what was published."""
    hardware, chip = MADE_FOR[name]
    dry = run_json("train", "--config", f"{name}.json", "--dry-run", "--hardware", hardware)
    plan = dry["plan"]
    devices = plan["pp"] * plan["dp"] * plan["cp"] * plan["tp"]
    gib = plan["memory_bytes"]["total"] / 2**30
    lines = [
        f"{devices} × {hardware}, pp {plan['pp']} × dp {plan['dp']} × tp {plan['tp']}, "
        f"ZeRO-{plan['zero_stage']}: {gib:.1f} GiB on the fullest device "
        f"({'fits' if plan['fits'] else 'DOES NOT FIT: ' + plan['reason']}), "
        f"{plan['step_seconds']:.3g} s a step, {plan['tokens_per_second']:,.0f} tokens/s, "
        f"{plan['model_tflops_per_device']:.0f} TFLOP/s a device, MFU {plan['mfu_full']:.0%}, "
        f"{plan['days']:,.3g} days for the whole run."
    ]
    row = published_row(params, devices, chip) if active == params else None
    if active != params:
        lines.append(
            "Published runs of mixtures of experts, and how far the plan is off: "
            "[validation](../planner/validation.md)."
        )
    elif row is None:
        lines.append("No published run of this size on this device is in the table.")
    else:
        lines.append(
            f"A published run of about this size: {int(row['params']) / 1e9:.3g}B "
            f"parameters on {row['devices']} × {row['chip']} (tp {row['tp']}, pp {row['pp']}, "
            f"{row['seq']} tokens a sample), {teraflops(row):.0f} TFLOP/s a device "
            f"({row['source']}, line {row['line']} of benchmarks/published/development.csv)."
        )
    return lines


def flops_by_formula(model: Any, length: int) -> float:
    """Return FLOPs a token by PaLM's formula (arXiv:2204.02311, appendix B): 6 N + 12 L H Q T.

    N leaves out an input embedding that is not the head, too; attention is counted in full.
    """
    active = models.num_params(model, active=True)
    if not model.tie_word_embeddings:
        active -= model.vocab_size * model.hidden_size
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    width = model.num_attention_heads * head_dim
    return 6 * active + 12 * model.num_hidden_layers * width * length


def card(name: str) -> str:
    """Return the page of a config."""
    config = RunConfig.from_json(f"{name}.json")
    params = models.num_params(config.model)
    active = models.num_params(config.model, active=True)
    length = config.data.sequence_length
    flops = models.train_flops_per_token(config.model, length)
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    in_fp32 = ("--bf16.enabled", "false", "--fp16.enabled", "false")
    verified = run_json("verify", "--config", f"{name}.json", *in_fp32)
    lines = [
        f"# {name}",
        "",
        f"Made by `python -m benchmarks.card {name}` at commit {commit}, from "
        f"[configs/{name}.json](../../configs/{name}.json).",
        "",
        f"    deepspeed launch/train.py --config {name}.json",
        "",
        "## Size",
        "",
        "| | here | published |",
        "|---|---|---|",
        f"| parameters | {params:,}{f', active {active:,}' if active != params else ''} | "
        f"{SIZES[name]} |",
        f"| FLOPs a token, forward and backward, {length:,} tokens | {flops:.4g} | "
        f"{flops_by_formula(config.model, length):.4g} by PaLM's formula (arXiv:2204.02311) |",
        "",
        "## Parity",
        "",
        "The shrunk model on each mesh against plain transformers and torch's AdamW in one process "
        f"(`parallel3d verify --config {name}.json --bf16.enabled false`; bound "
        f"{verified['tolerance']:.0e}; in bf16 they differ as far as "
        "[rounding](../differences.md) goes; rows after the eighth are one longer step):",
        "",
        "| mesh | schedule | ZeRO | loss | gradient norm | weights |",
        "|---|---|---|---|---|---|",
    ]
    for case in verified["cases"]:
        errors = [f"{case[key]:.0e}" for key in ("loss_error", "grad_norm_error", "weight_error")]
        verdict = "" if case["passed"] else " FAILED"
        lines.append(
            f"| {case['mesh']}{verdict} | {case['schedule']} | {case['zero_stage']} | "
            f"{' | '.join(errors)} |"
        )
    lines += ["", "## Hugging Face", "", *(f"- {line}" for line in huggingface_lines(name))]
    lines += ["", "## Memory and speed, planned", ""]
    lines += [f"- {line}" for line in plan_lines(name, params, active)]
    lines += [
        "",
        "## Not tried",
        "",
        "- No GPU has run it: memory and speed above are the planner's, parity was measured on "
        "CPUs with gloo.",
        "- The model at its full size, and its published weights: they are not in reach of the "
        "tests.",
        "- The whole run: nobody has trained it to its last token with this library.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Write the cards that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MADE_FOR), help="configs, without .json")
    conversion.quiet()
    CARDS.mkdir(exist_ok=True)
    for name in parser.parse_args().names:
        (CARDS / f"{name}.md").write_text(card(name))
        print(f"wrote docs/cards/{name}.md", flush=True)


if __name__ == "__main__":
    main()
