"""The loss curve of an exhibit: a small model trained for a hundred steps with it in the code.

It learns to write Python, of which it reads the lines of a file as documents. A run is evaluated
halfway, as runs are; an exhibit of a resume goes on from what a right run saved there.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from parallel3d.base.errors import TrainingError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.checkpoint.save import Saver
from parallel3d.checkpoint.state import Position, RunState
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.config.learning_rate import rate
from parallel3d.data.corpus import Corpus, TokenStream
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.assembly import Assembly, assemble
from parallel3d.train.feed import Feed
from parallel3d.verify.case import go_on
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.shrink import MESHES, shrink
from tests.meshes import sizes_of
from tests.museum import exhibits
from tests.museum.exhibit import Exhibit
from tests.museum.halls import hall
from tests.museum.shown import PARTS, STEPS, Curve

HALFWAY = STEPS // 2
EPOCH_STEPS = 40
WARMUP_STEPS = 10
LEARNING_RATE = 3e-3
CLIPPING = 1.0
MICROBATCHES = 2
BATCH = 16
OTHER_RUNS = 5
# Exhibits of a resume save here and go on on another mesh.
SAVED_MESH = MeshSizes(tp=2)
_SCALE_WINDOW = 20  # steps; in the three of verify it has to grow sooner


@dataclass(frozen=True)
class Leg:
    """What is trained: an exhibit's name, "" for none; where it is saved halfway, or goes on."""

    exhibit: str = ""
    saves: Path | None = None
    resumes: Path | None = None


def mesh_of(exhibit: Exhibit) -> MeshSizes:
    """An exhibit's mesh, with two ranks of an axis at most where that is enough: they cost."""
    if "fewer key/value heads than tp" in exhibit.needs:
        return exhibit.sizes
    return sizes_of([min(2, size) for size in exhibit.mesh])


def curve_config(config: RunConfig, mesh: MeshSizes, seed: int, folder: Path) -> CompleteConfig:
    """A config in small on a mesh, for a hundred steps, with its own dropout.

    ZeRO-1 at most: no exhibit needs more, and on ranks of one machine it is a third of the time.
    """
    raw = config.to_dict()
    own = config.to_dict()["parallel3d"]["model"]
    raw["train_batch_size"] = "auto"
    raw["gradient_accumulation_steps"] = MICROBATCHES
    raw["zero_optimization"]["stage"] = min(1, config.zero_optimization.stage)
    few = RunConfig.from_dict(raw, "a loss curve's config")
    meshes = tuple({mesh, *MESHES})  # with the same model on each
    raw = shrink(few, meshes, str(folder), batch=BATCH, clipping=CLIPPING)[mesh].to_dict()
    raw["parallel3d"]["model"] |= {k: p for k, p in own.items() if k.endswith("_pdrop")}
    raw["parallel3d"]["train"] |= {
        "steps": STEPS,
        "seed": seed,
        "lr_schedule": {"type": "cosine", "warmup_steps": WARMUP_STEPS},
    }
    own_adam = config.optimizer.params
    adam = {"lr": LEARNING_RATE, "eps": own_adam.eps, "weight_decay": own_adam.weight_decay}
    raw["optimizer"]["params"] |= adam
    if config.precision == "fp16":
        raw["fp16"]["loss_scale_window"] = _SCALE_WINDOW
    return RunConfig.from_dict(raw, "a loss curve's config").resolve(mesh.ranks).completed()


def right_curves(title: str, folder: Path) -> list[Curve]:
    """The curves of a hall's right runs; the first has the seed of exhibits, the others have not.

    On one rank: any mesh gives the same.
    """
    config = hall(title)
    seeds = range(OTHER_RUNS + 1)
    configs = (curve_config(config, MeshSizes(), seed, folder) for seed in seeds)
    return [curve_of(config, Leg(), folder) for config in configs]


def planted_curves(title: str, names: Sequence[str], folder: Path) -> Iterator[tuple[str, Curve]]:
    """The curve of each exhibit in a hall."""
    config = hall(title)
    saved = folder / title.replace(" ", "-")
    for name in names:
        exhibit = exhibits.load(name).EXHIBIT
        leg = Leg(name)
        if "resume" in exhibit.needs:
            leg = Leg(name, resumes=saved)
            if not saved.exists():
                begun = curve_config(config, SAVED_MESH, 0, folder)
                curve_of(begun, Leg(saves=saved), folder)
        yield name, curve_of(curve_config(config, mesh_of(exhibit), 0, folder), leg, folder)


def curve_of(config: CompleteConfig, leg: Leg, folder: Path, timeout: float = 600) -> Curve:
    """The mean losses of a run's tenths, in nats, of half as many where it goes on.

    `config` is one of `curve_config`. A run that raises in the library's own words has no number.
    """
    size = config.mesh.sizes.ranks
    try:
        losses = run_locally(_train, size, config, leg, folder, timeout=timeout)[0]
    except TrainingError as error:
        if not leg.exhibit or "parallel3d.base.errors." not in str(error):
            raise
        return (None,)
    length = STEPS // PARTS
    means = (fmean(losses[i : i + length]) for i in range(0, len(losses), length))
    return tuple(round(mean, 4) if isfinite(mean) else None for mean in means)


def _train(rank: int, config: CompleteConfig, leg: Leg, folder: Path) -> list[float]:
    """On one rank: the mean loss of each step."""
    mesh = Mesh(**config.mesh.sizes._asdict())
    torch.set_num_threads(1)
    with exhibits.load(leg.exhibit).plant() if leg.exhibit else nullcontext():
        parts = assemble(config, mesh)
        corpus = _text(config, folder)
        losses = _losses(parts, config, mesh, corpus, leg)
    mesh.barrier()
    parts.engine.close()
    return losses


def _losses(
    parts: Assembly, config: CompleteConfig, mesh: Mesh, corpus: Corpus, leg: Leg
) -> list[float]:
    feed = Feed(config, mesh, corpus, parts.schedule)
    state = RunState(config, corpus)
    position = go_on(parts, mesh, state, leg.resumes, HALFWAY) if leg.resumes else Position()
    losses = []
    while position.step < STEPS:
        local = parts.executor.run(feed.training(position.next_sample), position.step)
        everyone = mesh.messages.gather_floats([local])
        losses.append(sum(row[0] for row in everyone) / (mesh.replicas.size * mesh.tensor.size))
        parts.engine.step(rate(config, position.step))
        position = position.after(config)
        if position.step == HALFWAY:
            parts.evaluator.run(feed.training(position.next_sample))
            if leg.saves:
                saver = Saver(parts.engine, mesh, parts.layers, [DiskPlace(mesh, leg.saves)])
                saver.save(state.at(position), wait=True)
                saver.require_saved()
    feed.close()
    return losses


def _text(config: CompleteConfig, folder: Path) -> Corpus:
    """Lines of Python as documents, a byte a token; forty steps make an epoch."""
    end = int(config.model.vocab_size) - 1
    count = EPOCH_STEPS * config.global_batch_size * config.data.sequence_length + 1
    lines = Path(argparse.__file__).read_bytes().splitlines()
    tokens = np.array([t for line in lines if line for t in (*line, end)][:count])
    assert len(tokens) == count, (len(tokens), count)
    stream = TokenStream(tokens, _bounds(tokens, end))
    return Corpus(folder, end + 1, end, 0.0, stream, stream, key="curve")


def _bounds(tokens: np.ndarray, end: int) -> np.ndarray:
    inner = np.flatnonzero(tokens[:-1] == end) + 1
    return np.array([0, *inner, len(tokens)])
