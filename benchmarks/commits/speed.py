"""How long steps and plan searches take, in turns of both commits.

A round runs each command once for each commit, in alternating order, so that what disturbs the
machine disturbs both. Ratios are taken within a round; their median is what counts.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks.commits.checkout import Place
from benchmarks.commits.runs import GPT, LLAMA, Run

STEPS = 40
SKIPPED = 8  # first steps, in which caches and buffers are filled
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
RUNS = (
    Run("one rank", 1, GPT | SIZES),
    Run(
        "2x1x1 ZeRO-0 1F1B",
        2,
        LLAMA | SIZES,
        settings={"mesh": {"pp": 2}, "pipeline": {"schedule": "one_f_one_b"}},
    ),
    Run("1x2x1 ZeRO-3", 2, GPT | SIZES, zero={"stage": 3}),
)
SEARCHES = (
    ("gpt3-175b.json", "A100-SXM4-80GB", 1024),
    ("qwen3-30b-a3b.json", "H100-SXM5-80GB", 256),
)


def step_seconds(place: Place, run: Run) -> float:
    """Return the median time of a step of a run."""
    name = run.name.replace(" ", "-")
    config = run.config(place)
    block = config["parallel3d"]
    block["run"] |= {"name": "auto", "directory": f"speed/{name}-{time.time_ns()}"}
    block["run"] |= {"save_weights": False}
    block["train"] |= {"steps": STEPS, "digest_every": 0, "evaluate_every": 0}
    block["data"]["validation"] = {}
    block["checkpoint"] = {"every": 0}
    (place.work / "speed.json").write_text(json.dumps(config))
    place.launch("torchrun", run.ranks, "train", "--config", "speed.json")
    (metrics,) = (place.work / block["run"]["directory"]).glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return float(statistics.median(line["step_seconds"] for line in lines[SKIPPED:]))


def search_seconds(place: Place, config: str, hardware: str, devices: int) -> float:
    """Return the processor time of a plan search, with the start of the process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ("--config", config, "--hardware", hardware, "--devices", devices, "--json")
    place.command("plan", *words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(before: Place, after: Place, rounds: int) -> dict[str, object]:
    """Time both commits in turns, print a line for each command, and return the rows."""
    rows = []
    print(f"{'':32}{'before':>10}{'after':>11}{'ratio':>8}  ratios of rounds", file=sys.stderr)
    for run in RUNS:
        pairs = in_turns(before, after, rounds, partial(step_seconds, run=run))
        rows.append(row_of(f"step, {run.name}", pairs))
    for config, hardware, devices in SEARCHES:
        search = partial(search_seconds, config=config, hardware=hardware, devices=devices)
        rows.append(row_of(f"plan, {config}", in_turns(before, after, rounds, search)))
    return {"rounds": rounds, "rows": rows}


def in_turns(
    before: Place, after: Place, rounds: int, measure: Callable[[Place], float]
) -> list[tuple[float, float]]:
    """Return the seconds of both commits for each round; the one that comes first alternates."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            second = measure(after)
            pairs.append((measure(before), second))
        else:
            first = measure(before)
            pairs.append((first, measure(after)))
    return pairs


def row_of(name: str, pairs: list[tuple[float, float]]) -> dict[str, object]:
    """Print and return the medians of a command's seconds, and of its ratios."""
    ratios = [after / before for before, after in pairs]
    before = statistics.median(pair[0] for pair in pairs)
    after = statistics.median(pair[1] for pair in pairs)
    ratio = statistics.median(ratios)
    each = " ".join(f"{x:.3f}" for x in ratios)
    line = f"{name:<32}{before:9.4f}s{after:10.4f}s{ratio:8.3f}  {each}"
    print(line, file=sys.stderr, flush=True)
    return {"name": name, "before": before, "after": after, "ratio": ratio, "ratios": ratios}
