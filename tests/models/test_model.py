"""The spec of every family against the modules that its blocks build."""

from functools import lru_cache

import pytest
import torch

from parallel3d import models
from parallel3d.model.spec import Shape, named_params
from tests.models.families import ALL, EVERY_FAMILY, build, computed, on_ranks, part, small

pytestmark = pytest.mark.gloo

SHAPE = Shape(2, 16)
GROUPED = {
    "llama, grouped": small("llama", num_key_value_heads=2, qk_norm=True),
    "gpt, dropout": small("gpt", embd_pdrop=0.1, resid_pdrop=0.2, attn_pdrop=0.3),
}
CONFIGS = EVERY_FAMILY | GROUPED
# All switches at once have what each has; one by one they are behind `slow`.
ONE_BY_ONE = {n for n in EVERY_FAMILY if "=" in n}
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n in ONE_BY_ONE else n for n in CONFIGS]


def described(config):
    """What is held at each tp, and the text of the last one's modules."""
    described = []
    text = ""
    for tp in (1, 2, 4):
        built, _ = build(config, tp)
        held = [(h.name, h.cut, tuple(h.parameter.shape), h.counts) for h in built.held]
        described.append((held, sum(p.numel() for p in built.module.parameters())))
        text = str(built.module)
    return described, text


@pytest.mark.parametrize("name", NAMES)
def test_spec_describes_the_built_module(name):
    config = CONFIGS[name]
    specs = named_params(models.layers(config))
    ranks = [results["described"] for results in results_of(name)]
    for tp, results in zip((1, 2, 4), zip(*ranks, strict=True), strict=True):
        sizes = {"tensor": tp}
        for held, unique in results:
            assert [key for key, *_ in held] == list(specs)
            for key, cut, shape, _ in held:
                cuts = {p.dim: p.role for p in cut.parts}
                assert (cut.global_shape, cuts) == (specs[key].shape, specs[key].cuts(sizes))
                assert shape == cut.local_shape
            assert unique == sum(torch.Size(shape).numel() for _, _, shape, _ in held)
        # Over the tp group each element is counted once, and the parts make up the whole.
        group = [held for held, _ in results[:tp]]
        counted = sum(torch.Size(s).numel() for held in group for _, _, s, counts in held if counts)
        assert counted == models.num_params(config)
        for key, spec in specs.items():
            cuts = [cut for held in group for name, cut, *_ in held if name == key]
            for dim in (dim for dim, role in spec.cuts(sizes).items() if role == "tensor"):
                bounds = [cut.bounds[dim] for cut in cuts]
                assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
                assert bounds[-1][1] == spec.shape[dim]
                unit = spec.shape[dim] // (spec.units or 1)
                assert spec.units is None or all(start % unit == 0 for start, _ in bounds)


def on_every_mesh(config):
    """Loss and gradients at tp = 1, then the same on more ranks, all on this rank.

    The other way of each: test_transformers.py, where transformers has the family's like.
    """
    return [computed(config, *case) for case in ((1, False), (2, False), (4, True))]


UNKNOWN_ELSEWHERE = [
    n for n, c in EVERY_FAMILY.items() if ALL in n or models.huggingface(c.family) is None
]


@pytest.mark.parametrize("name", UNKNOWN_ELSEWHERE)
def test_tensor_parallel_gradients_equal_those_of_one_rank(name):
    """For what test_transformers.py cannot compare: no class of transformers is like it."""
    for results in results_of(name):
        one, *others = results["computed"]
        loss, _, gradients = one
        whole = {key: value for key, _, value in gradients}
        for our_loss, _, ours in others:
            assert our_loss == pytest.approx(loss, rel=1e-5)
            for key, cut, value in ours:
                error = (value - part(whole[key], cut)).abs().max() / whole[key].abs().max()
                assert error < 1e-5, f"{key}: {error:.1e}"


def results_of(name):
    """What each rank finds of a config."""
    return of_all(name in ONE_BY_ONE)[name]


@lru_cache
def of_all(one_by_one):
    """Name -> what each rank finds of it: all that is asked in one start of ranks."""
    jobs = {name: (name, c) for name, c in CONFIGS.items() if (name in ONE_BY_ONE) == one_by_one}
    return dict(zip(jobs, on_ranks(studied, [*jobs.values()]), strict=True))


def studied(name, config):
    held, text = described(config)
    return {
        "described": held,
        "computed": on_every_mesh(config) if name in UNKNOWN_ELSEWHERE else [],
        "printed": text,
    }


PRINTED = {
    "gpt": (
        "(qkv): ColumnParallelLinear(weight (3, 8, 32) of (3, 32, 32), bias (3, 8) of (3, 32))",
        "(output): RowParallelLinear(weight (32, 8) of (32, 32), bias (32,) of (32,))",
        "(up): ColumnParallelLinear(weight (32, 32) of (128, 32), bias (32,) of (128,))",
        "(token): VocabParallelEmbedding(weight (15, 32) of (61, 32))",
        "(norm1): LayerNorm(weight (32,) of (32,), bias (32,) of (32,))",
        "(dropout): Dropout(p=0.0, split)",
        "(dropout1): Dropout(p=0.0, replicated)",
        "(position): Table(weight (64, 32) of (64, 32))",
        "(output): VocabParallelOutput(weight (15, 32) of (61, 32))",
    ),
    "gpt, dropout": (
        "(dropout): Dropout(p=0.1, replicated)",
        "(dropout1): Dropout(p=0.2, replicated)",
        "(dropout2): Dropout(p=0.2, replicated)",
        "(dropout): Dropout(p=0.3, split)",
    ),
    "llama, grouped": (
        "(qkv): GroupedColumnLinear(q_weight (8, 32) of (32, 32), k_weight (16, 32) of (16, 32), ",
        "(q_norm): RMSNorm(weight (8,) of (8,))",
        "(gate_up): ColumnParallelLinear(weight (2, 64, 32) of (2, 256, 32))",
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_printed_layer_shows_its_cut(name):
    text = results_of(name)[0]["printed"]
    for line in PRINTED[name]:
        assert line in text, f"{line} is not in\n{text}"
