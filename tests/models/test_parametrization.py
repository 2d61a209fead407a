"""muP's start, multipliers and rates by role, in every family; bad settings are refused."""

from dataclasses import replace
from math import sqrt

import pytest
from pydantic import ValidationError

from parallel3d import models
from parallel3d.base.section import Problems
from parallel3d.config.checks import find_problems
from parallel3d.model import optimizers
from parallel3d.model.parametrization import ROLES, Rate
from parallel3d.models.common import rates_of, role_lrs, scales_of

pytestmark = pytest.mark.pure

WIDE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 61}
MUP = {"type": "mup", "base_width": 32}


def model(family, parametrization=None, **settings):
    chosen = {"parametrization": parametrization} if parametrization else {}
    return models.config_class(family)(family=family, **WIDE | settings, **chosen)


def params(config):
    return {f"{la.name}.{p.name}": p for la in models.layers(config) for p in la.params}


FAMILIES = [
    f for f in models.families() if "parametrization" in models.config_class(f).model_fields
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_the_role_of_its_shape(family):
    for name, p in params(model(family)).items():
        vector = len(p.shape) == 1 or name.endswith("bias")
        outer = {"embedding": "input", "head": "output"}.get(name.split(".")[0], "hidden")
        outer = "router" if "router" in name else outer
        assert p.role == ("vector" if vector else outer), name
        assert p.weight_decay == (not vector) and p.folded == (), name


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_and_rates_depend_on_the_width(family):
    plain = params(model(family))
    wide = params(model(family, MUP))
    for name, p in wide.items():
        factor = 1 / sqrt(4) if p.role in ("hidden", "router") else 1.0  # variance by 1 / width
        assert p.init.std == pytest.approx(plain[name].init.std * factor), name
        assert p.init.value == plain[name].init.value
    scales = scales_of(model(family, MUP))
    assert {role: scales.rate(role) for role in ROLES} == {
        "input": Rate(),
        "hidden": Rate(lr=1 / 4, weight_decay=4),
        "output": Rate(),
        "vector": Rate(),
        "router": scales.rate("hidden"),
        "balance": Rate(lr=0.0),
    }
    assert (scales.input, scales.output, scales.branch, scales.query) == (1, 1 / 4, 1, 1)
    adam = optimizers.load("adamw").Params(lr=1)
    expected = {"input": 1, "hidden": 1 / 4, "output": 1, "vector": 1}
    assert role_lrs(model(family, MUP), adam) == expected
    assert role_lrs(model(family), adam) == {}


@pytest.mark.parametrize(
    ("scale", "rate"), [("spectral", Rate()), ("match_rms_adamw", Rate(1 / 2, 2))]
)
def test_rates_of_muon_depend_on_the_norm_of_updates(scale, rate):
    """The largest singular value of 0.2 sqrt(width) U V^T is sqrt(width) times that wanted."""
    wide = model("llama", MUP)  # four times as wide as the base
    params = optimizers.load("muon").Params(lr=0.5, adam_lr=0.25, scale=scale)
    rates = rates_of(wide, params)
    assert rates["hidden"] == rate and rates["input"] == rates["output"] == Rate()
    original = optimizers.load("muon").Params(lr=0.5)
    assert set(rates_of(model("llama"), original).values()) == {Rate()}
    assert role_lrs(wide, params) == {"input": 0.5, "hidden": rate.lr, "output": 0.5, "vector": 0.5}


@pytest.mark.parametrize("family", FAMILIES)
def test_mup_at_base_width_is_the_standard_parametrization(family):
    base = MUP | {"base_width": 128, "base_head_size": 32, "base_depth": 4}
    config = model(family, base)
    plain = model(family)
    assert params(config) == params(plain)
    scales = scales_of(config)
    assert set(scales.rates().values()) == {Rate()}
    assert scales.scores(32) is None
    assert (scales.input, scales.output, scales.branch) == (1, 1, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_scale_by_head_size_if_its_base_is_set(family):
    scales = scales_of(model(family, MUP | {"base_head_size": 8}))
    assert scales.scores(32) == pytest.approx(sqrt(8) / 32)  # 1/sqrt(8) at the base, then by 1/size
    assert scales_of(model(family, MUP)).scores(32) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_depth_transfers_by_complete_p(family):
    """arXiv:2505.01618, table 1, alpha = 1, of a model four times as wide and twice as deep."""
    config = model(family, MUP | {"base_depth": 2})
    scales = scales_of(config)
    base = params(model(family, num_hidden_layers=2))
    assert scales.branch == 1 / 2
    assert scales.rate("hidden") == Rate(lr=1 / 4, weight_decay=4, eps=1 / 8)
    assert scales.rate("vector") == Rate(eps=1 / 8) and scales.rate("output") == Rate(eps=1 / 4)
    for name, p in params(config).items():
        there = base[name.replace("blocks.3", "blocks.1").replace("blocks.2", "blocks.0")]
        factor = (
            1 / 2 if p.role in ("hidden", "router") else 1.0
        )  # the depth says nothing of a start
        assert p.init.std == pytest.approx(there.init.std * factor), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"type": "mup"}, "base_width = null: is missing"),
        ({"base_width": 32}, 'base_width = 32: has no effect with type = "standard"; use "mup"'),
        ({"output_multiplier": 2.0}, "output_multiplier = 2.0: has no effect"),
        (MUP | {"base_width": 0}, "greater than 0"),
    ],
)
def test_settings_without_effect_are_refused(family, wrong, message):
    with pytest.raises(ValidationError) as refusal:
        model(family, wrong)
    assert message in str(refusal.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_weights_are_refused_with_multipliers(family):
    published = model(family, MUP, from_pretrained={"folder": "somewhere"})
    [problem] = find_problems({"model": published})
    assert 'parametrization.type = "mup": applies multipliers that the weights' in str(problem)


def test_family_without_roles_is_refused_by_name(monkeypatch):
    import parallel3d.models.gpt.spec as spec

    stated = spec.layers

    def forgotten(config):
        *layers, head = stated(config)
        lacks = (*head.params[:-1], replace(head.params[-1], role=None))
        return [*layers, replace(head, params=lacks, tied=())]

    monkeypatch.setattr(spec, "layers", forgotten)
    models.layers(model("gpt"))
    with pytest.raises(Problems, match=r"the family declares none for head\.output\.weight"):
        models.layers(model("gpt", MUP))
