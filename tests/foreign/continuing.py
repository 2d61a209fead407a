"""Convert a checkpoint of another program by the real command, and go on with it here."""

import json
import multiprocessing as mp
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np

from launch import convert
from parallel3d import models
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.mesh.device import settle_accelerator
from parallel3d.verify import local_ranks
from parallel3d.verify.local_ranks import free_port
from tests.foreign.sources import SAVED, STEPS
from tests.launch.launching import TRAIN, become, environment

TOLERANCE = 1e-5


def convert_checkpoint(source, run, config, *options):
    """Run the command in this process; return its exit code."""
    words = ["checkpoint", str(source), "--to", str(run), "--config", str(config), *options]
    with patch.object(sys, "argv", ["convert.py", *words]):
        return convert.main()


def go_on(run, config, mesh=(1, 1, 1), *options):
    """Train a converted run to its end on a mesh (pp, dp, tp), each rank in a process."""
    sizes = zip(("pp", "dp", "tp"), mesh, strict=True)
    axes = [word for axis, size in sizes for word in (f"--mesh.{axis}", str(size))]
    words = [TRAIN, "--config", str(config), "--run.name", run.name]
    words += ["--run.directory", str(run.parent), *axes, *options]
    settle_accelerator()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(local_ranks.PRELOAD)
    world = int(np.prod(mesh))
    port = free_port()
    ranks = []
    for rank in range(world):
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
        launched |= {"LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = environment() | {key: str(value) for key, value in launched.items()}
        log = run.parent / f"{run.name}-{rank}.log"
        args = words, run.parent, log, variables
        ranks.append(context.Process(target=_train, args=args))
        ranks[-1].start()
    for rank in ranks:
        rank.join(200)
        rank.kill()
    text = (run.parent / f"{run.name}-0.log").read_text()
    assert [rank.exitcode for rank in ranks] == [0] * world, text
    return text


def _train(words, folder, log, variables):
    from launch.train import main
    from parallel3d.engine import selftest
    from parallel3d.train import known_hardware

    become(words, folder, log, variables)
    # What costs time and is tested elsewhere.
    with (
        patch.object(known_hardware, "peak", lambda config, mesh: ("a peak of mine", 1e12)),
        patch.object(selftest, "self_test", lambda *args: None),
    ):
        main()


def losses_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def weights_of(run, step=STEPS):
    """The weights of a checkpoint of ours under transformers' names."""
    source = CheckpointSource(run / "checkpoints" / f"step-{step}")
    family = models.huggingface(source.config.model.family)
    weights = {}
    for layer_name in source._shapes:
        value = {layer_name: source.read(layer_name)}
        weights |= family.to_huggingface(source.config.model, value)
    return {name: value.numpy() for name, value in weights.items()}


def assert_goes_on(run, losses, weights):
    """Its losses and last weights are those of the source, which went on by itself."""
    own = losses_of(run)
    assert sorted(own) == list(range(SAVED + 1, STEPS + 1)), own
    for step, loss in own.items():
        assert abs(loss - losses[step - 1]) < TOLERANCE, (step, loss, losses)
    ours = weights_of(run)
    assert ours.keys() <= weights.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, weights[name], rtol=0, atol=TOLERANCE, err_msg=name)


def merged(results):
    """Losses of the first rank, and the weights of all."""
    weights = {}
    for _, own in results:
        weights |= own
    return results[0][0], weights


def assert_no_checkpoint(run):
    checkpoints = Path(run, "checkpoints")
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    assert not [name for name in names if not name.endswith(".tmp")], names
