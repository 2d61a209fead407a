"""What a checkpoint says of its run, and which one may go on with it."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.state import Position, RunState
from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("state")
    for i in range(6):
        (root / f"{i}.txt").write_text(f"text {i}\n" * 20)
    data = {"source": "text", "paths": [f"{root}/*.txt"], "vocab_size": 270, "sequence_length": 8}
    config = RunConfig.from_dict(
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "parallel3d": {
                "model": {
                    "family": "gpt",
                    "hidden_size": 8,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 1,
                },
                "data": data | {"cache": str(root / "cache"), "held_out_fraction": 0.3},
                "train": {"steps": 4},
            },
        }
    ).resolve(1)
    corpus = prepare(config.data)
    return config.with_corpus(corpus.vocab_size, len(corpus.train)), corpus


@pytest.mark.parametrize("split", [None, 2])
def test_other_split_version_is_refused_only_with_another_corpus(run, split):
    """The corpus's name stands for what is held out of it, too."""
    config, corpus = run
    now = RunState(config, corpus)
    messages = []
    saved = now.at(Position(2, 16, 2)) | {"split": split}
    if split is None:
        del saved["split"]
    assert now.position_in(saved, Path("step-2"), messages.append) == Position(2, 16, 2)
    moved = RunState(config, replace(corpus, key="another"))
    with pytest.raises(
        CheckpointError, match=rf"step-2 .* \(split {split or 1}, now \d\): .*run.name"
    ):
        moved.position_in(saved, Path("step-2"), messages.append)
    # Gathering weights for longer or shorter changes no result: "auto" may choose anew.
    saved["config"] = deepcopy(saved["config"])
    saved["config"]["parallel3d"]["pipeline"]["weights"] = "per_step"
    assert now.position_in(saved, Path("step-2"), messages.append) == Position(2, 16, 2)
    # By the same rule another corpus may be gone on with, and is told.
    assert not messages
    moved.position_in(now.at(Position(2, 16, 2)), Path("step-2"), messages.append)
    assert "the corpus has changed since the checkpoint" in messages[0]


def test_other_packing_is_refused(run):
    """Packed samples are others, so the position means other text."""
    config, corpus = run
    saved = RunState(config, corpus).at(Position(2, 16, 2))
    packed = config._with("data", packing="best_fit")
    with pytest.raises(
        CheckpointError, match=r'data\.packing was "none" and is now "best_fit", so'
    ):
        RunState(packed, corpus).position_in(saved, Path("step-2"), print)
    older = deepcopy(saved)
    del older["config"]["parallel3d"]["data"]["packing"]  # by a version without packing
    assert RunState(config, corpus).position_in(older, Path(), print) == Position(2, 16, 2)
