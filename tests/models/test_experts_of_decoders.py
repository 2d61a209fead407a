"""Experts of transformers' packed form: divided over ranks, and the losses of their routers."""

import pytest
import torch
from pydantic import ValidationError

from parallel3d import models
from parallel3d.base.section import Problems
from parallel3d.model.recompute import FULL
from parallel3d.models.transformers import huggingface
from parallel3d.models.transformers.anatomy import settings_of, skeleton_of
from parallel3d.verify.measure import TOLERANCE
from tests.models.architectures import LAYERS, small_config
from tests.models.every_decoder import without_measuring
from tests.models.families import batch_of, build, on_ranks, part, weights_of
from tests.models.test_decoder_features import case_of, errors_on_ranks

pytestmark = pytest.mark.gloo
COEFFICIENT = 0.1
# Routers that choose by a bias (minimax_m2), experts with biases in a transposed form (gpt_oss),
# layers without experts between those with them (jamba), shared experts (qwen2_moe).
BALANCED = {
    "mixtral": 2,
    "qwen2_moe": 2,
    "gpt_oss": 1,
    "olmoe": 2,
    "qwen3_moe": 2,
    "granitemoe": 2,
    "minimax_m2": 2,
    "jamba": 2,
}
DEFAULT = ["mixtral", "gpt_oss"]


def config_of(kind, fields=None, layers=LAYERS, **settings):
    """A small model of an architecture."""
    own = small_config(kind, 0.2, layers) | (fields or {})
    section = {"family": "transformers", "config": own, "vocab_size": 96} | settings
    return models.config_class("transformers").model_validate(section)


BALANCE = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}


def balanced(kind, layers=LAYERS):
    """A model that adds its balance loss."""
    return config_of(kind, BALANCE, layers)


def computed(config, tp):
    """The loss with side losses, and each rank's gradients as (name, cut, value), summed."""
    with without_measuring():
        built, mesh = build(config, tp, sequence_parallel=tp > 1, activation_checkpointing=FULL)
    loss, side = built.module(0, *batch_of(config))
    (loss + side.total).backward()
    gradients = []
    for h in built.held:
        if h.spec.role == "balance":
            continue
        if h.partial:
            torch.distributed.all_reduce(h.parameter.grad, group=mesh.tensor.group)
        gradients.append((h.name, h.cut, h.parameter.grad))
    return loss.item() + side.total.item(), gradients


def whole(config):
    """The loss of the whole model, its balance loss included, and its gradients by our names."""
    model = huggingface.reference(config).double().train()
    weights = huggingface.to_huggingface(config, weights_of(config))
    model.load_state_dict(weights, strict=False)
    tokens, labels = batch_of(config)
    output = model(tokens)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    loss = loss + COEFFICIENT * output.aux_loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss.item(), gradients


def in_our_order(config, name, shape, gradients):
    """A gradient of transformers' in the order of our parameter, which may be another one."""
    numbers = torch.arange(shape.numel()).view(shape)
    ((own, order),) = huggingface.to_huggingface(config, {name: numbers}).items()
    gradient = torch.empty(shape.numel(), dtype=torch.float64)
    gradient[order.flatten()] = gradients[own].flatten()
    return gradient.view(shape)


def worst_errors(kinds, layers=LAYERS):
    """The largest relative error of loss and gradients by architecture."""
    configs = {kind: balanced(kind, layers) for kind in kinds}
    jobs = [(configs[kind], BALANCED[kind]) for kind in kinds]
    for kind, ranks in zip(kinds, on_ranks(computed, jobs, 2), strict=True):
        expected, gradients = whole(configs[kind])
        shapes = {n: w.shape for n, w in weights_of(configs[kind]).items()}
        worst = 0.0
        for loss, own in ranks:
            worst = max(worst, abs(loss - expected) / expected)
            for name, cut, value in own:
                theirs = in_our_order(configs[kind], name, shapes[name], gradients)
                off = (value - part(theirs, cut)).abs().max() / theirs.abs().max()
                worst = max(worst, off.item())
        yield kind, worst


def test_balance_loss_is_that_of_transformers():
    for kind, error in worst_errors(DEFAULT, layers=2):
        assert error < 2e-5, (kind, error)  # each tensor's own gradient, in fp32 at std 0.2


@pytest.mark.slow
def test_balance_loss_of_every_form_is_that_of_transformers():
    # Jamba's recurrence in fp32 is off by 1.4e-5.
    for kind, error in worst_errors(sorted(BALANCED.keys() - DEFAULT)):
        assert error < (3e-5 if kind == "jamba" else 1e-5), (kind, error)


EP = {"parallel3d.mesh.ep": 2}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003, "eps": 1e-6}}}
TWO_LAYERS = {"num_hidden_layers": 2}
NARROW = {"initializer_range": 0.02}  # with wide weights fp32 alone is off by 1.6e-5
# Meshes are pp x dp x tp; that of the default test has 2 ranks, and all others have 4.
DIVIDED = [
    (
        "qwen3_moe",
        {"mesh": (1, 2, 1), "changes": EP, "batch": 4, "microbatches": 1, "own": TWO_LAYERS},
    ),
    ("qwen3_moe", {"mesh": (1, 2, 2), "sequence_parallel": True, "changes": EP}),
    ("gpt_oss", {"mesh": (1, 4, 1), "changes": {"parallel3d.mesh.ep": 4}, "own": NARROW}),
    ("deepseek_v3", {"mesh": (1, 2, 2), "changes": EP | MUON, "zero_stage": 1}),
    ("nemotron_h", {"mesh": (2, 2, 1), "changes": EP, "zero_stage": 2}),
    ("mixtral", {"mesh": (2, 2, 1), "changes": EP, "schedule": "zero_bubble"}),
    ("qwen2_moe", {"mesh": (1, 2, 2), "changes": EP, "checkpointing": "full", "offload": "cpu"}),
    ("olmoe", {"mesh": (1, 4, 1), "changes": EP, "checkpointing": ["core_attn"]}),
    ("llama4_text", {"mesh": (1, 2, 2), "sequence_parallel": True, "changes": EP}),
    ("llama4_text", {"mesh": (2, 2, 1), "changes": EP, "precision": "bf16", "own": NARROW}),
]


def check_divided(runs):
    cases = [case_of(kind, **settings) for kind, settings in runs]
    all_errors = errors_on_ranks(cases, ["none"] * len(cases))
    for case, (kind, _), errors in zip(cases, runs, all_errors, strict=True):
        assert errors.within(TOLERANCE[case.precision]), (kind, str(case), errors)


def test_divided_experts_are_equal_to_one_process():
    check_divided(DIVIDED[:1])


@pytest.mark.slow
def test_divided_experts_of_every_form_are_equal_to_one_process():
    check_divided(DIVIDED[1:])


def test_biases_of_scores_move_with_the_loads():
    """Each router counts its tokens, which the engine moves its bias by (its own tests)."""
    config = config_of("deepseek_v3", layers=2, score_bias_rate=0.01)
    (ranks,) = on_ranks(counted, [(config,)], 2)
    for rates, counts in ranks:
        assert rates == [0.01]
        assert counts == [2 * 16 * 2]  # two choices of each token, in the sparse layer


def counted(config):
    with without_measuring():
        built, _ = build(config, 2, sequence_parallel=True)
    built.module(0, *batch_of(config))
    routers = [m for m in built.module.modules() if hasattr(m, "bias_rate")]
    return [m.bias_rate for m in routers], [int(m.counts.sum()) for m in routers]


def test_facts_of_experts():
    alternate = {"decoder_sparse_step": 2}
    config = config_of("qwen3_moe", alternate)
    assert config.num_experts == 4
    sparse = [layer for layer in models.layers(config) if layer.num_experts]
    assert [layer.name for layer in sparse] == ["blocks.1", "blocks.3"]
    assert {layer.rows_per_token for layer in sparse} == {2}
    experts = [p for p in sparse[0].params if "experts" in p.cut_over]
    assert [p.name.rpartition(".")[2] for p in experts] == ["gate_up_proj", "down_proj"]
    assert config_of("llama").num_experts == 0
    _, dense, with_experts, *_ = models.layers(config_of("qwen3_moe", alternate | BALANCE))
    assert (dense.side_losses, with_experts.side_losses) == ((), ("balance",))


def test_export_keeps_the_switch_of_the_balance_loss():
    config = balanced("mixtral")
    assert skeleton_of(config).balance == COEFFICIENT
    assert not skeleton_of(config).settings.output_router_logits
    assert settings_of(config.json_of_model).output_router_logits


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {"router_z_loss_coef": 0.1}, "router_z_loss_coef = 0.1: needs the scores"),
        ("mixtral", {"score_bias_rate": 0.1}, "score_bias_rate = 0.1: moves biases"),
    ],
)
def test_losses_without_their_parts_are_refused(kind, settings, message):
    with pytest.raises(ValidationError, match=message):
        config_of(kind, **settings)


def test_balance_loss_of_another_form_is_refused(monkeypatch):
    module = "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func"
    monkeypatch.setattr(module, lambda *_: torch.tensor(0.5))
    with pytest.raises(
        ValidationError, match=r"output_router_logits = true: .*another form.*false"
    ):
        config_of("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.7})


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(Problems, match=r"mesh\.ep = 2: divides experts.*has none"):
        _ = case_of("llama", mesh=(1, 2, 1), changes=EP).config
    with pytest.raises(Problems, match=r"mesh\.ep = 3: does not divide num_experts=4"):
        _ = case_of("mixtral", mesh=(1, 4, 1), changes={"parallel3d.mesh.ep": 3}).config
    own = {"output_router_logits": True}
    with pytest.raises(Problems, match=r"router_aux_loss = \"pooled\".*2 stages"):
        _ = case_of("mixtral", own, mesh=(2, 1, 1)).config
