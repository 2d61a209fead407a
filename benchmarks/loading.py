"""What loading costs a training step, with and without reading ahead, as shares in one run.

    python benchmarks/loading.py [--config ds.json --steps 20 --json]

The model of the config (the default: configs/ds.json) trains on this one process: its steps by
turns on batches that are read when they are asked for and on batches that were read ahead.
`loading` is what a step takes until its batch is on the device; it has waited if the batch was not
made when it was asked for. The first --warm steps are counted by themselves. For streams see
benchmarks/streams.py.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.assembly import Assembly, assemble
from parallel3d.train.feed import Feed


@dataclass
class Contender:
    """Steps of one kind: how long each was loading and took, and whether it waited."""

    feed: Feed
    loading: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    waited: list[bool] = field(default_factory=list)

    def step(self, parts: Assembly, number: int, size: int) -> None:
        """Train on the next batch."""
        made = self.feed._training._made.get(number * size)
        self.waited.append(made is None or not made.done())
        start = time.perf_counter()
        batch = self.feed.training(number * size)
        loaded = time.perf_counter()
        parts.executor.run(batch, number)
        parts.engine.step(1e-4)
        self.loading.append(loaded - start)
        self.steps.append(time.perf_counter() - start)


def main() -> None:
    """Print a row for each contender: its step, the share that is loading, and who waited."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="configs/ds.json")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    corpus = prepare(RunConfig.from_json(args.config).data)

    def asked(*overrides: str) -> CompleteConfig:
        resolved = RunConfig.from_json(args.config, overrides).resolve(1)
        return resolved.with_corpus(corpus.vocab_size, len(corpus.train))

    config = asked()
    mesh = Mesh()
    parts = assemble(config, mesh)
    contenders = {
        name: Contender(Feed(asked(*overrides), mesh, corpus, parts.schedule))
        for name, overrides in (
            ("read when asked for", ("--parallel3d.data.read_ahead", "0")),
            ("read ahead", ()),
        )
    }
    for number in range(args.steps):
        for contender in contenders.values():
            contender.step(parts, number, config.global_batch_size)
    for contender in contenders.values():
        contender.feed.close()
    rows = {name: row_of(contender, args.warm) for name, contender in contenders.items()}
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    print(
        f"{'':24}{'step':>10}{'loading':>12}{'share':>9}{'longest':>11}{'waited':>12}{'before':>8}"
    )
    for name, row in rows.items():
        waited = f"{row['waited']} of {row['steps']}"
        first = f"{row['waited_before']} of {args.warm}"
        print(
            f"{name:24}{1e3 * row['step_seconds']:7.0f} ms{1e3 * row['loading_seconds']:9.3f} ms"
            f"{row['share']:9.3%}{1e3 * row['longest_seconds']:8.2f} ms"
            f"{waited:>12}{first:>8}"
        )
    mesh.close()


def row_of(contender: Contender, warm: int) -> dict[str, Any]:
    """What the steps of a contender came to, without the first `warm`; and of these who waited."""
    loading = contender.loading[warm:]
    return {
        "step_seconds": statistics.median(contender.steps[warm:]),
        "loading_seconds": statistics.median(loading),
        "share": sum(loading) / sum(contender.steps[warm:]),
        "longest_seconds": max(loading),
        "waited": sum(contender.waited[warm:]),
        "steps": len(loading),
        "waited_before": sum(contender.waited[:warm]),
    }


if __name__ == "__main__":
    main()
