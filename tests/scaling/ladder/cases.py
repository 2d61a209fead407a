"""A small ladder, with what tests change in it."""

import json

from parallel3d.extras.scaling.ladder.plan import ladder_of


def micro(directory, data=None, **changes):
    """Two sizes x two budgets, whose runs take seconds; in `changes`, None takes a key away."""
    ladder = {
        "directory": str(directory),
        "base": {
            "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}},
            "parallel3d": {
                "model": {"family": "llama"},
                "data": {"source": "python-stdlib", "vocab_size": 300, "sequence_length": 16}
                if data is None
                else data,
            },
        },
        "head_size": 8,
        "mlp_ratio": 2,
        "sizes": [
            {"model": {"hidden_size": 16, "num_hidden_layers": 1}},
            {"model": {"hidden_size": 32, "num_hidden_layers": 1}},
        ],
        "budgets": {"tokens": [512, 1024]},
        "hyperparameters": {"learning_rate": 0.01, "batch_tokens": 64},
    }
    return {key: value for key, value in (ladder | changes).items() if value is not None}


def write(folder, name="ladder.json", **changes):
    """The file of such a ladder, whose runs go into folder/runs."""
    file = folder / name
    file.write_text(json.dumps(micro(folder / "runs", **changes)))
    return file


def runs_by_name(folder, **changes):
    """Its runs, by their names."""
    return {rung.run.name: rung.run for rung in ladder_of(str(write(folder, **changes))).rungs}
