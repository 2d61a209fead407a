"""The start of every weight: the same bits however it is cut, and never whole on a rank."""

from contextlib import nullcontext
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.engine import EngineSettings
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Init, ParamSpec, Shape
from parallel3d.models import layers
from parallel3d.pipeline import stages
from parallel3d.schedule.schedules import make_schedule
from parallel3d.tensor.cut import Cut, CutPart, even_split
from parallel3d.tensor.initialise import fill
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, unpatched
from tests.counting import Counting
from tests.meshes import sizes_of

pytestmark = pytest.mark.gloo

NORMAL = Init(std=0.02)
UNIFORM = Init(bounds=(-0.1, 0.3))
TRUNCATED = Init(std=0.02, bounds=(-0.04, 0.02))
LISTED = Init(values=tuple(range(7)))
PADDED = Init(std=0.02, zero_row=0)


def spec_of(shape, init=NORMAL):
    return ParamSpec("weight", tuple(shape), (), init, True)


def cut_of(shape, *parts):
    """The cut of a rank, from (dim, number of ranks that cut it, number of this one)."""
    ranges = [(dim, "tensor", *even_split(shape[dim], size, rank)) for dim, size, rank in parts]
    return Cut(tuple(shape), tuple(CutPart(*part) for part in ranges))


def part(whole, cut):
    for p in cut.parts:
        whole = whole.narrow(p.dim, p.start, p.stop - p.start)
    return whole


def whole(spec, name="weight", seed=0):
    flat = torch.empty(spec.numel)
    fill(flat, 0, spec, name, Cut(spec.shape), seed)
    return flat.view(spec.shape)


@st.composite
def ranges(draw):
    """A parameter, a cut of some dims, and a flat range of the cut by ZeRO, with its padding."""
    shape = draw(st.lists(st.integers(1, 600), min_size=1, max_size=2))
    shape = (*draw(st.sampled_from([(), (3,)])), *shape) if len(shape) == 2 else tuple(shape)
    dims = draw(st.sets(st.integers(0, len(shape) - 1)))
    sizes = {dim: draw(st.integers(1, 4)) for dim in dims}
    cut = cut_of(shape, *((dim, n, draw(st.integers(0, n - 1))) for dim, n in sizes.items()))
    start, stop = sorted(draw(st.integers(0, prod(cut.local_shape) + 5)) for _ in range(2))
    init = draw(st.sampled_from([NORMAL, UNIFORM, TRUNCATED, LISTED, PADDED]))
    return spec_of(shape, init), cut, start, stop


@settings(max_examples=30, deadline=None)
@given(ranges())
def test_every_range_of_every_cut_has_the_same_bits(example):
    spec, cut, start, stop = example
    out = torch.full((stop - start,), torch.nan)
    fill(out, start, spec, "weight", cut, 0)
    expected = part(whole(spec), cut).flatten()[start:stop]
    assert torch.equal(out[: len(expected)], expected)
    assert out[len(expected) :].isnan().all(), "padding is left alone"


def test_statistics_of_first_weights():
    values = whole(spec_of((1000, 1000))).double()
    assert abs(values.mean()) < 5 * 0.02 / 1000
    assert abs(values.std() / 0.02 - 1) < 5 / 1000 / 2**0.5
    # Normal, not merely as wide: 4.55 % lie beyond two standard deviations.
    assert abs((values.abs() > 0.04).double().mean() - 0.0455) < 5 * 0.0455**0.5 / 1000


def test_uniform_values_fill_their_bounds():
    values = whole(spec_of((1000, 1000), UNIFORM)).double()
    assert -0.1 <= values.min() < -0.0999
    assert 0.2999 < values.max() <= 0.3
    assert abs(values.mean() - 0.1) < 5 * 0.4 / 12**0.5 / 1000


def test_truncated_normal_values_are_scipys():
    from scipy.stats import kstest, truncnorm  # at the top each rank would load it, too

    values = whole(spec_of((1000, 1000), TRUNCATED))
    expected = truncnorm(-2, 1, scale=0.02)
    assert kstest(values.flatten()[::10].numpy(), expected.cdf).pvalue > 0.001


def test_normal_values_have_the_mean_of_their_init():
    moved = whole(spec_of((100, 100), Init(std=0.02, value=3.0)))
    torch.testing.assert_close(moved - 3.0, whole(spec_of((100, 100))), rtol=0, atol=1e-6)


def test_listed_values_repeat():
    expected = torch.arange(2 * 5 * 9).remainder(7).view(2, 5, 9).float()
    assert torch.equal(whole(spec_of((2, 5, 9), LISTED)), expected)


def test_row_of_zeros_changes_no_other_row():
    values = whole(spec_of((300, 40), Init(std=0.02, zero_row=280)))
    expected = whole(spec_of((300, 40)))
    expected[280] = 0
    assert torch.equal(values, expected)


def test_no_random_number_is_used_twice():
    """Other names, seeds, slabs and tiles have other numbers."""
    fused = whole(spec_of((3, 512, 512)))
    tiles = [
        fused[s, i : i + 256, j : j + 256] for s in range(3) for i in (0, 256) for j in (0, 256)
    ]
    tiles += [whole(spec_of((256, 256)), name, seed) for name in "ab" for seed in (0, 1)]
    correlation = torch.corrcoef(torch.stack([t.flatten() for t in tiles]))
    assert (correlation - torch.eye(len(tiles))).abs().max() < 6 / 256
    assert torch.equal(whole(spec_of((256, 256)), "a"), tiles[-4])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_initial_values(value):
    out = torch.full((5,), torch.nan)
    fill(out, 6, spec_of((9,), init=Init(value=value)), "weight", Cut((9,)), 0)
    assert out[:3].tolist() == [value] * 3
    assert out[3:].isnan().all(), "padding is left alone"


def test_bf16_weights_are_rounded_fp32_ones():
    spec = spec_of((300, 20))
    out = torch.empty(spec.numel, dtype=torch.bfloat16)
    fill(out, 0, spec, "weight", Cut(spec.shape), 0)
    assert torch.equal(out.view(spec.shape), whole(spec).bfloat16())


class Memory(Counting):
    """Of storages that were made inside; also the largest, and how many numbers were drawn."""

    def __init__(self):
        super().__init__()
        self.largest = self.drawn = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        if func.__name__.startswith("normal_"):
            self.drawn += args[0].numel()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, storage):
        if storage._cdata not in self.given:
            super()._count(storage)
            self.largest = max(self.largest, storage.nbytes())


@pytest.mark.parametrize("dim", [0, 1])
def test_shard_draws_only_its_tiles(dim):
    spec = spec_of((4096, 1024))
    dp = 4
    for rank in range(4):
        cut = cut_of(spec.shape, (dim, 4, rank))
        height, width = cut.local_shape
        out = torch.empty(height * width // dp)
        with Memory() as memory:
            fill(out, len(out) + 100, spec, "weight", cut, 0)
        band = 256 * width
        assert memory.largest <= 4 * band
        # The next band and tile are drawn while the last ones are still referred to.
        assert memory.peak <= 2 * 4 * (band + 256 * 256) < 4 * spec.numel / 4
        # Tiles are drawn whole: a band above, a band below.
        assert len(out) <= memory.drawn <= len(out) + 2 * band
        assert memory.drawn <= spec.numel / 8


@pytest.mark.parametrize("shape", [(32, 32), (61, 32), (3, 32, 32), (128, 20)])
@pytest.mark.parametrize(
    ("tp", "dp"),
    [
        (2, 1),
        (1, 2),
        (2, 2),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 1), (1, 4))),
    ],
)
def test_shard_of_a_small_parameter_draws_only_a_part(shape, tp, dp):
    spec = spec_of(shape)
    for tp_rank, dp_rank in product(range(tp), range(dp)):
        cut = cut_of(shape, (len(shape) - 2, tp, tp_rank))
        out = torch.empty(-(-prod(cut.local_shape) // dp))
        with Memory() as memory:
            fill(out, len(out) * dp_rank, spec, "weight", cut, 0)
        assert memory.drawn <= 0.8 * spec.numel


BIG = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 250}


def build_whole(settings, mesh):
    """Stand for `building`, without sharding."""
    return nullcontext()


def build_on_rank(rank, sharded):
    case = Case(mesh=(1, 2, 1), model=BIG)
    mesh = Mesh(**sizes_of(case.mesh)._asdict())
    if not sharded:
        stages.building = build_whole
    with Memory() as memory:
        specs = layers(case.config.model)
        schedule = make_schedule("gpipe", 1, 1)
        settings = EngineSettings.from_config(case.config)
        built = stages.build_stages(specs, schedule, settings, mesh=mesh, shape=Shape(1, 16))
    mesh.barrier()
    return memory.peak, memory.largest, len(built.held)


def test_stage_is_sharded_while_it_is_built():
    specs = layers(Case(model=BIG).config.model)
    sizes = [4 * p.numel for layer in specs for p in layer.params]  # a tied copy is built too
    for peak, largest, _ in run_locally(build_on_rank, 2, True):
        print(f"built {sum(sizes):,} bytes over 2 ranks: peak {peak:,}, largest {largest:,}")
        assert largest <= max(sizes)
        # This rank's half, and what is being cut, until the garbage is collected.
        assert peak <= sum(sizes) / 2 + 3 * max(sizes) < 0.8 * sum(sizes)


@unpatched
def test_stage_is_built_whole_without_zero_init():
    specs = layers(Case(model=BIG).config.model)
    sizes = [4 * p.numel for layer in specs for p in layer.params]
    for peak, _, _ in run_locally(build_on_rank, 2, False):
        assert peak >= sum(sizes)
