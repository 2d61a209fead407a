"""mesh.fallbacks: the mesh for each number of processes, with the same batch on each."""

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.digest import digest_of
from tests.config.configs import error_of, raw

pytestmark = pytest.mark.pure

FALLBACKS = "parallel3d.mesh.fallbacks"
MESHES = ["2x1x2", "1x2x2", "1x1x2", "1x1x1x2", "1x2x2x1"]


def elastic(*meshes, **changes):
    changes = {FALLBACKS: [*meshes], "parallel3d.mesh.dp": 2, **changes}
    return RunConfig.from_dict(raw(**changes))


@pytest.mark.parametrize(
    ("ranks", "mesh", "microbatches"),
    [(8, "2x2x2", 4), (4, "2x1x2", 8), (2, "1x1x2", 8)],  # the first of two meshes of a size
)
@pytest.mark.parametrize("batch", ["derived", "stated"])
def test_fallback_mesh_keeps_the_batch(ranks, mesh, microbatches, batch):
    stated = {"train_batch_size": 16} if batch == "stated" else {}
    config = elastic(*MESHES, **stated).resolve(ranks)
    assert str(config.mesh.sizes) == mesh
    assert config.global_batch_size == config.train_batch_size == 16
    assert (config.micro_batch_size, config.num_microbatches) == (2, microbatches)
    mesh_notes = [note for note in config.notes if note.startswith("parallel3d.mesh: ")]
    if ranks == 8:
        assert mesh_notes == []
    else:
        (note,) = mesh_notes
        assert note.startswith(f"parallel3d.mesh: {mesh} of fallbacks, because 2x2x2 ")
        assert f"{ranks} ranks; {microbatches} microbatches of 2 a step" in note


def test_resolved_config_has_one_mesh():
    config = elastic(*MESHES).resolve(4)
    assert config.mesh.fallbacks == ()
    again = RunConfig.from_dict(config.to_dict())
    with pytest.raises(ConfigError, match="pp=2 x tp=2 = 4 does not divide 2 processes"):
        again.resolve(2)


def test_number_of_processes_without_a_mesh_is_refused():
    with pytest.raises(ConfigError) as caught:
        elastic("2x1x2", "1x1x2").resolve(3)
    message = str(caught.value)
    assert f'{FALLBACKS} = ["2x1x2", "1x1x2"]: has no mesh of 3 ranks, and 2x2x2 has 8' in message
    assert message.endswith("add a mesh for 3 processes, or start one of these numbers: 2, 4, 8")


@pytest.mark.parametrize(
    ("meshes", "changes", "expected"),
    [
        (["2x2"], {}, 'fallbacks.0 = "2x2": must be the sizes of a mesh; write pp x dp x tp'),
        (["2x0x1"], {}, 'fallbacks.0 = "2x0x1": must be the sizes of a mesh'),
        (["1x1x3"], {}, 'fallbacks = "1x1x3": parallel3d.mesh.tp = 3: does not divide num_att'),
        (["7x1x1"], {}, 'fallbacks = "7x1x1": parallel3d.mesh.pp = 7: makes 7 stages'),
        (["1x3x1"], {}, 'fallbacks = "1x3x1": train_batch_size = 16: is not a multiple of train_'),
        (["1x1x1x5"], {}, "does not divide num_attention_heads"),
        (["1x1x3x1"], {}, "cannot be dealt to cp=3 ranks"),
        (["1x8x1"], {"parallel3d.train.batch_schedule": [[0, 16], [160, 20]]}, '= "20": is not a'),
        (["1x4x1"], {"parallel3d.train.noise_scale_every": 1}, None),
        (["4x1x1"], {"parallel3d.train.noise_scale_every": 1}, "mesh.dp is 1; use dp = 2 or more"),
        (["4x1x1"], {"parallel3d.mesh.dp": "auto"}, 'mesh.dp = "auto": fits any number of proc'),
    ],
)
def test_each_mesh_is_checked_with_the_config(meshes, changes, expected):
    changes = {FALLBACKS: meshes, "parallel3d.mesh.dp": 2, **changes}
    if expected is None:
        RunConfig.from_dict(raw(**changes))
    else:
        message = error_of(**changes)
        assert expected in message
        assert message.startswith("1 problem in the config:"), message


def test_problems_of_all_meshes_are_reported_at_once():
    message = error_of(**{FALLBACKS: ["1x1x3", "1x1x2", "9x1x3"], "parallel3d.mesh.dp": 2})
    assert message.startswith("3 problems")
    assert message.count('"9x1x3"') == 2 and '"1x1x2"' not in message


def test_problem_of_the_main_mesh_is_not_repeated_for_fallbacks():
    message = error_of(
        **{
            FALLBACKS: ["1x1x1"],
            "parallel3d.mesh.dp": 3,
            "train_batch_size": 16,
            "gradient_accumulation_steps": 1,
            "train_micro_batch_size_per_gpu": 2,
        }
    )
    assert FALLBACKS not in message and "train_batch_size = 16" in message


def test_fallbacks_do_not_change_the_digest():
    """By the digest a run without a name is found again."""
    assert digest_of(elastic("1x1x2")) == digest_of(elastic("2x1x2")) == digest_of(elastic())
