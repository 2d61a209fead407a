"""Loads of experts with and without the bias that balances them, and the loss beside a dense model.

    python benchmarks/expert_balance.py [--steps 400] [--rate 0.003] [--out FOLDER]

Three runs of launch/train.py on one process and the default corpus: experts with the bias of
arXiv:2408.15664, the same without it, and a dense model of as many parameters per token. An
expert's load is relative to the mean, averaged over the last tenth of the steps. What is in
`--out` is resumed, or not run again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).parents[1]
WIDTH = 96
LAYERS = 3
EXPERTS = 8
CHOSEN = 2
INNER = 96
_MODEL = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_SPARSE = _MODEL | {
    "family": "moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": INNER,
    "router": "sigmoid",
}


def configs(steps: int, rate: float) -> dict[str, dict[str, Any]]:
    """Return the config of each run."""
    models = {
        "bias": _SPARSE | {"score_bias": True, "score_bias_rate": rate},
        "no bias": _SPARSE,
        "dense": _MODEL | {"family": "llama", "intermediate_size": CHOSEN * INNER},
    }
    return {
        name: {
            "train_micro_batch_size_per_gpu": 16,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
            "zero_optimization": {"stage": 1},
            "parallel3d": {
                "mesh": {"dp": 1},
                "model": model,
                "data": {"source": "python-stdlib", "vocab_size": 2048, "sequence_length": 128},
                "train": {
                    "steps": steps,
                    "evaluate_every": 0,
                    "lr_schedule": {"type": "cosine", "warmup_steps": 20},
                },
                "checkpoint": {"every": 0},
                "run": {"name": name.replace(" ", "-"), "directory": "runs", "save_weights": False},
            },
        }
        for name, model in models.items()
    }


def main() -> None:
    """Train what is missing in the folder, and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=0.003, help="step of the bias")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = args.out or Path(mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    print(f"{args.steps} steps of 2,048 tokens, bias step {args.rate:g}, in {folder}")
    print(f"{'':8} {'least load':>10} {'most load':>10} {'loss':>7} {'held-out':>8}  active")
    for name, config in configs(args.steps, args.rate).items():
        file = folder / f"{name.replace(' ', '-')}.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, str(ROOT / "launch/train.py"), "--config", file.name, "--json"]
        done = subprocess.run(
            command, cwd=folder, env=environment, check=True, text=True, capture_output=True
        )
        result = json.loads(done.stdout)
        (size, active), *_ = re.findall(r"(\S+) parameters(?: \((\S+) active\))?", done.stderr)
        metrics = folder / "runs" / file.stem / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        last = lines[-max(1, args.steps // 10) :]
        loads = [
            mean(line["experts"][layer]["loads"][expert] for line in last)
            for layer in last[0].get("experts", ())
            for expert in range(EXPERTS)
        ]
        shown = [f"{n(loads):10.3f}" if loads else f"{'–':>10}" for n in (min, max)]
        held_out = result["held_out_loss"]
        loss = mean(line["loss"] for line in last)
        print(
            f"{name:8} {' '.join(shown)} {loss:7.4f} {held_out:8.4f}  {active or size}", flush=True
        )


if __name__ == "__main__":
    main()
