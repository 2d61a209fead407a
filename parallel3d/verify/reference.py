"""The reference: one process of plain transformers and torch that trains the same course.

The course has a warm-up, and its last step begins the second epoch. The second step repeats one
token, so its gradient is several times larger than the others and it alone is clipped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.learning_rate import rate
from parallel3d.data.batches import Batches, documents_of
from parallel3d.data.corpus import Corpus, TokenStream
from parallel3d.data.order import sample_index
from parallel3d.model.parametrization import Scales
from parallel3d.model.spec import named_params
from parallel3d.models.common import scales_of
from parallel3d.tensor.cut import Cut
from parallel3d.tensor.initialise import fill
from parallel3d.verify.shrink import Sizes, shrink

SEED = 0
_NEVER_CLIPPED = 1e9
LOUD_STEP = 1
Batch = tuple[Tensor, Tensor, Tensor | None]  # tokens, labels, documents: [batch, seq] each


@dataclass(frozen=True)
class Course:
    """The global batch and learning rate of each step, and the batch evaluated at the end."""

    steps: list[Batch]
    rates: list[float]
    evaluated: Batch


def corpus_of(config: RunConfig, folder: Path) -> Corpus:
    """Return the in-memory corpus of a small config; an epoch is two and a half steps.

    `folder` takes the place of the tokenizer's folder.
    """
    length, vocab = config.data.sequence_length, int(config.model.vocab_size)
    size, end = config.global_batch_size, vocab - 1
    count = 2 * size + size // 2
    generator = np.random.default_rng(7)
    tokens = generator.integers(end, size=count * length + 1, dtype=np.int64)
    tokens[generator.random(len(tokens)) < 0.2] = end
    loud = np.arange(LOUD_STEP * size, (LOUD_STEP + 1) * size)
    for window in sample_index(config.train.seed, loud, count):
        tokens[window * length : (window + 1) * length] = end // 2
    everything = TokenStream(tokens, np.array([0, len(tokens)]))
    return Corpus(
        directory=folder,
        vocab_size=vocab,
        end_of_text=end,
        unigram_entropy=0.0,
        train=everything,
        held_out=everything,
        key="verify",
    )


def course_of(config: RunConfig) -> Course:
    """Return the course of a small config as one process reads it."""
    corpus = corpus_of(config, Path())
    samples = Batches(corpus.train, config.data.sequence_length, config.train.seed)
    size, count = config.global_batch_size, config.num_steps

    def batch(step: int) -> Batch:
        tokens, labels = samples.microbatch(step * size, size)
        documents = torch.from_numpy(documents_of(tokens, corpus.end_of_text))
        isolated = documents if config.data.isolate_documents else None
        return torch.from_numpy(tokens), torch.from_numpy(labels), isolated

    return Course(
        [batch(step) for step in range(count)],
        [rate(config, step) for step in range(count)],
        batch(count),
    )


@dataclass(frozen=True)
class Reference:
    """The results of the reference on its course."""

    losses: list[float]
    grad_norms: list[float]  # before clipping
    weights: str  # file of the weights after the last step
    evaluation: float  # the trained model's loss on the course's last batch
    course: Course


def first_weights(config: RunConfig) -> dict[str, Tensor]:
    """Return every initial weight, uncut, without tied copies."""
    weights = {}
    for name, spec in named_params(models.layers(config.model)).items():
        flat = torch.empty(spec.numel)
        fill(flat, 0, spec, name, Cut(spec.shape, None, 0, 0, 0), SEED)
        weights[name] = flat.view(spec.shape)
    return weights


def train_reference(config: RunConfig, folder: Path, course: Course) -> Reference:
    """Train the small model with transformers and torch's AdamW in fp64.

    Raises ConfigError for a family without a transformers model.
    """
    model, family = _loaded(config, first_weights(config))
    return train_model(model.train(), family, config, folder, course)


def prepare(
    config: RunConfig, meshes: Sequence[Sizes], folder: Path
) -> tuple[dict[Sizes, RunConfig], Reference]:
    """Return the small config of each mesh and their common reference, trained on the course.

    If the config clips, the limit lies between the gradient norms of the quiet steps and the loud
    one, which are measured first. Raises ConfigError.
    """
    small = shrink(config, tuple(meshes), str(folder), clipping=_NEVER_CLIPPED)
    first = small[meshes[0]]
    course = course_of(first)
    if config.gradient_clipping:
        until = slice(0, LOUD_STEP + 1)
        beginning = replace(course, steps=course.steps[until], rates=course.rates[until])
        *quiet, loud = train_reference(first, folder, beginning).grad_norms
        limit = sqrt(max(quiet) * loud)
        assert 0 < limit < inf, (quiet, loud)
        small = shrink(config, tuple(meshes), str(folder), clipping=limit)
    return small, train_reference(small[meshes[0]], folder, course)


def losses_of(
    config: RunConfig, weights: Mapping[str, Tensor], tokens: Tensor, labels: Tensor
) -> Tensor:
    """Return the loss of each token under uncut weights, [batch, seq], in fp64."""
    model, _ = _loaded(config, weights)
    with torch.no_grad():
        logits = model.eval()(tokens, use_cache=False).logits
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def in_our_names(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return uncut tensors of transformers under our global names, without tied copies.

    Inverts the family's `to_huggingface` by mapping the index of each element. Raises KeyError if a
    tensor is missing.
    """
    family, renamed = models.huggingface(config.family), {}
    assert family is not None, config.family
    for name, spec in named_params(models.layers(config)).items():
        numbers = torch.arange(spec.numel).view(spec.shape)
        places = family.to_huggingface(config, {name: numbers})
        order = torch.cat([place.flatten() for place in places.values()]).argsort()
        value = torch.cat([tensors[place].flatten() for place in places])
        renamed[name] = value[order].view(spec.shape)
    return renamed


def _loaded(config: RunConfig, weights: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Return a model of transformers with these weights, in fp64, and its family's module."""
    family = models.huggingface(config.model.family)
    if family is None:
        raise ConfigError(
            f"parallel3d.model.family = {config.model.family!r}: has no huggingface.py, so verify "
            "has no model to compare with; write one (docs/add-a-model.md)"
        )
    try:
        model = family.reference(config.model).double()
    except ValueError as error:
        raise ConfigError(f"parallel3d.model: {error}") from error
    state_dict = family.to_huggingface(config.model, weights)
    missing, unexpected = model.load_state_dict(state_dict, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    assert not unexpected and set(missing) <= tied, (missing, unexpected)
    _tell_multipliers(model, scales_of(config.model))
    return model, family


def _tell_multipliers(model: Any, scales: Scales) -> None:
    """Hook a parametrization's multipliers into a model of transformers.

    Raises ConfigError if its attention has no scale to change.
    """
    if scales.query != 1 and not any(hasattr(m, "scaling") for m in model.modules()):
        raise ConfigError(
            f"parallel3d.model.parametrization: {type(model).__name__} has no attention scale to "
            "change, so verify has no model to compare with; leave base_head_size out"
        )
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = module.scaling * scales.query
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_times(scales.input))
        elif type(module).__name__.endswith(("Attention", "MLP")):
            module.register_forward_hook(_times(scales.branch))
    model.get_output_embeddings().register_forward_pre_hook(lambda _, x: (x[0] * scales.output,))


def _times(factor: float) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # attention returns its scores, too
            return output[0] * factor, *output[1:]
        return output * factor

    return hook


def train_model(
    model: Any, family: Any, config: RunConfig, folder: Path, course: Course
) -> Reference:
    """Train a model of transformers with torch's AdamW and save its weights under our names."""
    # Find the kind of each of its parameters by mapping the kinds of ours to its names.
    adam, rates = config.optimizer.params, scales_of(config.model).rates()
    kinds = [(role, decays) for role in rates for decays in (True, False)]
    marks = {
        name: torch.full(spec.shape, float(kinds.index((spec.role, spec.weight_decay))))
        for name, spec in named_params(models.layers(config.model)).items()
    }
    marks_by_name = family.to_huggingface(config.model, marks)
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [p for name, p in named.items() if bool((marks_by_name[name] == kind).all())],
            "of_rate": rates[role].lr,
            "weight_decay": adam.weight_decay * rates[role].weight_decay if decays else 0.0,
            "eps": adam.eps * rates[role].eps,
        }
        for kind, (role, decays) in enumerate(kinds)
    ]
    optimizer = torch.optim.AdamW(groups, betas=adam.betas, foreach=False)
    losses, norms = [], []
    limit = config.gradient_clipping or float("inf")

    def loss_on(tokens: Tensor, labels: Tensor, documents: Tensor | None) -> Tensor:
        logits = model(tokens, use_cache=False, **_isolation(documents)).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    for batch, lr in zip(course.steps, course.rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = group["of_rate"] * lr
        optimizer.zero_grad()
        loss = loss_on(*batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), limit)))
        optimizer.step()
        losses.append(loss.item())
    trained = {name: p.detach().float() for name, p in named.items()}
    weights = in_our_names(config.model, trained)
    file = folder / "reference.safetensors"
    save_file({name: value.contiguous() for name, value in weights.items()}, file)
    with torch.no_grad():
        evaluation = loss_on(*course.evaluated).item()
    return Reference(losses, norms, str(file), evaluation, course)


def _isolation(documents: Tensor | None) -> dict[str, Tensor]:
    """Return positions and a 4-D mask that isolate documents in a model of transformers."""
    if documents is None:
        return {}
    # Compares all pairs of tokens, unlike any kernel of ours.
    mask = (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril()  # [batch, seq, seq]
    positions = mask.sum(-1) - 1
    mask = mask.unsqueeze(1)
    lowest = torch.finfo(torch.float64).min
    return {
        "position_ids": positions,
        "attention_mask": torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, lowest),
    }
