"""The held-out loss of a run's weights, by plain transformers on the files of the run."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from parallel3d.config import RunConfig
from parallel3d.data.evaluation_samples import ORDER_SEED
from parallel3d.data.order import sample_index
from parallel3d.verify.reference import in_our_names
from tests.verify.measuring import losses_of


def check_losses(line, directory, corpus, samples, length):
    """The line of metrics.jsonl of the last evaluation, of the held-out text and of each set."""
    assert line["held_out_loss"] == line["validation"]["held_out"]["loss"]
    sets = {"held_out": corpus, **corpus.validation}
    assert list(line["validation"]) == list(sets)
    for name, logged in line["validation"].items():
        mean, error = held_out_loss(directory, sets[name], samples, length)
        assert logged["loss"] == pytest.approx(mean, rel=1e-5), name
        assert logged["standard_error"] == pytest.approx(error, rel=1e-4), name
        assert logged["tokens"] == samples * length and logged["documents"] > 5


def held_out_loss(directory, corpus, samples, length):
    """The mean loss and its standard error over the first windows of the fixed order.

    Document by document: each label's document is found by counting ends of text.
    """
    weights = {}
    for path in (directory / "weights").glob("*.safetensors"):
        weights |= load_file(path)
    config = RunConfig.from_json(str(directory / "config.json"))
    weights = in_our_names(config.model, weights)
    text = corpus.held_out.tokens[:].astype(np.int64)
    order = sample_index(ORDER_SEED, np.arange(samples), (len(text) - 1) // length)
    windows = np.stack([text[i * length : i * length + length + 1] for i in order])
    before = np.concatenate([[0], np.cumsum(text == corpus.end_of_text)])
    documents = np.stack([before[i * length + 1 : i * length + length + 1] for i in order])
    tokens = torch.from_numpy(windows)
    losses = losses_of(config, weights, tokens[:, :-1], tokens[:, 1:]).numpy()
    mean = losses.mean()
    residuals = [(losses - mean)[documents == d].sum() for d in np.unique(documents)]
    n = len(residuals)
    return mean, (n / (n - 1) * sum(r**2 for r in residuals)) ** 0.5 / losses.size
