"""The reference: one process of plain transformers and torch that trains the same course.

The course has a warm-up, and its last step begins the second epoch. The second step repeats one
token, so its gradient is several times larger than the others and it alone is clipped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.config.data import weighs_tokens, weight_changes
from parallel3d.data.corpus import Corpus, Mixture, TokenStream
from parallel3d.model import optimizers
from parallel3d.model.config import ModelConfig
from parallel3d.model.spec import named_params
from parallel3d.models.common import head_size_of
from parallel3d.tensor.cut import Cut
from parallel3d.tensor.initialise import fill
from parallel3d.verify import definitions
from parallel3d.verify.in_parts import ProductsInParts
from parallel3d.verify.schedule import compared_steps, schedule_of
from parallel3d.verify.shrink import LONG, SEQUENCE_LENGTH, SHORT, Extent, shrink

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 0
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Half precision: how many times farther than the farthest of other right runs, which is taken to
# differ by at least this share of the type's eps.
MARGIN = 4.0
FLOORS = {"loss": 1 / 64, "grad_norm": 1 / 8, "weight": 1 / 8, "evaluation": 1 / 64}
# Where tokens choose experts, another rounding swaps experts with nearly equal scores. Two runs
# with one sample a microbatch add in the same order, so they do not show by how much.
ROUTED_FLOORS = FLOORS | {"grad_norm": 1 / 2}
TEXT_SEED = 7
HELD_OUT_SEED = 8
ORDER_SEED = 20
"""The seed of the order of held-out samples, in every run."""
_SCALE = 2.0**8
"""The scale of the loss in fp16."""
FIRST = "first.safetensors"  # weights before the first step, beside those after the last
_NEVER_CLIPPED = 1e9
LOUD_STEP = 1
_LOGITS_AT_ONCE = 2**25  # elements in fp64; half precision takes a batch in one piece

Weights = Mapping[str, Tensor]
"""Tensors by the names of their parameters."""


class Batch(NamedTuple):
    """A global batch; each tensor is [batch, seq]."""

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None = None  # if they are isolated
    weights: Tensor | None = None  # if labels count unequally


@dataclass(frozen=True)
class Course:
    """The global batch and learning rate of each step, and the samples evaluated at the end."""

    steps: list[Batch]
    rates: list[float]
    evaluated: Batch


def text_of(
    config: CompleteConfig, seed: int = TEXT_SEED
) -> tuple[list[definitions.Stream], list[int]]:
    """Return the streams of a small config's corpus and their shares of the samples.

    With one stream an epoch of training is two and a half steps. Ids are the highest of the
    vocabulary; labels count unequally if the config weighs them.
    """
    length = config.data.sequence_length
    size = config.global_batch_size
    end = int(config.model.vocab_size) - 1
    data = config.data
    parts = data.mixture if data.source == "mixture" else (data,)
    shares = definitions.shares_of([weight_changes(part)[0][1] for part in parts])
    generator = np.random.default_rng(seed)
    streams = list[definitions.Stream]()
    more = 0 if seed == TEXT_SEED else 1  # no sample is evaluated twice
    for part, share in zip(parts, shares, strict=True):
        count = max(1, (5 * size * share) // (2 * sum(shares)) + more)
        tokens = generator.integers(max(0, end - 512), end, size=count * length + 1, dtype=np.int64)
        # A long sample may be one document, so that positions get high even if they are isolated.
        ends = 0.2 if length == SEQUENCE_LENGTH else 0.5 / length
        tokens[generator.random(len(tokens)) < ends] = end
        weights = generator.random(len(tokens), dtype=np.float32)
        weights[generator.random(len(tokens)) < 0.4] = 0
        streams.append((tokens, weights if weighs_tokens(part) else None))
    for sample in range(LOUD_STEP * size, (LOUD_STEP + 1) * size):
        number, start = definitions.start_of(streams, shares, length, config.train.seed, sample)
        streams[number][0][start : start + length] = end // 2
    return streams, shares


def corpus_of(config: CompleteConfig, folder: Path) -> Corpus:
    """Return the in-memory corpus of a small config.

    `folder` takes the place of the tokenizer's folder.
    """

    def stream(seed: int) -> TokenStream | Mixture:
        streams, shares = text_of(config, seed)
        # A plain array stands for the weights that would be read from files.
        parts = tuple(
            TokenStream(tokens, _bounds_of(tokens, config), weights)  # type: ignore[arg-type]
            for tokens, weights in streams
        )
        if len(parts) == 1:
            return parts[0]
        return Mixture(parts, tuple(map(float, shares)))

    return Corpus(
        directory=folder,
        vocab_size=int(config.model.vocab_size),
        end_of_text=int(config.model.vocab_size) - 1,
        unigram_entropy=0.0,
        train=stream(TEXT_SEED),
        held_out=stream(HELD_OUT_SEED),
        key="verify",
    )


def _bounds_of(tokens: np.ndarray, config: CompleteConfig) -> np.ndarray:
    """Return the bounds of documents that end with the end of text, int64 [documents + 1]."""
    ends = np.flatnonzero(tokens[:-1] == int(config.model.vocab_size) - 1) + 1
    return np.concatenate([[0], ends, [len(tokens)]])


def course_of(config: CompleteConfig) -> Course:
    """Return the course of a small config by its definition."""
    size = config.global_batch_size
    count = config.num_steps
    train = config.train
    text = text_of(config)

    def batch(own: tuple[list[definitions.Stream], list[int]], seed: int, indices: range) -> Batch:
        streams, shares = own
        weighs = any(weights is not None for _, weights in streams)
        tokens, labels, weights = definitions.samples(
            streams, shares, config.data.sequence_length, seed, indices
        )
        documents = definitions.documents_of(tokens, int(config.model.vocab_size) - 1)
        isolated = documents if config.data.isolate_documents else None
        return Batch(tokens, labels, isolated, weights if weighs else None)

    return Course(
        [batch(text, train.seed, range(n * size, (n + 1) * size)) for n in range(count)],
        [definitions.learning_rate(config, step) for step in range(count)],
        batch(text_of(config, HELD_OUT_SEED), ORDER_SEED, range(train.evaluate_samples)),
    )


@dataclass(frozen=True)
class Reference:
    """The results of the reference on its course."""

    losses: list[float]
    grad_norms: list[float]
    """Before clipping."""
    weights: str
    """File of the weights after the last step."""
    evaluation: float
    """The trained model's loss on the course's held-out samples."""
    course: Course
    start: float = 0.0
    """See `definitions.start_error`."""
    settings: int = 0
    """How many are not the config's, see `definitions.settings_unlike`."""
    schedule: CompleteConfig | None = None
    """The learning-rate schedule of the user's config."""
    rates: Mapping[int, float] = field(default_factory=dict)
    """Learning rates of `schedule`, by the step, counted from 0."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """See `tolerances_of`."""
    turns: Tensor | None = None
    """cos and sin of rotary positions, [2, seq, size], or None."""


def first_weights(config: CompleteConfig) -> dict[str, Tensor]:
    """Return every initial weight, uncut, without tied copies."""
    weights = {}
    for name, spec in named_params(models.layers(config.model)).items():
        flat = torch.empty(spec.numel)
        fill(flat, 0, spec, name, Cut(spec.shape), SEED)
        weights[name] = flat.view(spec.shape)
    return weights


def train_reference(
    config: CompleteConfig, folder: Path, course: Course, *, rows: int | None = None
) -> Reference:
    """Train the small model with transformers and the optimizer in plain PyTorch.

    A config of fp32 is trained in fp64. Half precision follows the config's own plan: products in
    it, masters, added gradients, clipping and the update in fp32. `rows`: samples that are computed
    together; with it attention has torch's fused kernel, so sums have another order.

    Raises ConfigError for a family without a transformers model, with side losses, or whose code in
    transformers does not run in fp64.
    """
    names = sorted({name for layer in models.layers(config.model) for name in layer.side_losses})
    if names:
        raise ConfigError(
            f"parallel3d.model.family = {config.model.family!r}: adds the side losses "
            f"{', '.join(names)} to the loss, which verify's reference does not compute; compare "
            "its meshes with each other (tests/pipeline/test_side_losses.py)"
        )
    dtype = HALF.get(config.precision, torch.float64)
    model, family = load_model(config, first_weights(config), dtype)
    if rows is not None:
        model.set_attn_implementation("sdpa")
    try:
        return train_model(model.train(), family, config, folder, course, rows)
    except RuntimeError as error:
        if dtype != torch.float64:
            raise
        raise ConfigError(
            f"parallel3d.model: transformers' own code fails in fp64 ({error}), so verify has no "
            "model to compare with; change what it fails in, or compare another model"
        ) from error


def prepare(
    config: RunConfig, meshes: Sequence[MeshSizes], folder: Path, extent: Extent = SHORT
) -> tuple[dict[MeshSizes, CompleteConfig], Reference]:
    """Return the small config of each mesh and their common reference, trained on the course.

    If the config clips, the limit lies between the gradient norms of the quiet steps and the loud
    one, which are measured first. Raises ConfigError.
    """
    small = shrink(config, tuple(meshes), str(folder), clipping=_NEVER_CLIPPED, extent=extent)
    first = small[meshes[0]]
    course = course_of(first)
    if config.gradient_clipping:
        until = slice(0, LOUD_STEP + 1)
        beginning = replace(course, steps=course.steps[until], rates=course.rates[until])
        *quiet, loud = train_reference(first, folder, beginning).grad_norms
        limit = sqrt(max(quiet) * loud)
        assert 0 < limit < inf, (quiet, loud)
        small = shrink(config, tuple(meshes), str(folder), clipping=limit, extent=extent)
    reference = train_reference(small[meshes[0]], folder, course)
    most_parts = max(mesh.tp for mesh in meshes)
    orders = {(1, 1), (1, most_parts), (2, most_parts)}
    tolerances = tolerances_of(small[meshes[0]], folder, reference, orders)
    reference = replace(reference, tolerances=tolerances)
    schedule = schedule_of(config, small[meshes[0]])
    rates = {n: definitions.learning_rate(schedule, n) for n in compared_steps(schedule)}
    return small, replace(reference, schedule=schedule, rates=rates)


def prepare_long(
    config: RunConfig, mesh: MeshSizes, folder: Path
) -> tuple[CompleteConfig, Reference]:
    """Return the config of one step with long sequences and large ids on a mesh, and its reference.

    Raises ConfigError.
    """
    (folder / "long").mkdir(exist_ok=True)
    long = shrink(config, (mesh,), str(folder), clipping=_NEVER_CLIPPED, extent=LONG)[mesh]
    reference = train_reference(long, folder / "long", course_of(long))
    tolerances = tolerances_of(long, folder / "long", reference, [(1, mesh.tp)])
    return long, replace(reference, tolerances=tolerances)


def tolerances_of(
    config: CompleteConfig, folder: Path, reference: Reference, orders: Iterable[tuple[int, int]]
) -> dict[str, float]:
    """Return the bound of each error in half precision, {} for fp32, which has a fixed one.

    It follows from how far other right runs are from the reference, which add in other orders. They
    are several where Adam turns rounding into full steps before a gradient is compared: where a run
    ends is chance then, and one may end near the reference.

    - `orders`: of each run, the samples that are computed together, and the parts that products
      are added up in, as tensor-parallel ranks do.
    """
    if config.precision not in HALF:
        return {}
    (folder / "again").mkdir(exist_ok=True)
    found = dict.fromkeys(FLOORS, 0.0)
    for rows, parts in orders:
        with ProductsInParts(parts) if parts > 1 else nullcontext():
            again = train_reference(config, folder / "again", reference.course, rows=rows)
        for name, size in differences(again, reference).items():
            found[name] = max(found[name], size)
    unit = torch.finfo(HALF[config.precision]).eps
    floors = ROUTED_FLOORS if getattr(config.model, "num_experts", 1) > 1 else FLOORS
    return {name: MARGIN * max(size, floors[name] * unit) for name, size in found.items()}


def differences(one: Reference, right: Reference) -> dict[str, float]:
    """Return how far one run is from another that began with the same weights.

    Raises KeyError or RuntimeError if their weights have other names or shapes.
    """
    folder = Path(right.weights).parent
    start = load_file(str(folder / FIRST))
    expected = load_file(right.weights)
    found = load_file(one.weights)
    off = sum(float((found[name] - value).square().sum()) for name, value in expected.items())
    way = sum(float((value - start[name]).square().sum()) for name, value in expected.items())
    return {
        "loss": max(relative(one.losses, right.losses)),
        "grad_norm": max(relative(one.grad_norms, right.grad_norms)),
        "weight": sqrt(off / way),
        "evaluation": max(relative([one.evaluation], [right.evaluation])),
    }


def relative(values: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Return the relative difference of each value."""
    return [abs(x - y) / abs(y) for x, y in zip(values, expected, strict=True)]


def in_our_names(config: ModelConfig, tensors: Weights) -> dict[str, Tensor]:
    """Return uncut tensors of transformers under our global names, without tied copies.

    Inverts the family's `to_huggingface` by mapping the index of each element. Raises KeyError if a
    tensor is missing.
    """
    family = models.huggingface(config.family)
    renamed = {}
    assert family is not None, config.family
    for name, spec in named_params(models.layers(config)).items():
        numbers = torch.arange(spec.numel).view(spec.shape)
        places = family.to_huggingface(config, {name: numbers})
        order = torch.cat([place.flatten() for place in places.values()]).argsort()
        value = torch.cat([tensors[place].flatten() for place in places])
        renamed[name] = value[order].view(spec.shape)
    return renamed


def load_model(
    config: CompleteConfig, weights: Weights, dtype: torch.dtype = torch.float64
) -> tuple["PreTrainedModel", ModuleType]:
    """Return a model of transformers with these weights, and its family's module."""
    family = models.huggingface(config.model.family)
    if family is None:
        raise ConfigError(
            f"parallel3d.model.family = {config.model.family!r}: has no huggingface.py, so verify "
            "has no model to compare with; write one (docs/add-a-model.md)"
        )
    try:
        model = family.reference(config.model)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model = model.to(dtype)
    except ValueError as error:
        raise ConfigError(f"parallel3d.model: {error}") from error
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name]  # frequencies of rotary positions stay in fp32
    missing, unexpected = model.load_state_dict(
        family.to_huggingface(config.model, weights), strict=False
    )
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    assert not unexpected and set(missing) <= tied | buffers.keys(), (missing, unexpected)
    try:
        definitions.multiply(model, config.model, head_size_of(config.model))
    except ValueError as error:
        raise ConfigError(
            f"parallel3d.model.parametrization: {type(model).__name__} has no attention scale to "
            f"change ({error}), so verify has no model to compare with; leave base_head_size out"
        ) from error
    return model, family


def train_model(
    model: "PreTrainedModel",
    family: ModuleType,
    config: CompleteConfig,
    folder: Path,
    course: Course,
    rows: int | None = None,
) -> Reference:
    """Train a model of transformers in plain PyTorch and save its weights under our names."""
    # A family that runs transformers' own modules has their first weights and their rotations.
    is_own = not getattr(family, "RUNS_TRANSFORMERS", False)
    start = definitions.start_error(model, config.model) if is_own else 0.0
    named = dict(model.named_parameters())
    masters = named
    if config.precision in HALF:
        masters = {name: nn.Parameter(p.detach().float()) for name, p in named.items()}
    scale = _SCALE if config.precision == "fp16" else 1.0
    groups = definitions.optimizer_groups(model, config, masters)
    optimizer = optimizers.load(config.optimizer.type).reference(groups, config.optimizer.params)
    clipped = [weight for g in groups if g.get("clipped", True) for weight in g["params"]]
    save_weights(config, masters, folder / FIRST)
    losses = []
    norms = []
    limit = config.gradient_clipping or float("inf")
    for batch, lr in zip(course.steps, course.rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * lr
        optimizer.zero_grad()
        loss = 0.0
        for part in _parts_of_loss(model, batch, rows):
            (part * scale).backward()
            loss += part.item()
            _add_to_masters(named, masters, scale)
        norm = nn.utils.get_total_norm([m.grad for m in masters.values() if m.grad is not None])
        nn.utils.clip_grads_with_norm_(clipped, limit, norm)
        norms.append(float(norm))
        optimizer.step()
        losses.append(loss)
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
    file = folder / "reference.safetensors"
    save_weights(config, masters, file)
    with torch.no_grad():
        evaluation = sum(part.item() for part in _parts_of_loss(model, course.evaluated, rows))
    turns = None
    for module in model.modules():
        if is_own and hasattr(module, "inv_freq"):
            positions = torch.arange(course.evaluated[0].shape[1])
            turns = torch.cat(module(torch.zeros(1), positions.unsqueeze(0)))
    return Reference(
        losses,
        norms,
        str(file),
        evaluation,
        course,
        start,
        len(definitions.settings_unlike(model, config.model)),
        turns=turns,
    )


def save_weights(config: CompleteConfig, masters: Weights, file: Path) -> None:
    """Save weights of transformers under our names, in fp32."""
    weights = in_our_names(config.model, {n: p.detach().float() for n, p in masters.items()})
    save_file({name: value.contiguous() for name, value in weights.items()}, file)


def _add_to_masters(named: Weights, masters: Weights, scale: float) -> None:
    """Add gradients of half precision to the masters' in fp32; in fp64 both are one."""
    for name, parameter in named.items():
        master = masters[name]
        gradient = parameter.grad
        if master is not parameter and gradient is not None:
            added = gradient.float() / scale
            if master.grad is not None:
                added = added + master.grad
            master.grad = added
            parameter.grad = None


def _parts_of_loss(model: "PreTrainedModel", batch: Batch, rows: int | None) -> Iterator[Tensor]:
    """Yield losses of some samples at a time that add up to the weighted mean over a batch."""
    tokens, labels, documents, weights = Batch(*batch)
    weights = torch.ones(labels.shape) if weights is None else weights
    total = weights.double().sum()
    options = isolation(model, documents)
    most = _LOGITS_AT_ONCE * (1 if model.dtype == torch.float64 else len(tokens))
    rows = rows or max(1, most // (tokens.shape[1] * model.config.vocab_size))
    for first in range(0, len(tokens), rows):
        part = slice(first, first + rows)
        own = {name: tensor[part] for name, tensor in options.items()}
        logits = model(tokens[part], use_cache=False, **own).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.transpose(1, 2), labels[part], reduction="none")
        yield (losses * weights[part]).sum() / total


def isolation(model: "PreTrainedModel", documents: Tensor | None) -> dict[str, Tensor]:
    """Return positions and a 4-D mask that isolate documents in a model of transformers.

    A mask would replace the windows of a model that has them; all such models see from positions
    that start again where a document begins. Some others (OPT) do not.
    """
    if documents is None:
        return {}
    same = (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril()  # [batch, seq, seq]
    options = {"position_ids": same.sum(-1) - 1}
    if getattr(model.config, "sliding_window", None) is None:
        mask = torch.zeros(same.shape, dtype=model.dtype)
        mask.masked_fill_(~same, torch.finfo(model.dtype).min)
        options["attention_mask"] = mask.unsqueeze(1)
    return options
