"""The coordinate check measured: muP passes, the standard parametrisation fails, meshes agree."""

import pytest

from parallel3d.config import RunConfig
from parallel3d.extras.scaling.on_ranks import coordinate_check
from parallel3d.extras.scaling.on_ranks.coordinate_check import check_coordinates
from tests.verify.configs import config_of

pytestmark = pytest.mark.gloo

MUP = {"type": "mup", "base_width": 64}
WIDTHS = 32, 64


def config(family="gpt", mup=None, mesh=(1, 1, 1), zero=1, lr=3e-3):
    raw = config_of(model=family, zero=zero, microbatches=2)
    raw["optimizer"]["params"] |= {"lr": lr}
    raw["parallel3d"]["mesh"] |= dict(zip(("pp", "dp", "tp"), mesh, strict=True))
    raw["parallel3d"]["model"] |= {"parametrization": mup} if mup else {}
    return RunConfig.from_dict(raw)


def checked(*args, widths, seeds=1, steps=3, **settings):
    lines = []
    check = check_coordinates(
        config(*args, **settings), widths=widths, seeds=seeds, steps=steps, say=lines.append
    )
    assert len(lines) == len(widths)
    return check


def test_standard_fails_and_names_where():
    check = checked("gpt", widths=WIDTHS, steps=2)
    names = [layer.name for layer in check.layers]
    inner = ("attention.qkv", "attention.core", "attention.output", "mlp.up", "mlp.down")
    blocks = [f"blocks.{i}{'.' + n if n else ''}" for i in range(2) for n in (*inner, "")]
    assert names == ["embedding", *blocks, "head.output"]
    assert not check.passed and not next(la for la in check.layers if la.name == "head.output").flat


def test_each_width_is_trained_with_each_seed(monkeypatch):
    """Sizes are given in place of ranks: the first seeds disagree, all together are flat."""
    powers = (0.3, -0.02, 0.02, -0.2)
    looks = []

    def sizes(_, ranks, small, seed, timeout):
        looks.append((small.model.hidden_size, seed))
        size = small.model.hidden_size ** powers[seed]
        return [{"embedding": dict.fromkeys(("start", "trained", "change"), (size, 1))}]

    monkeypatch.setattr(coordinate_check, "run_locally", sizes)
    monkeypatch.setattr(coordinate_check, "compile_operators", lambda config: None)
    lines = []
    check = check_coordinates(config(), widths=WIDTHS, seeds=4, steps=1, say=lines.append)
    assert check.passed and check.seeds == 4 and len(lines) == len(WIDTHS)
    assert looks == [(width, seed) for width in WIDTHS for seed in range(4)]


@pytest.mark.slow
def test_mup_is_flat():
    check = checked("gpt", MUP, widths=(64, 128, 256, 512), seeds=1, steps=5, lr=4e-3)
    print({layer.name: round(layer.slope, 3) for layer in check.layers})
    assert check.passed


@pytest.fixture(scope="module")
def on_one_rank():
    return checked("llama", MUP, widths=WIDTHS, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero"), [((1, 1, 2), 1), ((2, 1, 1), 1), ((1, 2, 1), 3)], ids=str
)
def test_no_mesh_changes_a_figure(mesh, zero, on_one_rank):
    """Sizes, and so slopes, within 1e-4."""
    other = checked("llama", MUP, mesh=mesh, zero=zero, widths=WIDTHS, steps=2)
    assert [layer.name for layer in on_one_rank.layers] == [layer.name for layer in other.layers]
    for layer, there in zip(on_one_rank.layers, other.layers, strict=True):
        for measure, sizes in layer.sizes.items():
            assert there.sizes[measure] == pytest.approx(sizes, rel=1e-4), (layer.name, measure)
        assert there.slopes == pytest.approx(layer.slopes, abs=1e-4), layer.name
