"""Every family against plain transformers with the same weights: logits, loss, gradients.

Transformers knows no mesh: its numbers are one process's, and ours must be them on every tp, with
and without sequence parallelism, with documents that share a sample and without. Both are in fp32.
"""

from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F

from parallel3d import models
from parallel3d.models.llama.spec import RopeScaling
from parallel3d.tensor.segments import Segments
from parallel3d.verify.reference import in_our_names, isolation
from tests.models.families import (
    ALL,
    EVERY_FAMILY,
    WORLD,
    WRITTEN,
    Logits,
    batch_of,
    build,
    computed,
    on_ranks,
    part,
    small,
    weights_of,
)

pytestmark = pytest.mark.gloo

TOLERANCE = 1e-5
SEQ = 48
# Of a head of 8 features' four frequencies one is kept, one blended, two are slowed.
SCALING = RopeScaling(
    factor=4.0, low_freq_factor=0.1, high_freq_factor=1.0, original_max_position_embeddings=16
)
# Of a head of 16 features' eight frequencies two stay, and two are blended.
YARN = RopeScaling(
    rope_type="yarn",
    factor=4.0,
    beta_fast=2.0,
    beta_slow=0.1,
    attention_factor=0.9,
    original_max_position_embeddings=64,
)
OUTPUT = {"attention_bias": True, "attention_output_bias": True}
BIASES = OUTPUT | {"mlp_bias": True}
ALTERNATING = {"sliding_window": 7, "layer_types": ("full_attention", "sliding_attention")}
# The variants of llama below turn its switches, and more.
VARIANTS = {n: c for n, c in EVERY_FAMILY.items() if ALL not in n and not n.startswith("llama ")}
VARIANTS |= {
    "grouped, tied": small("llama", num_key_value_heads=2, tie_word_embeddings=True),
    "llama3 scaling": small("llama", num_key_value_heads=2, rope_scaling=SCALING),
    "linear scaling": small("llama", rope_scaling=RopeScaling(rope_type="linear", factor=4.0)),
    "Qwen3, biases, yarn": small("llama", head_dim=16, rope_scaling=YARN, qk_norm=True, **OUTPUT),
    "biases": small("llama", num_key_value_heads=2, **BIASES),
    "Qwen2, one kv head": small("llama", num_key_value_heads=1, attention_bias=True),
    "Qwen3, wide heads": small("llama", num_key_value_heads=2, head_dim=16, qk_norm=True),
    "Mixtral": small("moe", num_key_value_heads=2, norm_topk_prob=True),
    "Qwen3-MoE": small(
        "moe",
        num_key_value_heads=2,
        qk_norm=True,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        **OUTPUT,
    ),
    "OLMoE": small("moe", qk_norm=True, qk_norm_over="width", norm_topk_prob=False),
    "Mistral, window": small("llama", num_key_value_heads=2, sliding_window=2),
    "Ministral, layers alternate": small("llama", **ALTERNATING),
    "Qwen2, windows": small("llama", num_key_value_heads=2, attention_bias=True, **ALTERNATING),
    "Qwen3, windows": small("llama", head_dim=16, qk_norm=True, sliding_window=SEQ - 1),
}
LENGTHS = ([5, 11, 1, 31], [40, 8])  # tokens of each document in two samples
DOCUMENTS = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in LENGTHS])


def reference_of(config):
    """The same model by transformers; None where its family names none or it has no such class."""
    theirs = models.huggingface(config.family)
    if theirs is None:
        return None
    try:
        model = theirs.reference(config)
    except ValueError:
        return None
    weights = theirs.to_huggingface(config, weights_of(config))
    named = dict(model.named_parameters())
    assert named.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(weights[name])
    return model


@lru_cache(maxsize=2)
def expected(config, isolated):
    """Logits, loss and gradients by transformers, which is told of documents in its own way."""
    model = reference_of(config)
    tokens, labels = batch_of(config, SEQ)
    options = isolation(model, DOCUMENTS if isolated else None)
    logits = model(tokens, use_cache=False, **options).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return logits.detach(), loss.item(), in_our_names(config, gradients)


def errors(config, tp, isolated, ranks):
    """The largest errors of logits and loss (absolute), and of each gradient (of its largest)."""
    logits, loss, gradients = expected(config, isolated)
    differences = {}
    for rank, (our_loss, our_logits, ours) in enumerate(ranks):
        start, stop = (config.vocab_size * (rank % tp + i) // tp for i in (0, 1))
        values = {
            "logits": (our_logits - logits[..., start:stop]).abs().max(),
            "loss": abs(our_loss - loss),
        }
        assert {name for name, *_ in ours} == gradients.keys()
        for name, cut, gradient in ours:
            whole = gradients[name]
            values[name] = (gradient - part(whole, cut)).abs().max() / whole.abs().max()
        differences |= {
            name: max(differences.get(name, 0.0), float(v)) for name, v in values.items()
        }
    return differences


# (tp, sequence parallel, documents). Each family has both of the first, and by default its
# variants take turns at them, on two ranks; one has fewer key/value heads. On four, others have.
FEW = ((2, True, DOCUMENTS), (2, True, None))
OTHERS = (
    (4, True, DOCUMENTS),
    (1, False, None),
    (4, False, None),
    (2, False, None),
    (4, True, None),
    (1, False, DOCUMENTS),
)


def few(name):
    if name in WRITTEN:
        return FEW
    turn = [n for n in VARIANTS if n not in WRITTEN].index(name) % 2
    return FEW[turn : turn + 1]


def others(name):
    return *(case for case in FEW if case not in few(name)), *OTHERS


@lru_cache
def of_family(family, cases):
    """Name -> what each rank computes of each case: one start of ranks for a family."""
    jobs = {
        (name, place): (config, *case)
        for name, config in VARIANTS.items()
        if config.family == family and reference_of(config) is not None
        for place, case in enumerate(cases(name))
    }
    results = {name: [] for name, _ in jobs}
    count = 2 if cases is few else WORLD
    of_jobs = on_ranks(computed_here, [*jobs.values()], count)
    for (name, _), ranks in zip(jobs, of_jobs, strict=True):
        results[name].append(ranks)
    return results


def computed_here(config, *case):
    return computed(config, *case, seq=SEQ)


@pytest.mark.parametrize("cases", [few, pytest.param(others, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VARIANTS)
def test_models_equal_transformers(name, cases):
    config = VARIANTS[name]
    if reference_of(config) is None:
        pytest.skip("transformers has no such architecture")
    for (tp, sequence_parallel, documents), ranks in zip(
        cases(name), of_family(config.family, cases)[name], strict=True
    ):
        differences = errors(config, tp, documents is not None, ranks)
        worst = max(differences, key=differences.get)
        case = f"tp={tp} sequence_parallel={sequence_parallel} isolated={documents is not None}"
        largest = differences[worst]
        logits = differences["logits"]
        print(f"{name:40} {case:50} logits {logits:.1e} {worst} {largest:.1e}")
        assert largest < TOLERANCE, f"{case}: {worst} {largest:.1e}"


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_sizes_equal_those_of_transformers(name):
    config = VARIANTS[name]
    model = reference_of(config)
    if model is None:
        pytest.skip("transformers has no such architecture")
    assert model.num_parameters() == models.num_params(config)
    weights = weights_of(config)
    back = in_our_names(config, dict(model.state_dict()))
    assert back.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(back[key], value), key


def test_config_without_a_class_in_transformers_is_refused():
    theirs = models.huggingface("llama")
    with pytest.raises(ValueError, match="attention_bias = true with qk_norm = true"):
        theirs.reference(small("llama", attention_bias=True, qk_norm=True))
    with pytest.raises(ValueError, match="attention_output_bias = true: no class of transformers"):
        theirs.reference(small("llama", attention_output_bias=True))
    with pytest.raises(ValueError, match="num_attention_heads = 5: does not divide hidden_size=32"):
        theirs.reference(small("llama", num_attention_heads=5, head_dim=8))


def moved(config, tp, sequence_parallel):
    """How far each token's logits move when the second document's first token is another."""
    moved = []
    for document in (0, 1):
        built, _ = build(config, tp, SEQ, sequence_parallel)
        logits = Logits(built.module)
        (tokens, labels) = batch_of(config, SEQ)
        built.module(0, tokens, labels, Segments.of(DOCUMENTS))
        before = logits.value
        first = DOCUMENTS.eq(document).int().argmax(-1, keepdim=True)
        other = tokens.scatter(1, first, (tokens.gather(1, first) + 1) % config.vocab_size)
        built.module(0, other, labels, Segments.of(DOCUMENTS))
        moved.append((logits.value - before).abs().amax(-1))
    return moved


@lru_cache
def moved_in_all():
    """Family -> how far each of its tokens moves, for each rank: one start of ranks."""
    jobs = [(small(family), 4, True) for family in WRITTEN]
    return dict(zip(WRITTEN, on_ranks(moved, jobs), strict=True))


@pytest.mark.slow  # by default documents are isolated as by transformers, which is compared above
@pytest.mark.parametrize("family", WRITTEN)
def test_change_of_a_document_affects_no_other(family):
    for per_rank in moved_in_all()[family]:
        for document, change in enumerate(per_rank):
            inside = document == DOCUMENTS
            assert change[~inside].max() == 0  # exactly: not a bit of another document
            assert change[inside].min() > 1e-3  # and every token that follows sees it
