"""muP on every mesh against plain transformers with muP written anew (plain_mup.py); faults."""

from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.parametrization import Rate, Scales
from parallel3d.models import config_class, families
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE
from parallel3d.verify.reference import SEED, relative
from parallel3d.verify.shrink import shrink
from tests.cases import any_weights
from tests.meshes import sizes_of
from tests.verify import measuring
from tests.verify.configs import config_of
from tests.verify.measuring import (
    errors_of,
    measure,
    reference_on_batches,
    train_and_compare,
)
from tests.verify.plain_mup import train_plain

pytestmark = pytest.mark.gloo

MUP = {"type": "mup", "base_width": 16, "base_head_size": 4, "output_multiplier": 1.5}
DEPTH = MUP | {"base_depth": 2, "input_multiplier": 2.0}
STEPS = 5
BATCH = 8
SLOW = partial(pytest.param, marks=pytest.mark.slow)
FAMILIES = [f for f in families() if "parametrization" in config_class(f).model_fields]


def small(family, mesh, mup=None, *, zero=1, offload="none", steps=STEPS, **settings):
    """A small config on a mesh, with rates at which decay and rates show in the fifth step."""
    raw = config_of(model=family, zero=zero, offload=offload, microbatches=2, **settings)
    raw["parallel3d"]["model"] |= {"parametrization": mup} if mup else {}
    sizes = sizes_of(mesh)
    meshes = (sizes, MeshSizes(tp=4), MeshSizes(pp=4))
    shrunk = shrink(RunConfig.from_dict(raw), meshes, batch=BATCH)[sizes]
    raw = shrunk.to_dict()
    raw["parallel3d"]["model"] |= {"parametrization": mup} if mup else {}
    raw["optimizer"]["params"] |= {"lr": 3e-3, "weight_decay": 1.0}
    raw["parallel3d"]["train"]["steps"] = steps
    pp, dp, tp = mesh
    return RunConfig.from_dict(raw).resolve(pp * dp * tp).completed()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Family and settings -> the reference, trained once."""
    done = {}

    def of(family, mup=MUP):
        key = family, tuple(mup.items())
        if key not in done:
            folder = tmp_path_factory.mktemp("plain")
            done[key] = train_plain(small(family, (1, 1, 1)), mup, folder)
        return done[key]

    return of


# Four stages: the first has no hidden weight, the last has the output alone.
ON_STAGES = dict(mesh=(4, 1, 1), zero=1)
ON_TP = dict(mesh=(1, 1, 2), zero=3, weights="per_step")


# The command's own reference, which must train alike, is compared for each family below.
@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("gpt", ON_STAGES),
        ("moe", ON_TP),
        *(SLOW(f, ON_TP) for f in FAMILIES if f not in ("gpt", "moe")),
    ],
)
@pytest.mark.usefixtures("operators")
def test_parity_with_mup_written_anew(family, case, plain):
    errors = measure(small(family, mup=DEPTH, **case), plain(family, DEPTH), timeout=120)
    print(f"{family:6} {case['mesh']} {errors}")
    assert errors.within(TOLERANCE["fp32"]), errors


FULL = list(
    product(
        FAMILIES,
        [(2, 2, 2), (1, 1, 4)],
        [(0, "none"), (1, "none"), (3, "none"), (3, "cpu")],
        [MUP, DEPTH],
    )
)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh", "zero", "mup"), FULL, ids=str)
@pytest.mark.usefixtures("operators")
def test_parity_on_every_stage_of_zero(family, mesh, zero, mup, plain):
    stage, offload = zero
    config = small(family, mesh, mup, zero=stage, offload=offload, sequence_parallel=mesh[2] > 2)
    errors = measure(config, plain(family, mup), timeout=120)
    print(f"{family:6} {mesh} zero{stage} {offload:4} {errors}")
    assert errors.within(TOLERANCE["fp32"]), errors


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows(precision, plain):
    config = small("llama", (1, 2, 2), MUP, zero=3, precision=precision)
    errors = measure(config, plain("llama"), timeout=120)
    print(f"{precision} {errors}")
    assert errors.loss < 0.01 and errors.within(TOLERANCE[precision]), errors


@pytest.mark.parametrize("mup", [SLOW(MUP, id="mup"), pytest.param(DEPTH, id="depth")])
@pytest.mark.parametrize(
    "family",
    # What llama's blocks have, those of experts have as well.
    [SLOW(family) if family == "llama" else family for family in FAMILIES],
)
def test_reference_of_verify_trains_alike(family, mup, plain, tmp_path):
    told = plain(family, mup)
    ours = reference_on_batches(small(family, (1, 1, 1), mup), tmp_path)
    for curve, expected in ((ours.losses, told.losses), (ours.grad_norms, told.grad_norms)):
        assert max(relative(curve, expected)) < 1e-6


def train_each(rank, configs):
    return [train_only(config) for config in configs]


def train_only(config):
    mesh = Mesh(pp=config.mesh.pp, dp=config.mesh.dp, tp=config.mesh.tp)
    with any_weights():
        parts = assemble(config, mesh, seed=SEED)
    curves = measuring.train(parts, config, mesh)
    kinds = len(parts.engine.deepspeed.optimizer.optimizer.param_groups)
    mesh.barrier()
    parts.engine.close()
    return curves, kinds


def test_at_base_width_it_is_the_standard_one_bit_for_bit():
    mesh = (2, 1, 1)
    plain = small("gpt", mesh, steps=2)
    width = plain.model.hidden_size
    widths = (width, width // 2)
    configs = [small("gpt", mesh, {"type": "mup", "base_width": base}, steps=2) for base in widths]
    ranks = run_locally(train_each, 2, [plain, *configs])
    standard, *others = map(list, zip(*ranks, strict=True))
    for base, trained in zip(widths, others, strict=True):
        same = base == width
        assert (trained == standard) == same
        assert [groups for _, groups in trained] == [2 if same else 4] * 2  # on both stages


def local_fan_in():
    of = Scales.of.__func__

    def local(cls, model, head_size):
        half = model.model_copy(update={"hidden_size": model.hidden_size // 2})
        return of(cls, half, head_size)

    return patch.object(Scales, "of", classmethod(local))


def of_rate(change):
    rate = Scales.rate
    return patch.object(
        Scales, "rate", lambda self, role, power=1.0: change(role, rate(self, role, power))
    )


def wrong_exponent():
    def change(role, rate):
        return rate._replace(lr=rate.lr**0.5) if role == "hidden" else rate

    return of_rate(change)


def decay_not_rescaled():
    return of_rate(lambda role, rate: rate._replace(weight_decay=Rate().weight_decay))


def no_output_multiplier():
    of = Scales.of.__func__

    def without(cls, *args, **sizes):
        return replace(of(cls, *args, **sizes), output=1.0)

    return patch.object(Scales, "of", classmethod(without))


def with_fault(rank, fault, config, reference):
    with fault():
        return train_and_compare(rank, config, reference)


FAULTS = [local_fan_in, wrong_exponent, decay_not_rescaled, no_output_multiplier]


@pytest.mark.parametrize("fault", [FAULTS[0], *map(SLOW, FAULTS[1:])])
def test_planted_faults_are_seen(fault, plain):
    tp = 2 if fault is local_fan_in else 1
    config = small("gpt", (1, 1, tp), DEPTH)
    errors = errors_of(config, run_locally(with_fault, tp, fault, config, plain("gpt", DEPTH)))
    print(f"{fault.__name__:22} {errors}")
    assert not errors.within(10 * TOLERANCE["fp32"]), errors
