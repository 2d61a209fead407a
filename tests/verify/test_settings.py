"""What verify says of each setting, and that it sees a mistake in those that it calls proved."""

import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.engine.quirks import core
from parallel3d.model import optimizers
from parallel3d.model.parametrization import Scales
from parallel3d.models.blocks import GeluMLP
from parallel3d.models.moe import blocks as moe
from parallel3d.tensor import product as product_of_tensors
from parallel3d.tensor.dropout import Dropout
from parallel3d.tensor.pointwise import gelu
from parallel3d.tensor.random_key import RandomKey
from parallel3d.verify.case import CaseRun, CaseTask, check, checked
from parallel3d.verify.idle import idle_settings
from parallel3d.verify.measure import TOLERANCE, ReferenceErrors
from parallel3d.verify.reference import prepare
from parallel3d.verify.schedule import compared_steps, schedule_of
from parallel3d.verify.settings import acts, changed_settings
from parallel3d.verify.shrink import EXACT, LONG, MESHES, in_fp32, shrink
from parallel3d.verify.table import features
from tests.verify.configs import config_of

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.name for path in (ROOT / "configs").glob("*.json"))
ONE = (MeshSizes(),)


def config_with(changes, **settings):
    """A config with changes to its model's settings."""
    raw = config_of(**settings)
    raw["parallel3d"]["model"] |= changes
    return RunConfig.from_dict(raw)


def features_of(config):
    return features(config, shrink(config, ONE)[ONE[0]])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_config_is_verified_by_the_command(name):
    run = [sys.executable, "launch/verify.py", "--config", name, "--json"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["passed"]


LENGTHS = [1, 2, 3, 10, 5000]
SCHEDULES = {
    "constant": {"warmup_steps": 1},
    "cosine": {"warmup_steps": 1},
    "linear": {"min_ratio": 0.0},
    "wsd": {"decay_steps": 1},
    "wsd without decay_steps": {},
    "wsd, long": {"warmup_steps": 2000, "decay_steps": 3000},
}


@pytest.mark.parametrize(("kind", "steps"), list(product(SCHEDULES, LENGTHS)))
def test_every_schedule_of_the_rate_shrinks_to_a_valid_one(kind, steps):
    settings = SCHEDULES[kind]
    warmup = settings.get("warmup_steps", 0)
    if warmup + settings.get("decay_steps", 0) > steps or (warmup and warmup >= steps):
        pytest.skip("the config itself is invalid")
    raw = config_of()
    raw["parallel3d"]["train"] |= {
        "steps": steps,
        "lr_schedule": {"type": kind.partition(" ")[0].strip(","), **settings},
    }
    config = RunConfig.from_dict(raw)
    (small,) = shrink(config, ONE).values()
    (long,) = shrink(config, ONE, extent=LONG).values()
    assert small.train.lr_schedule.type == long.train.lr_schedule.type
    assert schedule_of(config, small).train.lr_schedule.type == config.train.lr_schedule.type


def test_rates_are_compared_over_the_whole_of_a_long_run():
    raw = config_of()
    schedule = {"type": "wsd", "warmup_steps": 1430, "decay_steps": 20_000}
    raw["parallel3d"]["train"] |= {"steps": 143_000, "lr_schedule": schedule}
    config = RunConfig.from_dict(raw)
    own = schedule_of(config, shrink(config, ONE)[ONE[0]])
    steps = compared_steps(own)
    assert {0, 1429, 1430, 122_999, 123_000, 142_999} <= set(steps)
    assert max(b - a for a, b in pairwise(steps)) <= 143
    states = {feature.name: feature.state for feature in features_of(config)}
    assert states["train.lr_schedule.warmup_steps = 1430"] == "proved"


MUP = {
    "four times": (512, 16, {"base_width": 128}),
    "many times": (4096, 32, {"base_width": 64, "base_head_size": 32}),
    "narrower than the base": (128, 4, {"base_width": 512}),
    "as wide as the small model": (512, 16, {"base_width": 32, "base_head_size": 8}),
    "odd": (768, 12, {"base_width": 257, "base_depth": 5}),
    "deep": (512, 16, {"base_width": 256, "base_depth": 3}),
}


@pytest.mark.parametrize("name", MUP)
@pytest.mark.parametrize("family", ["gpt"])
def test_width_over_base_width_is_kept(name, family):
    hidden, heads, bases = MUP[name]
    sizes = {"hidden_size": hidden, "num_attention_heads": heads}
    config = config_with(sizes | {"parametrization": {"type": "mup", **bases}}, model=family)
    (small,) = shrink(config, ONE).values()
    mup = small.model.parametrization
    for base, own in (("base_width", "hidden_size"), ("base_depth", "num_hidden_layers")):
        if getattr(mup, base) is None:
            continue
        ratio = getattr(config.model, own) / bases[base]
        kept = getattr(small.model, own) / getattr(mup, base)
        assert (kept > 1) == (ratio > 1) and kept != 1
        within_size = 1 < ratio < getattr(small.model, own)
        assert not within_size or 0.5 < kept / ratio < 2
    assert acts(small)


def test_mup_at_its_base_is_not_called_proved():
    config = config_with({"parametrization": {"type": "mup", "base_width": 512}})
    states = {feature.name: feature.state for feature in features_of(config)}
    assert "model.parametrization" not in states
    assert states["model.parametrization.type = mup"] == "not proved"


EVERY = dict(
    zero=3,
    offload="cpu+cpu",
    schedule="interleaved",
    stages_per_rank=2,
    checkpointing="selective",
    sequence_parallel=True,
    isolate=True,
    precision="bf16",
)


def test_every_changed_setting_is_in_one_list():
    raw = config_of(**EVERY)
    raw["zero_optimization"] |= {"overlap_comm": True, "sub_group_size": 10**6}
    raw["wandb"] = {"enabled": True, "project": "p"}
    raw["aio"] = {"block_size": 4096}
    raw["parallel3d"]["train"] |= {"seed": 7, "tf32": True, "overlap": False}
    raw["parallel3d"]["checkpoint"] = {"keep": 5}
    raw["parallel3d"]["run"] = {"name": "mine", "trackers": ["csv"]}
    raw["parallel3d"]["model"] |= {"resid_pdrop": 0.1}
    config = RunConfig.from_dict(raw)
    changed = [path.removeprefix("parallel3d.") for path, _ in changed_settings(config)]
    assert {"zero_optimization.overlap_comm", "train.seed", "run.name", "aio.block_size"} <= {
        *changed
    }
    names = [feature.name for feature in features_of(config)]
    for path in changed:
        assert sum(name.startswith(f"{path} = ") for name in names) == 1, path
    states = {feature.name: feature.state for feature in features_of(config)}
    assert states["zero_optimization.overlap_comm = True"] == "not proved"
    assert states["pipeline.stages_per_rank = 2"] == "proved"


@pytest.mark.parametrize("meshes", [ONE, MESHES])
def test_small_model_has_several_heads(meshes):
    small = shrink(RunConfig.from_dict(config_of()), meshes)[meshes[0]]
    assert small.model.num_attention_heads >= 2


BALANCED = {"router_aux_loss": "sequence", "router_aux_loss_coef": 0.01}
PLAIN = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}  # each other one trains again
IDLE = {
    # The coefficient of the loss is 0 in the small model.
    "form of a loss": ("moe", BALANCED | {"rms_norm_eps": 1e-4}, PLAIN, {"router_aux_loss"}),
    "epsilon that rounding hides": (
        "gpt",
        {"layer_norm_epsilon": 1.01e-5},
        {"precision": "bf16"},
        {"layer_norm_epsilon"},
    ),
}


# The command looks for them in fp32.
IN_BF16 = pytest.param("epsilon that rounding hides", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["form of a loss", IN_BF16])
def test_setting_that_changes_nothing_is_not_called_proved(name, tmp_path):
    family, changes, settings, idle = IDLE[name]
    config = config_with(changes, model=family, microbatches=2, **settings)
    small, reference = prepare(config, ONE, tmp_path)
    unseen = idle_settings(config, small[ONE[0]], reference, tmp_path)
    of_model = {path for path in unseen if path.startswith("parallel3d.model.")}
    assert of_model == {f"parallel3d.model.{setting}" for setting in idle}
    states = {x.name: x.state for x in features(config, small[ONE[0]], unseen)}
    for setting, value in changes.items():
        is_proved = setting not in idle and not setting.endswith("coef")
        assert states[f"model.{setting} = {value}"] == ("proved" if is_proved else "not proved")


@contextmanager
def rate_of_the_base():
    rate = Scales.rate

    def wrong(scales, role, power=1.0):
        right = rate(scales, role, power)
        return right._replace(lr=1.0) if role == "hidden" else right

    with patch.object(Scales, "rate", wrong):
        yield


@contextmanager
def output_not_scaled():
    of = Scales.of.__func__

    def wrong(cls, model, head_size):
        scales = of(cls, model, head_size)
        return Scales(**vars(scales) | {"output": 1.0})

    with patch.object(Scales, "of", classmethod(wrong)):
        yield


@contextmanager
def seed_without(name):
    seed = RandomKey.seed_generator

    def wrong(key, *args):
        kept = getattr(key, name)
        setattr(key, name, 0)
        seed(key, *args)
        setattr(key, name, kept)

    with patch.object(RandomKey, "seed_generator", wrong):
        yield


@contextmanager
def one_place():
    seed = Dropout._seed

    def wrong(layer, device):
        place = layer.place
        layer.place = "dropout"
        seed(layer, device)
        layer.place = place

    with patch.object(Dropout, "_seed", wrong):
        yield


WIDER = {"parametrization": {"type": "mup", "base_width": 128}}
AS_SMALL = {"parametrization": {"type": "mup", "base_width": 32, "output_multiplier": 2.0}}
DROPS = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
SLOW = partial(pytest.param, marks=pytest.mark.slow)
PLANTS = [
    pytest.param(WIDER, rate_of_the_base, id="rate"),
    SLOW(AS_SMALL, rate_of_the_base, id="rate, base as wide as the small model"),
    SLOW(WIDER, output_not_scaled, id="output"),
    # The museum's exhibit of another mask is seen by the same comparison.
    SLOW(DROPS, partial(seed_without, "step"), id="step of a mask"),
    SLOW(DROPS, partial(seed_without, "microbatch"), id="microbatch of a mask"),
    SLOW(DROPS, one_place, id="place of a mask"),
]


def check_with(plant, *args):
    with plant():
        return check(*args)


@pytest.mark.parametrize(("model", "plant"), PLANTS)
def test_mistake_in_a_proved_setting_is_seen(model, plant, tmp_path):
    config = config_with(model, zero=1, microbatches=2)
    small, reference = prepare(config, ONE, tmp_path)
    task = CaseTask(drops=model is DROPS)
    tolerance = max(reference.tolerances.values(), default=TOLERANCE["fp32"])
    sound, _ = checked(small[ONE[0]], reference, task, timeout=100)
    assert sound.within(tolerance), sound
    errors, _ = checked(
        small[ONE[0]], reference, task, function=partial(check_with, plant), timeout=100
    )
    assert not errors.within(tolerance), errors


def error_of_routers(router, dtype):
    """The error that a rank of a case finds."""
    config = config_with({"router": router}, model="moe")
    parts = SimpleNamespace(
        stages=SimpleNamespace(module=moe.Router(config.model)),
        engine=SimpleNamespace(settings=SimpleNamespace(dtype=dtype)),
    )
    return CaseRun._compare_routers(SimpleNamespace(parts=parts, config=config))


@pytest.mark.parametrize("router", ["softmax_topk", "topk_softmax", "sigmoid"])
def test_router_in_half_precision_is_seen(router, monkeypatch):
    bound = {"routers": 1e-4}
    for dtype in (torch.float32, torch.bfloat16):
        right = ReferenceErrors(0.0, 0.0, 0.0, routers=error_of_routers(router, dtype))
        assert not right.beyond(bound)

    def rounded(x, weight, dtype):
        return product_of_tensors.linear(x, weight).float()

    monkeypatch.setattr(moe, "linear", rounded)
    wrong = ReferenceErrors(0.0, 0.0, 0.0, routers=error_of_routers(router, torch.bfloat16))
    assert "routers" in wrong.beyond(bound)


@contextmanager
def exact_gelu():
    make = GeluMLP.__init__

    def wrong(mlp, config, *, context):
        make(mlp, config, context=context)
        mlp.gelu = partial(gelu.compiled_if(context.pointwise), approximate="none")

    with patch.object(GeluMLP, "__init__", wrong):
        yield


@contextmanager
def second_beta_of_torch():
    file = optimizers.load("adamw")
    make = file.make

    def wrong(groups, params, **options):
        betas = (params.betas[0], 0.999)
        return make(groups, params.model_copy(update={"betas": betas}), **options)

    with patch.object(file, "make", wrong):
        yield


@contextmanager
def embeddings_without_decay():
    groups_of = core.param_groups

    def wrong(held, *args):
        changed = []
        for own in held:
            decays = own.spec.weight_decay and "embedding" not in own.name
            changed.append(replace(own, spec=replace(own.spec, weight_decay=decays)))
        return groups_of(changed, *args)

    with patch.object(core, "param_groups", wrong):
        yield


@pytest.mark.parametrize(
    "plant", [exact_gelu, SLOW(second_beta_of_torch), SLOW(embeddings_without_decay)]
)
def test_mistake_that_half_precision_hides_is_seen_in_fp32(plant, tmp_path):
    config = in_fp32(config_with({}, precision="bf16", zero=1, microbatches=2))
    small, reference = prepare(config, ONE, tmp_path, EXACT)
    errors, _ = checked(
        small[ONE[0]], reference, CaseTask(), function=partial(check_with, plant), timeout=100
    )
    assert not errors.within(TOLERANCE["fp32"]), errors
