"""A small valid config to change, and the message of a config error."""

from copy import deepcopy

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig

MINIMAL = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
    "parallel3d": {
        "mesh": {"pp": 2, "tp": 2},
        "model": {
            "family": "gpt",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
        },
        "data": {"sequence_length": 128},
        "train": {"steps": 10},
    },
}
LLAMA = {
    "family": "llama",
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "intermediate_size": 288,
}
REMOVED = object()


def raw(**changes):
    """MINIMAL with the values of dotted paths changed, or removed."""
    result = deepcopy(MINIMAL)
    for path, value in changes.items():
        *sections, key = path.split(".")
        block = result
        for section in sections:
            block = block.setdefault(section, {})
        block[key] = value
        if value is REMOVED:
            del block[key]
    return result


def complete(**changes):
    """The complete config with these changes, on one data-parallel rank."""
    return RunConfig.from_dict(raw(**changes)).resolve(4).with_corpus(4096, 10**6)


def error_of(**changes) -> str:
    """Return the message with which the config with these changes is refused."""
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(raw(**changes))
    return str(caught.value)
