"""DeepSpeed files in the styles that people publish, and the block that makes them train here."""

import json
from pathlib import Path

from parallel3d.config.normalise import apply_overrides

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "ds_styles").glob("*.json"))}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "sequence_length": 16}
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "run", "far"]


def corpus_in(root):
    """The data section of a small corpus, which is written there."""
    for i in range(20):
        lines = [" ".join(WORDS[(i + j * k) % len(WORDS)] for k in range(12)) for j in range(12)]
        (root / f"{i}.txt").write_text("\n".join(lines))
    return {
        "source": "text",
        "paths": [f"{root}/*.txt"],
        "vocab_size": 280,
        "held_out_fraction": 0.1,
        "cache": str(root / "cache"),
    }


def filled(theirs, data, steps=2, name="run", pp=1):
    """Return a DeepSpeed file with a parallel3d block and the sizes of a command line.

    No key of the file is removed.
    """
    root = Path(data["cache"]).parent
    block = {
        "mesh": {"pp": pp},
        "model": {"family": "gpt", "max_position_embeddings": SIZES["sequence_length"]},
        "data": data,
        "run": {"directory": str(root / "runs"), "save_weights": False},
    }
    raw = json.loads(json.dumps(theirs | {"parallel3d": block}))
    words = ["--train_batch_size", "4", "--train_micro_batch_size_per_gpu", "2"]
    words += ["--gradient_accumulation_steps", "2", "--train.steps", str(steps)]
    words += ["--train.evaluate_samples", "4", "--run.name", name]
    for key, size in SIZES.items():
        words += [f"--{'data' if key == 'sequence_length' else 'model'}.{key}", str(size)]
    apply_overrides(raw, words)
    return raw
