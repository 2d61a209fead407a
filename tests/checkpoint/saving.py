"""Saves by real ranks, whose training state is small."""

from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.checkpoint.save import Saver
from parallel3d.models import layers
from parallel3d.verify.local_ranks import run_locally
from tests.checkpoint.resharding import Side, Trained


def saver_of(trained, folder, others=(), *, keep=2, always=(), **settings):
    """A saver to a folder, by default, and to other places."""
    places = [DiskPlace(trained.mesh, folder, keep=keep, always=always), *others]
    return Saver(trained.engine, trained.mesh, layers(trained.config.model), places, **settings)


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class Named:
    """Stands for a run's memory.json, with this name, and steps that are not restored again."""

    def __init__(self, name, refused=-1):
        self.name = name
        self.refused = refused

    def name_and_refused(self):
        return self.name, self.refused


PAIR = Side((1, 2, 1), 1)


def two_ranks(rank, scenarios, root):
    """Each scenario, in a folder of its name, with the parts of a run that has trained a little."""
    trained = Trained(PAIR, root)
    trained.train(1)
    results = []
    for scenario, *args in scenarios:
        results.append(scenario(rank, trained, scenario_folder(scenario, root), *args))
        trained.mesh.barrier()
    return results


def scenario_folder(scenario, root):
    return root / scenario.__name__


def on_two_ranks(root, *scenarios):
    """Run scenarios, each (function, *its last arguments), one after another in the same two ranks.

    Return the results of both ranks by the scenario's function.
    """
    ranks = run_locally(two_ranks, 2, scenarios, root)
    functions = [function for function, *_ in scenarios]
    return dict(zip(functions, zip(*ranks, strict=True), strict=True))
