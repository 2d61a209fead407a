"""The gpt family: its spec against the built modules, its numbers against other people's code."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import layers
from models.gpt.spec import num_params
from parallel3d.mesh import Mesh
from parallel3d.model import Shape
from parallel3d.pipeline.schedules import make_schedule
from parallel3d.pipeline.stages import build_stages
from tests import reference
from tests.gloo.parity import Case, config_of, settings_of, whole_weights
from tests.ranks import run_ranks

SHAPE = Shape(3, 16)


def build(tp, tied, **model):
    """The whole model on a mesh whose other ranks are replicas, and its config."""
    case = Case(zero_stage=1, tied=tied, model=model)
    config = config_of(case)
    mesh = Mesh(1, 2 // tp, tp)
    schedule = make_schedule("gpipe", 1, 1)
    return build_stages(layers(config), schedule, settings_of(case), mesh, SHAPE), config, mesh


def part(whole, cut):
    return whole if cut.dim is None else whole.narrow(cut.dim, cut.start, cut.stop - cut.start)


def batch(config):
    text = torch.randint(config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(2))
    return text[:, :-1], text[:, 1:]


def described(rank, tp, tied):
    built, _, mesh = build(tp, tied)
    held = [(h.name, h.cut, tuple(h.parameter.shape), h.counts) for h in built.held]
    unique = sum(p.numel() for p in built.module.parameters())
    mesh.barrier()
    return held, unique, str(built.module)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("tp", [1, 2])
def test_spec_describes_the_built_module(tp, tied):
    config = config_of(Case(tied=tied))
    specs = {f"{layer.name}.{p.name}": p for layer in layers(config) for p in layer.params}
    if tied:
        del specs["head.output.weight"]
    results = run_ranks(described, 2, tp, tied, timeout=60)
    for held, unique, _ in results:
        assert [name for name, *_ in held] == list(specs)
        for name, cut, shape, _ in held:
            assert (cut.global_shape, cut.dim) == (specs[name].shape, specs[name].tp_dim)
            assert shape == cut.local_shape
        assert unique == sum(torch.Size(shape).numel() for _, _, shape, _ in held)
    # Over the tp group each element is counted once, and the parts make up the whole.
    group = results[:tp]
    counted = sum(torch.Size(s).numel() for held, *_ in group for _, _, s, counts in held if counts)
    v, h, n, positions = config.vocab_size, config.hidden_size, config.num_hidden_layers, 16
    closed_form = (v * (1 if tied else 2) + positions) * h + n * (12 * h * h + 13 * h) + 2 * h
    assert counted == num_params(config) == closed_form
    for name, spec in specs.items():
        parts = [cut for held, *_ in group for n, cut, *_ in held if n == name]
        if spec.tp_dim is not None:
            assert [c.start for c in parts] == [0, *(c.stop for c in parts[:-1])]
            assert parts[-1].stop == spec.shape[spec.tp_dim]


def test_a_printed_layer_says_how_it_is_cut():
    text = run_ranks(described, 2, 2, True, timeout=60)[0][2]
    for line in (
        "(qkv): ColumnParallelLinear((3, 32, 32), columns / 2)",
        "(output): RowParallelLinear((32, 32), rows / 2)",
        "(up): ColumnParallelLinear((128, 32), columns / 2)",
        "(token): VocabParallelEmbedding((61, 32), vocabulary / 2)",
        "(norm1): LayerNorm((32,), replicated, eps=1e-05)",
        "(dropout): Dropout(p=0.0, split)",
        "(dropout1): Dropout(p=0.0, replicated)",
        "(position): Table((16, 32), replicated)",
        "(output): Output((61, 32), vocabulary / 2)",
    ):
        assert line in text, f"{line} is not in\n{text}"


def counted_flops(rank, tp):
    """Forward FLOPs of each layer, and of the whole model's forward and backward, on this rank."""
    built, config, _ = build(tp, True)
    tokens, labels = batch(config)
    found, x = {}, tokens
    # Torch counts no FLOPs in its fused attention for the CPU.
    with sdpa_kernel(SDPBackend.MATH):
        modules = built.module.stages["0"]
        for layer, module in zip(layers(config), modules, strict=True):
            with FlopCounterMode(display=False) as counter:
                x = module(x, labels) if layer.name == "head" else module(x)
            found[layer.name] = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            built.module(0, tokens, labels).backward()
    return found, counter.get_total_flops()


@pytest.mark.parametrize("tp", [1, 2])
def test_cost_is_what_torch_counts(tp):
    specs = layers(config_of(Case()))
    group = run_ranks(counted_flops, 2, tp, timeout=60)[:tp]
    for layer in specs:
        assert layer.cost(SHAPE).forward_flops == sum(found[layer.name] for found, _ in group)
    train = sum(layer.cost(SHAPE).train_flops for layer in specs)
    assert train == sum(total for _, total in group)
    assert train == 3 * sum(sum(found.values()) for found, _ in group)


def loss_and_gradients(rank, tp, tied):
    built, config, mesh = build(tp, tied)
    loss = built.module(0, *batch(config))
    loss.backward()
    mesh.barrier()
    return loss.item(), [(h.name, h.cut, h.parameter.grad) for h in built.held]


def check(tp, tied, loss, gradients):
    """Ours against whole numbers from elsewhere, relative to the largest of each gradient."""
    for our_loss, ours in run_ranks(loss_and_gradients, 2, tp, tied, timeout=60):
        assert our_loss == pytest.approx(loss, rel=1e-5)
        assert {name for name, *_ in ours} == gradients.keys()
        for name, cut, gradient in ours:
            whole = gradients[name]
            error = (gradient - part(whole, cut)).abs().max() / whole.abs().max()
            # A key's bias moves no softmax: its gradient is zero but for rounding.
            assert error < 1e-5, f"{name}: {error:.1e}"


def from_reference(tied):
    config = config_of(Case(tied=tied))
    weights = {k: v.requires_grad_() for k, v in whole_weights(config).items()}
    loss = reference.forward(weights, config, *batch(config))
    loss.backward()
    return loss.item(), {name: w.grad for name, w in weights.items()}


def from_transformers(tied):
    """The same by Hugging Face's GPT-2, whose linear weights are [in, out]."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = config_of(Case(tied=tied))
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size, n_positions=16, n_embd=32, n_layer=3, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    )  # fmt: skip
    theirs = dict(model.named_parameters())
    weights = whole_weights(config)
    assert len(theirs) == len(weights)
    with torch.no_grad():
        for name, value in weights.items():
            theirs[their_name(name)].copy_(to_theirs(name, value))
    tokens, labels = batch(config)
    loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item(), {n: to_ours(n, theirs[their_name(n)].grad, w) for n, w in weights.items()}


THEIRS = {
    "embedding.token": "transformer.wte",
    "embedding.position": "transformer.wpe",
    "head.norm": "transformer.ln_f",
    "head.output": "lm_head",
    "blocks": "transformer.h",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def their_name(name):
    for ours, theirs in THEIRS.items():
        name = name.replace(ours, theirs)
    return name


def is_linear(name):
    return name.endswith("weight") and ("attention" in name or "mlp" in name)


def to_theirs(name, value):
    value = value.flatten(0, -2) if is_linear(name) else value
    return value.T if is_linear(name) else value.flatten() if "qkv" in name else value


def to_ours(name, gradient, like):
    return (gradient.T if is_linear(name) else gradient).reshape(like.shape)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("source", [from_reference, from_transformers])
def test_loss_and_gradients(source, tied):
    loss, gradients = source(tied)
    for tp in (1, 2):
        check(tp, tied, loss, gradients)
