"""First weights that are read from transformers' code, compared with those that it draws itself."""

from math import prod

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.granite.modeling_granite import GraniteForCausalLM

from parallel3d.base.errors import ConfigError
from parallel3d.model.spec import Init, ParamSpec
from parallel3d.models.transformers import initial_values
from parallel3d.models.transformers.initial_values import recorded
from parallel3d.tensor.cut import Cut
from parallel3d.tensor.initialise import fill

pytestmark = pytest.mark.gloo

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 120,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "bloom": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gemma2": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "mixtral": EXPERTS,
    "deepseek_v3": EXPERTS
    | {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "num_key_value_heads": 4,
    },
    "smollm3": {},
    "nanochat": {},
    "gpt_oss": EXPERTS | {"head_dim": 16},
    "granite": {},
    "phi": {},
    "apertus": {},
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "modernbert-decoder": {"hidden_activation": "gelu"},
    "mamba": {"state_size": 8},
    "kimi_linear": EXPERTS | {"linear_head_dim": 16, "linear_num_heads": 4},
}
# Each kind of value: scaled by depth, zeroed rows, ranges, bounds, tables, experts, biases.
DEFAULT = {"gpt2", "jamba", "modernbert-decoder", "mamba", "kimi_linear", "gemma2", "gpt_oss"}
KINDS = [
    pytest.param(kind, marks=() if kind in DEFAULT else pytest.mark.slow) for kind in ARCHITECTURES
]


@pytest.fixture(autouse=True)
def silent():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def config_of(kind):
    return AutoConfig.for_model(kind, **SIZES | ARCHITECTURES[kind])


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def drawn_by_transformers(config, seed):
    """Weights by name, also by the names of tied copies."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    pairs = model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach().float() for name, parameter in pairs}


def drawn_here(init, shape, name):
    out = torch.empty(prod(shape))
    fill(out, 0, ParamSpec(name, tuple(shape), (), init, False), name, Cut(tuple(shape)), 0)
    return out.view(shape)


def assert_same_distribution(name, here, there):
    """Compare mean and deviation, within six deviations of their estimates, and quantiles."""
    from scipy.stats import ks_2samp  # at the top each worker would load it, too

    count = there.numel()
    std = float(there.std())
    assert abs(float(here.mean() - there.mean())) < 6 * std * (2 / count) ** 0.5, name
    assert abs(float(here.std()) / std - 1) < 6 / count**0.5, name
    assert ks_2samp(here.flatten().numpy(), there.flatten().numpy()).pvalue > 1e-6, name


@pytest.mark.parametrize(
    "large",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["without memory", "with memory"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_values_are_those_that_transformers_draws(kind, large, monkeypatch):
    """Also of parameters as large ones are treated, which have no memory."""
    if large:
        monkeypatch.setattr(initial_values, "SMALL", 1100)
    config = config_of(kind)
    inits = recorded(on_meta(config))
    there = drawn_by_transformers(config, 1)
    again = drawn_by_transformers(config, 2)
    assert inits.keys() == there.keys()
    for name, weights in there.items():
        here = drawn_here(inits[name], weights.shape, name)
        if torch.equal(weights, again[name]):  # nothing is random
            assert torch.equal(here, weights), name
            continue
        if weights.dim() == 2:
            zeros = (weights == 0).all(1)
            assert torch.equal((here == 0).all(1), zeros), name
            here = here[~zeros]
            weights = weights[~zeros]
        assert_same_distribution(name, here, weights)
        if inits[name].bounds is not None:
            low, high = inits[name].bounds
            assert low <= weights.min(), name
            assert weights.max() <= high, name


def test_architectures_have_the_kinds_of_values():
    """The cases above would prove less if none had them."""
    kinds = {}
    for kind in ("gpt2", "jamba", "modernbert-decoder", "mamba", "kimi_linear"):
        kinds[kind] = list(recorded(on_meta(config_of(kind))).values())
    assert Init(std=0.02 / 2) in kinds["gpt2"]
    assert any(init.zero_row == SIZES["pad_token_id"] for init in kinds["jamba"])
    assert any(len(init.values) == 16 for init in kinds["jamba"])
    assert any(init.bounds and init.std for init in kinds["modernbert-decoder"])
    assert any(init.bounds and not init.std for init in kinds["mamba"])
    assert any(init.values for init in kinds["kimi_linear"])


def test_large_model_is_recorded_without_memory():
    sizes = {
        "hidden_size": 8192,
        "num_hidden_layers": 20,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    }
    model = on_meta(AutoConfig.for_model("llama", **sizes))
    assert set(recorded(model).values()) == {Init(std=0.02), Init(value=1.0)}
    assert all(parameter.is_meta for parameter in model.parameters())


def test_recording_leaves_torchs_random_numbers_alone():
    model = on_meta(config_of("kimi_linear"))
    before = torch.get_rng_state()
    first = recorded(model)
    torch.rand(3)
    assert recorded(model) == first
    torch.set_rng_state(before)
    recorded(model)
    assert torch.equal(torch.get_rng_state(), before)


class Unusual(nn.Module):
    """Parameters that are written in other ways than with one draw."""

    def __init__(self):
        super().__init__()
        self.forgotten = nn.Parameter(torch.empty(3))
        self.by_parts = nn.Parameter(torch.empty(40, 40))
        self.shifted = nn.Parameter(torch.empty(40, 40))
        self.small = nn.Parameter(torch.empty(4))
        self.scaled = nn.Parameter(torch.empty(40, 40))
        self.product = nn.Parameter(torch.randn(40, 40) * 0.5)
        self.built = nn.Parameter(torch.full((40, 40), 3.0))


class UnusualModel(GraniteForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.extra = Unusual()
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Unusual):
            nn.init.ones_(module.by_parts[1:3])
            nn.init.normal_(module.shifted)
            module.shifted += 1
            nn.init.ones_(module.small)
            module.small += 1
            nn.init.normal_(module.scaled, std=0.5)
            module.scaled /= 2.0


class WithoutForgotten(UnusualModel):
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Unusual):
            nn.init.zeros_(module.forgotten)
            nn.init.zeros_(module.by_parts)
            nn.init.zeros_(module.shifted)


def test_parameter_without_known_values_is_named(monkeypatch):
    monkeypatch.setattr(initial_values, "SMALL", 1000)
    config = config_of("granite")
    with torch.device("meta"):
        odd = UnusualModel(config)
        mended = WithoutForgotten(config)
    with pytest.raises(ConfigError) as refused:
        recorded(odd)
    _, *problems = str(refused.value).splitlines()
    assert [line.split(": ")[0].strip() for line in problems] == [
        "extra.forgotten",
        "extra.by_parts",
        "extra.shifted",
    ]
    assert "nobody initialises it" in problems[0]
    assert "a part" in problems[1]
    assert "computed" in problems[2]
    inits = recorded(mended)
    assert inits["extra.small"] == Init(value=2.0)
    assert inits["extra.scaled"] == Init(std=0.25)
    assert inits["extra.product"] == Init(std=0.5)
    assert inits["extra.built"] == Init(value=3.0)


REFUSED = {"marian", "pegasus", "roformer", "rwkv"}
"""Tables of sines of a real model's length, and orthogonal matrices."""


def build_small(kind):
    """A model of a kind on the meta device, with the sizes that its config accepts."""
    for sizes in ({"num_hidden_layers": 2}, {}, SIZES):
        try:
            return on_meta(AutoConfig.for_model(kind, **sizes))
        except Exception as error:  # an architecture's own demands on its config
            reason = f"{kind} is not built: {str(error).splitlines()[:1]}"
    print(reason)
    return None


@pytest.mark.slow
def test_every_architecture_is_recorded_or_refused_with_reasons():
    outcomes = {}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        model = build_small(kind)
        if model is None:
            continue
        try:
            recorded(model)
            outcomes[kind] = ""
        except ConfigError as error:
            outcomes[kind] = str(error)
            print(error)
    assert len(outcomes) > 170
    assert {kind for kind, reason in outcomes.items() if reason} == REFUSED
