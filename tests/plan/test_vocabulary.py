"""The vocabulary of a plan whose config leaves it to the tokenizer, and what a search says."""

import json
from functools import partial

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig, hardware
from parallel3d.plan.report.plan_table import nothing_fits
from parallel3d.plan.request import request_of
from parallel3d.plan.search.best_first import search
from parallel3d.plan.vocabulary import with_vocabulary
from tests.config.configs import raw

pytestmark = pytest.mark.pure


def config_of(tokenizer, **changes):
    return RunConfig.from_dict(raw(**{"parallel3d.data.tokenizer": str(tokenizer)} | changes))


@pytest.mark.parametrize(
    ("content", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}, 2),
        ({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 1}, {"id": 2}]}, 3),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}}, 3),
    ],
    ids=["plain", "added", "unigram"],
)
def test_tokenizer_in_a_folder_is_counted(tmp_path, content, size):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = with_vocabulary(config_of(tmp_path))
    assert config.model.vocab_size == size
    assert f"auto = {size}, counted in {tmp_path}/tokenizer.json" in config.notes[-1]


def test_tokenizer_with_more_tokens_than_the_model_is_refused_in_a_plan(tmp_path):
    """As the run does; a tokenizer that is not here is left to it."""
    content = {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    small = {"parallel3d.model.vocab_size": 2}
    with pytest.raises(ConfigError, match=r"vocab_size = 2: is smaller than the tokenizer's 3"):
        with_vocabulary(config_of(tmp_path, **small))
    assert with_vocabulary(config_of("my/tokenizer", **small)).model.vocab_size == 2
    fitting = {"parallel3d.model.vocab_size": 3}
    assert with_vocabulary(config_of(tmp_path, **fitting)).model.vocab_size == 3


@pytest.mark.parametrize(
    ("tokenizer", "size", "whose"),
    [
        ("openai-community/gpt2", 50257, "gpt2"),
        ("meta-llama/Llama-3.1-8B", 128256, "llama-3"),
        ("my/tokenizer", 50257, "family gpt"),
        ("no/such/folder", 50257, "family gpt"),
    ],
)
def test_published_size_is_planned_with_and_said(tokenizer, size, whose):
    config = with_vocabulary(config_of(tokenizer), may_guess=True)
    assert config.model.vocab_size == size
    assert f"as published for {whose}" in config.notes[-1]


def test_unreadable_tokenizer_is_refused_by_default(tmp_path):
    (tmp_path / "tokenizer.json").write_text("[1, 2]")
    for tokenizer in (tmp_path, "my/tokenizer"):
        with pytest.raises(ConfigError, match=r"vocab_size = .auto.: depends on tokenizer"):
            with_vocabulary(config_of(tokenizer))


SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("fixed", [SLOW({}), {"pp": 1}, SLOW({"zero_stage": 3}), SLOW({"tp": 1})])
def test_smallest_plan_is_smaller_than_all_rows(fixed):
    """Nor than what a search with fixed choices finds, whose plans it could choose."""
    described = hardware.load("a100-40gb").model_copy(update={"host": None})
    small = described.memory_bytes.model_copy(update={"value": 2.0**29})
    described = described.model_copy(update={"memory_bytes": small})
    wide = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16}
    changes = {"parallel3d.model": {"family": "gpt", "vocab_size": 50304, **wide}}
    changes |= {"train_batch_size": 32, "gradient_accumulation_steps": None}
    changes |= {"parallel3d.mesh": "plan", "bf16": {"enabled": True}}
    config = config_of("train", **changes, train_micro_batch_size_per_gpu=None)
    free = search(request_of(config, described, 2), rows=3)
    held = search(request_of(config, described, 2, fixed), rows=3)
    for ranking in (free, held):
        assert ranking.too_large and not ranking.plans
        least = min(plan.memory.total for plan in ranking.too_large)
        assert free.too_large[0].memory.total <= least
    sentence = nothing_fits(free.too_large[0])
    assert "Offload was not searched, because the hardware file has no" in sentence


def test_fp16_is_as_fast_as_bf16_where_no_source_states_it():
    for name in ("h100", "a100-80gb", "b200"):
        described = hardware.load(name)
        assert described.peak("fp16") == described.peak("bf16")
    assert hardware.load("v100-32gb").peak("bf16") is None
