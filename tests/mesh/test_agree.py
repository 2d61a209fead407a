"""One rank's error is raised on all, in its own words; what rank 0 finds is known everywhere."""

import pytest

from parallel3d.base.errors import ConfigError, DataError, Parallel3DError, TrainingError
from parallel3d.mesh.agree import agree, gather_json, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import run_locally

pytestmark = pytest.mark.gloo


class OwnError(DataError):
    """Of a kind that parallel3d.base.errors does not know."""


def outcomes_on_rank(rank):
    """What each of these gives or raises, in turn."""
    mesh = Mesh(dp=2)

    def fail(culprits, error):
        def work():
            if rank in culprits:
                raise error(f"rank {rank} says: no")
            return "done"

        return work

    def called(work):
        try:
            return work()
        except (Parallel3DError, TrainingError) as error:
            return type(error).__name__, str(error)

    return [
        called(lambda: agree(mesh, lambda: rank)),
        called(lambda: agree(mesh, fail({1}, ConfigError))),
        called(lambda: agree(mesh, fail({0, 1}, TrainingError))),
        called(lambda: agree(mesh, fail({1}, OwnError))),
        called(lambda: on_first(mesh, lambda: {"rank": rank})),
        called(lambda: on_first(mesh, fail({1}, ConfigError))),
        called(lambda: on_first(mesh, fail({0}, ConfigError))),
        gather_json(mesh, {"rank": rank, "none": None}),
    ]


def test_ranks_agree():
    for rank, outcomes in enumerate(run_locally(outcomes_on_rank, 2)):
        assert outcomes == [
            rank,
            ("ConfigError", "rank 1 says: no"),
            ("TrainingError", "rank 0 says: no"),
            ("DataError", "rank 1 says: no"),
            {"rank": 0},
            "done",
            ("ConfigError", "rank 0 says: no"),
            [{"rank": 0, "none": None}, {"rank": 1, "none": None}],
        ]
