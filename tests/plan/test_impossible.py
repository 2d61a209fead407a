"""Sizes that cannot be are refused at once; what could run is not."""

import time

import pytest

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import CONFIGS
from parallel3d.config import RunConfig
from parallel3d.plan.impossible import MOST_BYTES, refuse_impossible

pytestmark = pytest.mark.pure


def config(*settings: str, name: str = "ds.json") -> RunConfig:
    return RunConfig.from_json(str(CONFIGS / name), settings)


def is_possible(run: RunConfig, ranks: int, **room: int) -> bool:
    try:
        refuse_impossible(run, ranks, **room)
    except ConfigError:
        return False
    return True


MODEL = "--parallel3d.model."
LONG = [
    f"--parallel3d.{name}=10000000000000"
    for name in ("data.sequence_length", "model.max_position_embeddings")
]
HUGE = [
    ((f"{MODEL}vocab_size", "1000000000000"), "parallel3d.model: its 128,000,000,809,728"),
    ((f"{MODEL}hidden_size", "4000000"), "parameters need at least"),
    ((f"{MODEL}intermediate_size", "100000000000"), "parallel3d.model: its"),
    ((f"{MODEL}num_hidden_layers", "1000000000"), "is above the limit of 2,000 layers; use 2,000"),
    ((f"{MODEL}num_hidden_layers", "1" + 30 * "0"), "is above the limit of 2,000 layers"),
    (
        ("--gradient_accumulation_steps", "1000000000000"),
        "above the limit of 1,000,000 microbatches",
    ),
    (
        ("--train_micro_batch_size_per_gpu", "1000000000000"),
        "above the limit of 10,000,000 samples",
    ),
    (LONG, "sequence_length: 10,000,000,000,000 tokens need at least"),
]


@pytest.mark.parametrize(("settings", "words"), HUGE)
def test_impossible_sizes_are_refused_quickly(settings, words):
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        refuse_impossible(config(*settings), 4)
    assert words in str(caught.value) and "; " in str(caught.value)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("heads", ["1000000007", "999999999989"])
def test_search_for_divisors_ends(heads):
    start = time.process_time()
    with pytest.raises(ConfigError, match="does not divide hidden_size"):
        config(f"{MODEL}num_attention_heads", heads, f"{MODEL}hidden_size", "1000000000000")
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.json")))
def test_shipped_configs_are_possible_on_one_rank(name):
    assert is_possible(config(name=name), 1)


def test_bound_is_the_least_memory_of_the_ranks():
    """ZeRO-1 on one pipeline rank: fp32 weights whole, Adam's 12 bytes over dp."""
    cut = config("--zero_optimization.stage", "1", "--parallel3d.mesh.dp", "4")
    params = models.num_params(cut.model.model_copy(update={"vocab_size": cut.data.vocab_size}))
    seq = cut.data.sequence_length
    hidden = cut.model.hidden_size
    samples = cut.train_micro_batch_size_per_gpu or 1
    needed = 4 * params + 12 * params // 4 + samples * seq * (16 + 4 * hidden)
    assert is_possible(cut, 4, room=needed)
    with pytest.raises(ConfigError, match=r"for each of 4 ranks, but a rank has at most"):
        refuse_impossible(cut, 4, room=needed - 1)
    assert needed < MOST_BYTES


def test_states_on_nvme_need_no_memory():
    sizes = (f"{MODEL}hidden_size", "4194304", "--zero_optimization.stage", "3")
    places = ("offload_optimizer", "offload_param")
    to_disk = [
        word
        for place in places
        for key, value in (("device", "nvme"), ("nvme_path", "/tmp"))
        for word in (f"--zero_optimization.{place}.{key}", value)
    ]
    assert not is_possible(config(*sizes), 1)
    assert is_possible(config(*sizes, *to_disk), 1)
