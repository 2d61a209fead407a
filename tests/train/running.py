"""Whole runs of launch/train.py in ranks that live on: what each printed, saw and came to."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

import launch.train
from parallel3d.base.errors import Parallel3DError, TrainingError
from parallel3d.config import RunConfig
from parallel3d.data.batches import Batches
from parallel3d.data.evaluation_samples import ORDER_SEED
from parallel3d.engine import selftest
from parallel3d.mesh.agree import agree
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from parallel3d.train import known_hardware, output
from parallel3d.train.claim import claim
from parallel3d.train.ending import StopRequest
from parallel3d.train.feed import Feed
from parallel3d.verify.local_ranks import run_locally


@dataclass
class Ended:
    """What one rank came to."""

    code: int | None = None  # None if it raised
    error: str = ""  # the class and text of the error that it raised
    printed: list[str] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)  # the training samples that its steps took

    def says(self, text):
        """How many lines have the text in them."""
        return sum(text in line for line in self.printed)


def claim_on_first(asked, mesh, say=print):
    """As `main` does before there is a mesh; an error of rank 0 is raised on all."""
    launched = Launch.from_environment()
    config = asked.resolve(launched.world_size)
    return agree(mesh, lambda: None if mesh.rank else claim(asked, config, launched, say))


def train_on_rank(rank, raw, disturb=None, *details):
    """Everything between a config and the exit code, after `disturb` has changed something."""
    ended = Ended()
    claimed = None
    built = set()
    microbatch = Batches.microbatch
    training = Feed.training

    class Heard(Console):
        def print(self, *objects, **options):
            if not self.quiet:
                ended.printed.extend(str(x) for x in objects)

    def noted(self, first_sample, count):
        if self.seed != ORDER_SEED:  # that of held-out samples
            built.update(range(first_sample, first_sample + count))
        return microbatch(self, first_sample, count)

    def taken(self, start):
        """Of what was built, maybe ahead, the step that begins here takes its share."""
        step = training(self, start)
        share = built & set(range(start, start + self._config.batch_size_at(start)))
        ended.samples.extend(sorted(share))
        built.difference_update(share)
        return step

    if disturb:
        disturb(rank, *details)
    with (
        patch.object(output, "Console", Heard),
        patch.object(Batches, "microbatch", noted),
        patch.object(Feed, "training", taken),
        # What costs time and is tested elsewhere.
        patch.object(known_hardware, "peak", lambda config, mesh: ("a peak of mine", 1e12)),
        patch.object(selftest, "self_test", lambda *args: None),
    ):
        try:
            asked = RunConfig.from_dict(raw)
            config = asked.resolve(int(os.environ["WORLD_SIZE"]))
            mesh = Mesh(pp=config.mesh.pp, dp=config.mesh.dp, tp=config.mesh.tp)
            claimed = claim_on_first(asked, mesh, ended.printed.append)
            stop = StopRequest()
            ended.code = launch.train.train(asked, config, mesh, claimed, stop, as_json=False)
        except (Parallel3DError, TrainingError) as error:
            ended.error = f"{type(error).__name__}: {error}"
        finally:
            if claimed:
                claimed.lock.release()
    return ended


def start(raw, mesh, disturb=None, *details):
    """The run of a config on a mesh (pp, dp, tp): what each rank came to."""
    pp, dp, tp = mesh
    raw = raw | {"parallel3d": raw["parallel3d"] | {"mesh": {"pp": pp, "tp": tp}}}
    return run_locally(train_on_rank, pp * dp * tp, raw, disturb, *details)


def folder_of(raw):
    block = raw["parallel3d"]["run"]
    return Path(block["directory"], block["name"])


def _all_on_rank(rank, runs):
    return [train_on_rank(rank, *run) for run in runs]


def start_all(runs, mesh):
    """Runs one after the other in the same ranks, each a (config, disturb, ...): as `start`."""
    pp, dp, tp = mesh
    placed = [
        (raw | {"parallel3d": raw["parallel3d"] | {"mesh": {"pp": pp, "tp": tp}}}, *rest)
        for raw, *rest in runs
    ]
    return list(zip(*run_locally(_all_on_rank, pp * dp * tp, placed), strict=True))
