"""The held-out loss of a run's weights, by plain transformers on the files of the run."""

import numpy as np
import torch
from safetensors.torch import load_file

from parallel3d.config import RunConfig
from parallel3d.verify.reference import loss_of


def held_out_loss(directory, corpus, samples, length):
    """The mean loss of the first held-out windows."""
    weights = {}
    for path in (directory / "weights").glob("*.safetensors"):
        weights |= load_file(path)
    config = RunConfig.from_json(str(directory / "config.json"))
    text = np.asarray(corpus.held_out.tokens, dtype=np.int64)
    windows = np.stack([text[i * length : i * length + length + 1] for i in range(samples)])
    tokens = torch.from_numpy(windows)
    return loss_of(config, weights, tokens[:, :-1], tokens[:, 1:])
