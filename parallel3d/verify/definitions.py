"""Training written a second time, from the definitions in docs/ and a config's numbers alone.

The reference of `verify` must not share a mistake with the code that it checks, so nothing here
calls the library: learning rates, the order of samples, labels and documents, how much a token
counts, which parameters decay, muP's factors, and how weights start. Plain loops; nothing is fast.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain
from math import ceil, cos, inf, lcm, pi, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from parallel3d.config import CompleteConfig
    from parallel3d.model.config import ModelConfig

_MODULUS = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
# Projections that add to the residual stream, by the last part of their names in transformers.
_RESIDUAL = ("c_proj", "o_proj", "out_proj", "down_proj", "dense", "dense_4h_to_h", "fc2", "w2")
# Settings that some class of transformers has by the same name in another sense or form.
_UNLIKE = ("intermediate_size", "rope_scaling", "router_aux_loss_coef")
Stream = tuple[np.ndarray, np.ndarray | None]  # ids, and how much each counts as a label


def learning_rate(config: Any, step: int) -> float:
    """Return the learning rate of a step, counted from 0 (docs/config.md, train.lr_schedule)."""
    peak = config.optimizer.params.lr
    schedule = config.train.lr_schedule
    total = config.train.steps
    start = schedule.warmup_steps
    if step < start:
        return float(peak * (step + 1) / start)
    if schedule.type == "constant":
        return float(peak)
    if schedule.type == "wsd":
        decay_steps = schedule.decay_steps or max(1, total // 5)
        start = max(start, total - decay_steps)
    share = max(0, step + 1 - start) / max(1, total - start)
    heights = {"cosine": (1 + cos(pi * share)) / 2, "linear": 1 - share, "wsd": 1 - sqrt(share)}
    low = schedule.min_ratio
    return float(peak * (low + (1 - low) * heights[schedule.type]))


def loss_scale(fp16: Any, steps: int) -> float:
    """Return fp16's loss scale after steps without an overflow (docs/config.md, fp16)."""
    doublings = max(0, steps - 1) // fp16.loss_scale_window
    dynamic = 2.0 ** (fp16.initial_scale_power + doublings)
    return float(fp16.loss_scale or dynamic) if fp16.enabled else 1.0


def _mixed(number: int) -> int:
    """Return the output of SplitMix64 for a state."""
    number = (number + _GOLDEN) % _MODULUS
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % _MODULUS
    number = (number ^ number >> 27) * 0x94D049BB133111EB % _MODULUS
    return number ^ number >> 31


def sample_at(seed: int, index: int, count: int) -> int:
    """Return the sample at a global index: every epoch of `count` samples has its own order.

    Eight rounds of a Feistel network permute the least power of four, 64 or more, that holds all
    samples; a number beyond them is permuted again.
    """
    epoch, sample = divmod(index, count)
    key = _mixed((_mixed(seed % _MODULUS) + epoch) % _MODULUS)
    half = 8
    while half * half < count:
        half *= 2
    while True:
        left, right = divmod(sample, half)
        for turn in range(8):
            left, right = right, left ^ _mixed(right ^ (key + turn * _GOLDEN) % _MODULUS) % half
        sample = left * half + right
        if sample < count:
            return sample


def shares_of(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the proportions of decimal weights."""
    exact = [Fraction(str(float(weight))) for weight in weights]
    unit = Fraction(1, lcm(*(share.denominator for share in exact)))
    whole = [int(share / unit) for share in exact]
    return [share // int(np.gcd.reduce(whole)) for share in whole]


def parts_of(shares: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return the part of a mixture, and the place in it, of each of the first samples.

    Sample j of a part with `a` shares in a sum of D is due from floor(j D / a) on and before
    ceil((j + 1) D / a). Among the parts that are due, the one with the earliest end is next.
    """
    total = sum(shares)
    used = [0] * len(shares)
    order = []
    for index in range(count):
        due = [p for p, share in enumerate(shares) if used[p] * total // share <= index]
        part = min(due, key=lambda p: ceil(Fraction((used[p] + 1) * total, shares[p])))
        order.append((part, used[part]))
        used[part] += 1
    return order


def start_of(
    streams: Sequence[Stream], shares: Sequence[int], length: int, seed: int, index: int
) -> tuple[int, int]:
    """Return the stream of the sample at a global index, and the place of its first token."""
    part, place = parts_of(shares, index + 1)[index]
    count = (len(streams[part][0]) - 1) // length
    return part, sample_at(seed + part * _GOLDEN, place, count) * length


def samples(
    streams: Sequence[Stream], shares: Sequence[int], length: int, seed: int, indices: Iterable[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and weights [n, length] of samples: a label is the token after."""
    tokens = []
    labels = []
    weights = []
    for index in indices:
        part, start = start_of(streams, shares, length, seed, index)
        ids, counts = streams[part]
        tokens.append([int(i) for i in ids[start : start + length]])
        labels.append([int(i) for i in ids[start + 1 : start + length + 1]])
        after = slice(start + 1, start + length + 1)
        if counts is None:
            weights.append([1.0] * length)
        else:
            weights.append([float(weight) for weight in counts[after]])
    return torch.tensor(tokens), torch.tensor(labels), torch.tensor(weights)


def documents_of(tokens: Tensor, end_of_text: int) -> Tensor:
    """Return the number of each token's document in its sample; an end belongs to what it ends."""
    numbers = torch.zeros_like(tokens)
    for row, ids in zip(numbers, tokens.tolist(), strict=True):
        for place in range(1, len(ids)):
            row[place] = row[place - 1] + int(ids[place - 1] == end_of_text)
    return numbers


def balanced(
    documents: Tensor, micro_batch: int, dp: int, most_keys: Sequence[int]
) -> list[list[int]]:
    """Return the samples of each dp rank in a step with balanced microbatches, in order.

    The n-th token of a document attends to n keys, but in each layer to at most `most_keys`. The
    samples with the most pairs go
    first to the microbatch with the fewest so far, and the microbatches alike to the dp ranks,
    which begin with the one that has the most (docs/long-context.md).
    """

    def dealt(sizes: Sequence[int], num_hands: int) -> list[list[int]]:
        hands = [list[int]() for _ in range(num_hands)]
        for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            free = [hand for hand in hands if len(hand) < len(sizes) // num_hands]
            min(free, key=lambda hand: sum(sizes[i] for i in hand)).append(item)
        return [sorted(hand) for hand in hands]

    work = []
    for row in documents.tolist():
        pairs = 0
        for number in set(row):
            for most in most_keys:
                pairs += sum(min(token, most) for token in range(1, row.count(number) + 1))
        work.append(pairs)
    microbatches = dealt(work, len(work) // micro_batch)
    totals = [sum(work[i] for i in own) for own in microbatches]
    samples = []
    for hand in dealt(totals, dp):
        own: list[int] = []
        for microbatch in sorted(hand, key=lambda m: -totals[m]):
            own += microbatches[microbatch]
        samples.append(own)
    return samples


def widths(model: "ModelConfig") -> tuple[float, float]:
    """Return how many times wider and deeper than muP's base a model is; 1 without muP."""
    settings = getattr(model, "parametrization", None)
    if settings is None or settings.type != "mup":
        return 1.0, 1.0
    deeper = model.num_hidden_layers / (settings.base_depth or model.num_hidden_layers)
    return model.hidden_size / settings.base_width, deeper


def kinds(reference: "PreTrainedModel") -> dict[str, str]:
    """Return the kind of each parameter of a model of transformers.

    "table": a row for each token or position; "residual": a matrix that adds to the residual
    stream; "matrix": any other; "bias" and "gain": vectors.
    """
    named = {}
    head = reference.get_output_embeddings()
    for path, module in reference.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding) or module is head:
                kind = "table"
            elif parameter.ndim >= 2 and not name.endswith("bias"):  # experts have a bias each
                kind = "residual" if path.split(".")[-1] in _RESIDUAL else "matrix"
            else:
                kind = "bias" if name.endswith("bias") else "gain"
            named[f"{path}.{name}"] = kind
    return named


def optimizer_groups(
    reference: "PreTrainedModel", config: "CompleteConfig", masters: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Return the optimizer's group of each master weight; `rate` multiplies the learning rate.

    Matrices and tables decay, vectors do not (docs/add-a-model.md). Under muP a matrix has the
    rate over and the decay times the width; over depth, eps falls, too (docs/scaling.md). Muon's
    groups have `views`, and AdamW has its own rate and decay beside it (docs/muon.md).
    """
    wider, deeper = widths(config.model)
    transfers = getattr(getattr(config.model, "parametrization", None), "base_depth", None)
    params = config.optimizer.params
    groups = []
    is_muon = config.optimizer.type.lower() == "muon"
    views = matrices_of(reference, config) if is_muon else {}
    for name, kind in kinds(reference).items():
        if name not in masters:  # a tied copy
            continue
        eps = getattr(params, "eps", 0.0)
        decay = getattr(params, "weight_decay", 0.0)
        if transfers is not None:
            eps /= wider * (1 if kind == "table" else deeper)
        slower = wider if kind in ("matrix", "residual") else 1.0
        own = None
        if is_muon:
            slower = 1.0 if params.scale == "spectral" else slower**0.5
            own = params.muon_lr if name in views else params.adam_lr
            if name not in views and params.adam_weight_decay is not None:
                decay = params.adam_weight_decay
        if kind in ("bias", "gain"):
            decay = 0.0
        group = {
            "params": [masters[name]],
            "rate": (own or params.lr) / params.lr / slower,
            "weight_decay": decay * slower,
            "eps": eps,
        }
        if name in views:
            group |= {"views": views[name], "clipped": params.clip == "all"}
        groups.append(group)
    return groups


def matrices_of(
    reference: "PreTrainedModel", config: "CompleteConfig"
) -> Mapping[str, Callable[[Tensor], list[Tensor]]]:
    """Return a function for each hidden matrix of a model of transformers.

    It returns the matrices that Muon orthogonalises, as views of a tensor, [out, in] each: GPT-2
    keeps weights as [in, out] and q, k, v side by side. NeoX keeps q, k, v of one head together, so
    the rows of its matrices have two dims. Packed experts have a matrix each.
    """
    heads = config.model.num_attention_heads
    functions = {}
    for name, kind in kinds(reference).items():
        path = name.removesuffix(".weight")
        count = 1
        layer = path.split(".")[-1]
        owner: Any = reference.get_submodule(name.rpartition(".")[0])
        if kind not in ("matrix", "residual") or layer.endswith(("gate", "router")):
            continue  # a router is AdamW's
        if layer in ("c_attn", "query_key_value"):
            count = 3
        elif layer == "gate_up_proj" and getattr(owner, "is_concatenated", True):
            count = 2
        if config.optimizer.params.per_head and (
            count == 3 or layer in ("q_proj", "k_proj", "v_proj")
        ):
            num_matrices = heads
            if layer in ("k_proj", "v_proj"):
                num_matrices = getattr(config.model, "num_key_value_heads", None) or heads
            count *= num_matrices
        # Without an attribute that says so, both of these have weights of [in, out].
        is_known = type(owner).__name__ in ("Conv1D", "Llama4TextExperts")
        is_turned = is_known or getattr(owner, "is_transposed", False)
        by_head = layer == "query_key_value" and count == 3
        functions[name] = partial(_views, is_turned, heads if by_head else 0, count)
    return functions


def _views(is_turned: bool, heads: int, count: int, tensor: Tensor) -> list[Tensor]:
    if tensor.dim() == 3:  # [experts, out, in]
        return [view for expert in tensor for view in _views(is_turned, heads, count, expert)]
    whole = tensor.t() if is_turned else tensor  # [out, in]
    if heads:  # rows are [heads, 3, size]
        size = len(whole) // (3 * heads)
        return list(whole.view(heads, 3, size, -1).movedim(1, 0))
    return list(whole.unflatten(0, (count, -1)))


def settings_unlike(reference: "PreTrainedModel", model: "ModelConfig") -> list[str]:
    """Return the settings that a model of transformers has by the same name with another value."""
    own = model.model_dump(mode="json")
    theirs = reference.config
    unlike = []
    for name, value in own.items():
        other = getattr(theirs, name, value)
        if value not in (None, other) and name not in _UNLIKE:
            unlike.append(name)
    return unlike


def multiply(reference: Any, model: "ModelConfig", head_size: int) -> None:
    """Hook muP's multipliers into a model of transformers (docs/scaling.md).

    Raises ValueError if they scale attention's scores and it has no scale to change.
    """
    wider, deeper = widths(model)
    settings = getattr(model, "parametrization", None)
    if settings is None or settings.type != "mup":
        return
    scores = sqrt((settings.base_head_size or head_size) / head_size)
    if scores != 1 and not any(hasattr(module, "scaling") for module in reference.modules()):
        raise ValueError("no attention scale")
    for module in reference.modules():
        if hasattr(module, "scaling"):
            module.scaling *= scores
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_times(settings.input_multiplier))
        elif type(module).__name__.endswith(("Attention", "MLP", "SparseMoeBlock")):
            module.register_forward_hook(_times(1 / deeper))
    factor = settings.output_multiplier / wider
    reference.get_output_embeddings().register_forward_hook(_times(factor))


def _times(factor: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        if isinstance(output, tuple):  # attention returns its scores, too
            return output[0] * factor, *output[1:]
        return output * factor

    return hook


def start_error(reference: "PreTrainedModel", model: "ModelConfig") -> float:
    """Return how far first weights are from their family's rule, in standard errors.

    The weights of each place in the blocks are normal with mean 0 and the standard deviation of
    their kind: initializer_range, over sqrt(width) in a matrix under muP, and over sqrt(2 layers)
    where it adds to the residual stream. Gains are 1 and biases 0. inf: a vector differs, or two
    rows are equal. 0: a family of the user's own, whose rule is not known here.
    """
    if "residual" not in kinds(reference).values() or not hasattr(model, "initializer_range"):
        return 0.0
    depth = getattr(getattr(model, "parametrization", None), "base_depth", None)
    matrix = model.initializer_range / sqrt(widths(model)[0])
    num_layers = depth or model.num_hidden_layers
    residual = matrix / sqrt(2 * num_layers)
    stds = {"table": model.initializer_range, "matrix": matrix, "residual": residual}
    named = dict(reference.named_parameters())
    rows = []
    values: dict[str, list[Tensor]] = {}  # by name without numbers, in standard deviations
    for name, kind in kinds(reference).items():
        if name not in named:  # a tied copy
            continue
        weight = named[name].detach().double()
        if kind in stds:
            place = re.sub(r"\d+", "", name)
            values.setdefault(place, []).append(weight.flatten() / stds[kind])
            rows += [tuple(row) for row in weight.flatten(1)[:, :8].tolist()]
        elif not bool((weight == (1 if kind == "gain" else 0)).all()):
            return inf
    if len(set(rows)) < len(rows):
        return inf
    every = torch.cat(list(chain.from_iterable(values.values())))
    worst = abs(float(every.pow(4).mean()) - 3) * sqrt(len(every) / 96)
    for pieces in values.values():
        own = torch.cat(pieces)
        scale = sqrt(sum(map(len, pieces)))
        worst = max(worst, abs(float(own.mean())) * scale)
        worst = max(worst, abs(float(own.square().mean().sqrt()) - 1) * scale * sqrt(2))
    return worst
