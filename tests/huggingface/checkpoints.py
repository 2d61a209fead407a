"""Checkpoints of small models with known weights, written by hand, and their exports."""

import json
import shutil

from parallel3d.checkpoint.state import tokenizer_digest
from parallel3d.config import RunConfig
from parallel3d.data.sources import no_progress
from parallel3d.data.tokenizer import save_tokenizer, train_tokenizer
from parallel3d.huggingface.conversion import write_tensors
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import WeightFiles, create, write_rest
from tests.checkpoint.folders import FIRST, SECOND, seal, state_of
from tests.checkpoint.folders import write_tensors as write_file
from tests.models import families
from tests.models.families import weights_of

STEP = 10
VOCAB = 300
SHARD_BYTES = 20_000


def small(family, **settings):
    """A small config, whose vocabulary is one of token ids."""
    return families.small(family, vocab_size=VOCAB, **settings)


def tokenizer_in(folder, texts=("def main(): return 'words and words'",) * 3):
    """A tokenizer of our own in a new folder."""
    folder.mkdir()
    save_tokenizer(train_tokenizer(texts, VOCAB), folder)
    return folder


def checkpoint_of(config, root, tokenizer=None):
    """runs/x/checkpoints/step-10 with the weights of `weights_of`, in two files; the run's folder.

    Each parameter is cut at its first dim; the moments are zeros. `tokenizer`: its folder; without
    one the corpus is token ids alone.
    """
    run = root / "run"
    folder = run / "checkpoints" / f"step-{STEP}"
    folder.mkdir(parents=True)
    weights = weights_of(config)
    files = ({}, {})
    for name, value in weights.items():
        value, cut, rest = value.numpy(), len(value) // 2, ",0" * (value.ndim - 1)
        for kind, array in (("master", value), ("exp_avg", 0 * value), ("exp_avg_sq", 0 * value)):
            if cut:
                files[0][f"{name}|{kind}|0{rest}"] = array[:cut]
            files[1][f"{name}|{kind}|{cut}{rest}"] = array[cut:]
    for file, tensors in zip((FIRST, SECOND), files, strict=True):
        write_file(folder / file, tensors)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    state = state_of(STEP, shapes) | {"config": run_config(config, tokenizer)}
    if tokenizer is not None:
        state["tokenizer"] = tokenizer_digest(tokenizer)
        shutil.copytree(tokenizer, folder / "tokenizer")
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder, STEP)
    line = {"step": STEP, "loss": 2.5, "held_out_loss": 2.75}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return run


def run_config(config, tokenizer=None):
    data = {
        "source": "tokens",
        "paths": ["ids.npy"],
        "tokenizer": "none",
        "vocab_size": VOCAB,
        "end_of_text_id": 1,
        "sequence_length": 16,
    }
    if tokenizer is not None:
        data = {
            "source": "text",
            "paths": ["a.txt"],
            "tokenizer": str(tokenizer),
            "sequence_length": 16,
        }
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel3d": {
            "model": config.model_dump(mode="json"),
            "data": data,
            "train": {"steps": STEP},
        },
    }
    return RunConfig.from_dict(raw).resolve(1).to_dict()


def written(run, folder, **layout):
    """A folder that is not read back yet, and all that `read_back` takes beside it."""
    source = CheckpointSource(run)
    about = source.about()
    files = WeightFiles(source.config.model, **layout)
    create(folder, files)
    stamps = write_tensors(source.read, files, folder, no_progress)
    write_rest(folder, about, files)
    return folder, source, about, files, stamps
