"""parallel3d and its peers train the same GPT, in turns: time, CPU, memory and bytes side by side.

    python benchmarks/peers.py --ranks 4 --mesh 2x2x1 --rounds 2

The contestants are in benchmarks/contestants: DeepSpeed's pipeline with ZeRO-1, torch's pipelining
and FSDP2 and tensor parallelism, transformers under DeepSpeed ZeRO-3, plain PyTorch in one process,
and parallel3d in the same shapes. Ratios are to the first of a mesh and hold within one run alone.
All begin with the same weights but parallel3d, which draws them by the same law in its own order:
its loss after some steps is compared within 1 %, the others' within 0.01 %. On CPUs whose cores
all ranks keep busy bubbles hide: judge by CPU seconds.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from parallel3d.verify.local_ranks import free_port

FOLDER = Path(__file__).parent / "contestants"
THRESHOLDS = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
THRESHOLDS += ("prefetch_bucket_size",)
ALL_CUT = "--set " + ",".join(f"zero_optimization.stage3_{name}=0" for name in THRESHOLDS)
# By mesh: what is shown -> script and options; ratios are to the first.
CONTESTANTS = {
    "2x2x1": {
        "DeepSpeed pipeline, ZeRO-1": "deepspeed_pipeline.py --pp 2",
        "parallel3d, ZeRO-1, 1F1B": "ours.py --pp 2 --zero 1",
        "parallel3d, ZeRO-3, 1F1B, per_step": "ours.py --pp 2",
        "parallel3d, ZeRO-3, gpipe, per_step": "ours.py --pp 2 --schedule gpipe",
        "parallel3d, ZeRO-3, gpipe, per_pass, all cut": (
            f"ours.py --pp 2 --schedule gpipe --weights per_pass {ALL_CUT}"
        ),
        "parallel3d, ZeRO-3, gpipe, per_microbatch, all cut": (
            f"ours.py --pp 2 --schedule gpipe --weights per_microbatch {ALL_CUT}"
        ),
        "parallel3d, ZeRO-3, zero_bubble, per_step": "ours.py --pp 2 --schedule zero_bubble",
        "torch 1F1B, FSDP2 kept": "torch_native.py --keep",
        "torch GPipe, FSDP2 resharding": "torch_native.py --schedule GPipe",
    },
    "1x4x1": {
        "torch FSDP2 resharding": "torch_native.py --pp 1",
        "torch FSDP2 kept": "torch_native.py --pp 1 --keep",
        "transformers, DeepSpeed ZeRO-3": "transformers_zero.py",
        "parallel3d, ZeRO-3, per_step, all cut": f"ours.py {ALL_CUT}",
        "parallel3d, ZeRO-3, per_microbatch, all cut": (
            f"ours.py --weights per_microbatch {ALL_CUT}"
        ),
    },
    "2x1x2": {
        "torch 1F1B, DTensor": "torch_native.py --tp 2",
        "parallel3d, ZeRO-1, 1F1B": "ours.py --pp 2 --tp 2 --zero 1",
    },
    "1x1x1": {
        "plain PyTorch": "plain.py",
        "parallel3d, ZeRO-0": "ours.py --zero 0",
        "parallel3d, ZeRO-3": "ours.py --zero 3",
    },
}


def once(command: str, ranks: int, seconds: float) -> dict[str, Any]:
    """The result of one run of a contestant, or why there is none."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    script, *options = command.split()
    words = [sys.executable, *(launcher if ranks > 1 else []), str(FOLDER / script), *options]
    root = str(FOLDER.parents[1])
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": root}
    if ranks > 1:
        environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"failed": f"not done after {seconds:g} s"}
    for line in said.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    return {"failed": said[-2000:]}


def row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians over steps and rounds of one contestant."""
    ranks = [rank for run in runs for rank in run["ranks"]]
    steps = range(len(runs[0]["ranks"][0]["cpu"]))
    cpu = [sum(rank["cpu"][i] for rank in run["ranks"]) for run in runs for i in steps]
    last = [rank["loss"][-1] for rank in runs[0]["ranks"] if rank["loss"][-1] is not None]
    moved: dict[str, float] = {}
    for rank in runs[0]["ranks"]:
        for operation, count in rank["moved"].items():
            moved[operation] = moved.get(operation, 0) + count / 2**20
    return {
        "name": name,
        "step_seconds": median(wall for run in runs for wall in run["walls"]),
        "cpu_seconds": median(cpu),
        "above_mib": max(rank["above"] for rank in ranks),
        "moved_mib": {operation: round(size, 1) for operation, size in moved.items()},
        "loss": sum(last) / len(last),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """One line a contestant; ratios to the first."""
    head = "| contestant | CPU s | ratio | step s | ratio | MiB above imports | MiB moved | loss |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    first = rows[0]
    for r in rows:
        moved = ", ".join(f"{k} {v:,.0f}" for k, v in sorted(r["moved_mib"].items())) or "–"
        cpu, wall = (r[k] / first[k] for k in ("cpu_seconds", "step_seconds"))
        lines.append(
            f"| {r['name']} | {r['cpu_seconds']:.2f} | {cpu:.2f} | {r['step_seconds']:.2f} "
            f"| {wall:.2f} | {r['above_mib']:.0f} | {moved} | {r['loss']:.6f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the contestants of a mesh in turns and print their table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mesh", choices=list(CONTESTANTS), default="2x2x1")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="names that contain this, and the first")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    pp, dp, tp = map(int, args.mesh.split("x"))
    if pp * dp * tp != args.ranks and args.mesh != "1x1x1":
        parser.error(f"--mesh {args.mesh} is {pp * dp * tp} ranks, not {args.ranks}")
    everyone = CONTESTANTS[args.mesh]
    names = [n for i, n in enumerate(everyone) if not i or args.only in n]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names:
            found = once(everyone[name], pp * dp * tp, args.timeout)
            if "failed" in found:
                print(f"{name}: {found['failed']}", file=sys.stderr)
                return 1
            runs[name].append(found)
            one = row(name, [found])
            took = f"{one['step_seconds']:.2f} s, {one['cpu_seconds']:.2f} s of CPU"
            print(f"round {number + 1}: {name}: {took}", file=sys.stderr, flush=True)
    rows = [row(name, found) for name, found in runs.items()]
    print(json.dumps({"mesh": args.mesh, "rows": rows}) if args.json else table(rows))
    worst = max(
        abs(r["loss"] / rows[0]["loss"] - 1) / (1e-2 if "parallel3d" in r["name"] else 1e-4)
        for r in rows
    )
    if worst > 1:
        print("the losses differ: not all do the same work", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
