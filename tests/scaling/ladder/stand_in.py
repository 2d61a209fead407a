"""Stands in for launch/train.py: leaves what a run leaves, in a moment, without torch.

What it shall do otherwise is in files beside the ladder's runs: NAME.fails (with its words),
NAME.waits (until it is stopped); and it adds a line to `started`.
"""

import json
import os
import signal
import sys
import time
from math import log
from pathlib import Path

config = Path(sys.argv[sys.argv.index("--config") + 1])
raw = json.loads(config.read_text())
block = raw["parallel3d"]
home = config.parent.parent
tokens = raw["train_batch_size"] * block["data"]["sequence_length"]
steps = block["train"]["steps"]
at = block["checkpoint"]["at"]
if Path(sys.argv[0]).name == "prepare.py":
    print(json.dumps({"epochs": tokens * steps / 10_000}))
    sys.exit(0)

name = block["run"]["name"]
folder = Path(block["run"]["directory"], block["run"]["name"])
with (home / "started").open("a") as file:
    given = [os.environ.get(key) for key in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
    file.write(f"{json.dumps([name, sys.argv[-1], *given, time.time()])}\n")
folder.mkdir(parents=True, exist_ok=True)
if block["mesh"]["dp"] == "auto":
    block["mesh"]["dp"] = 1
raw["train_micro_batch_size_per_gpu"] = raw["train_batch_size"] // block["mesh"]["dp"]
raw["gradient_accumulation_steps"] = 1
(folder / "config.json").write_text(json.dumps(raw))


def leave(step):
    """Leave files after so many steps, by the law L = 2 + 40 / N^0.3 + 60 / D^0.3, roughly.

    The best rate is 0.008, and with a rate of 0.01 times the square root of batch / 64 tokens the
    best batch is 48 tokens.
    """
    seen = step * tokens
    lr = raw["optimizer"]["params"]["lr"]
    loss = 2 + 40 / block["model"]["hidden_size"] ** 0.6 + 60 / seen**0.3
    loss += 0.1 * log(lr / 0.01 / (tokens / 64) ** 0.5 / 0.8) ** 2 + 0.05 * log(tokens / 48) ** 2
    line = {"step": step, "loss": loss, "tokens": seen}
    if step == steps:
        line |= {"held_out_loss": loss, "validation": {"held_out": {"standard_error": 0.01}}}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps(line)}\n")
    if step == steps or step in at:
        place = folder / f"checkpoints/step-{step}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "manifest.json").write_text("{}")


stopped = []
signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
if (home / f"{name}.fails").exists():
    message = (home / f"{name}.fails").read_text() or "the loss on rank 0 is nan"
    print(f"train: {message}", file=sys.stderr)
    sys.exit(1)
leave(1)
while (home / f"{name}.waits").exists() and not stopped:
    time.sleep(0.02)
if stopped:
    place = folder / "checkpoints/step-1"
    place.mkdir(parents=True, exist_ok=True)
    (place / "manifest.json").write_text("{}")
    sys.exit(3)
for place in at:
    leave(place)
leave(steps)
