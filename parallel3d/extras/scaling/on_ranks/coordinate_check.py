"""The coordinate check: sizes of activations at several widths, on ranks of this machine.

Each width is a small version of the config with the same mesh, ZeRO stage, precision and
parametrization. It trains for some steps on one batch; activations are measured in a forward pass
of that batch in evaluation, before and after.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import lcm

import torch
from torch import Tensor, nn

from parallel3d.base.errors import ConfigError
from parallel3d.base.say import Say
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.extras.scaling.coordinates import (
    CHANGE,
    START,
    TRAINED,
    CoordinateCheck,
    Sizes,
    fit_slopes,
)
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.config import HasKeyValueHeads, ModelConfig
from parallel3d.model.parametrization import parametrization_of
from parallel3d.tensor.attention import CausalAttention
from parallel3d.tensor.linear import ColumnParallelLinear, GroupedColumnLinear, RowParallelLinear
from parallel3d.tensor.vocab import VocabParallelOutput
from parallel3d.train.assembly import Assembly, assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import compile_operators, microbatches
from parallel3d.verify.reference import Batch
from parallel3d.verify.shrink import num_microbatches, shrink

HEAD_SIZE = 16
BLOCKS = 2
BATCH = 8
LENGTH = 32
ZIPF = 1.5  # the power by which a token's frequency falls with its rank
_SEEN = (
    ColumnParallelLinear,
    GroupedColumnLinear,
    RowParallelLinear,
    CausalAttention,
    VocabParallelOutput,
)
Sums = dict[str, dict[str, tuple[float, int]]]
"""layer -> measure -> sum of |x|, elements"""


def check_coordinates(
    config: RunConfig, *, widths: Sequence[int], seeds: int, steps: int, say: Say
) -> CoordinateCheck:
    """Return the slopes of a config's activations over the widths, averaged over seeds.

    `say` prints progress. Raises ConfigError for a width that the model or the mesh does not
    support.
    """
    configs = {width: at_width(config, width, steps) for width in widths}
    compile_operators(next(iter(configs.values())))
    sizes: dict[int, list[Sizes]] = {width: [] for width in configs}
    for width, small in configs.items():
        for seed in range(seeds):
            sums = run_locally(_measure_on_rank, small.mesh.sizes.ranks, small, seed, timeout=1800)
            sizes[width].append(_merged(sums))
        say(f"width {width}: {seeds} seeds of {steps} steps")
    return fit_slopes(sizes)


def at_width(config: RunConfig, width: int, steps: int) -> CompleteConfig:
    """Return a small complete config of a width; the MLP keeps its proportions.

    If the parametrization names a base head size, heads get wider with the model and their number
    stays; otherwise their size stays and their number grows. Raises ConfigError if the heads do not
    divide the width.
    """
    sizes = config.mesh.sizes
    batch = lcm(BATCH, sizes.dp * num_microbatches(config))
    small = shrink(config, (sizes,), batch=batch)[sizes]
    model = config.model
    raw = small.to_dict()
    settings = parametrization_of(model)
    heads = max(1, width // HEAD_SIZE)
    if settings.base_head_size is not None and settings.base_width is not None:
        heads = settings.base_width // settings.base_head_size
    if width % heads:
        raise ConfigError(f"--widths {width}: must be a multiple of the model's {heads} heads")
    stages = sizes.pp * config.pipeline.stages_per_rank
    changed = {
        "num_hidden_layers": max(BLOCKS, stages - 1),
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": max(1, round(width * model.inner_size / model.hidden_size)),
        "max_position_embeddings": LENGTH,
        "num_key_value_heads": _kv_heads(model, heads),
        "head_dim": None,
    }
    inner = getattr(model, "moe_intermediate_size", None)
    if inner:
        changed["moe_intermediate_size"] = max(1, round(width * inner / model.hidden_size))
    block = raw["parallel3d"]
    block["model"] |= {name: value for name, value in changed.items() if name in block["model"]}
    block["data"]["sequence_length"] = LENGTH
    block["train"]["steps"] = steps
    raw["optimizer"]["params"] = config.optimizer.params.model_dump(mode="json")
    raw["gradient_clipping"] = 0.0
    where = f"the config at --widths {width}"
    return RunConfig.from_dict(raw, where).resolve(sizes.ranks).completed()


def _kv_heads(model: ModelConfig, heads: int) -> int | None:
    """Keep the config's queries per key/value head if that divides the heads; else one each."""
    kv_heads = model.num_key_value_heads if isinstance(model, HasKeyValueHeads) else None
    if kv_heads is None:
        return None
    fewer = max(1, heads * kv_heads // model.num_attention_heads)
    return fewer if heads % fewer == 0 else heads


def _measure_on_rank(rank: int, config: CompleteConfig, seed: int) -> Sums:
    """Train as one rank and return sums over its part of each layer's activations."""
    torch.set_num_threads(1 if config.mesh.sizes.ranks > 1 else 2)
    mesh = Mesh(**config.mesh.groups)
    parts = assemble(config, mesh, seed=seed)
    batch = microbatches(_batch(config), config, mesh)
    with _activations(parts) as now:
        parts.evaluator.run(batch)
    first = dict(now)
    for step in range(config.num_steps):
        parts.executor.run(batch, step)
        parts.engine.step(config.optimizer.params.lr)
    with _activations(parts) as now:
        parts.evaluator.run(batch)
    sums = {}
    for name, last in now.items():
        changes = [after - before for before, after in zip(first[name], last, strict=True)]
        sums[name] = {START: _sum(first[name]), TRAINED: _sum(last), CHANGE: _sum(changes)}
    mesh.barrier()
    parts.engine.close()
    return sums


def _batch(config: CompleteConfig) -> Batch:
    """Return tokens, labels and documents of the batch, [batch, seq] each; a sample is a document.

    Token frequencies follow Zipf's law, as in a language. With equal frequencies the gradients of a
    step would have little in common, and the change would be noise that grows by the width's root.
    """
    generator = torch.Generator().manual_seed(7)
    size = config.global_batch_size
    length = config.data.sequence_length + 1
    frequency = torch.arange(1.0, int(config.model.vocab_size) + 1) ** -ZIPF
    text = torch.multinomial(frequency, size * length, replacement=True, generator=generator)
    text = text.view(size, length)
    documents = torch.zeros_like(text[:, :-1]) if config.data.isolate_documents else None
    return Batch(text[:, :-1], text[:, 1:], documents)


@contextmanager
def _activations(parts: Assembly) -> Iterator[dict[str, list[Tensor]]]:
    """Record the outputs of this rank's layers inside the context: one per microbatch, by name."""
    outputs: dict[str, list[Tensor]] = {}

    def note(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            # Query, key and value apart: a rank may hold a part of one and all of another.
            each = {name: output}
            if isinstance(module, GroupedColumnLinear):
                each = {f"{name}.{n}": x for n, x in zip(module.heads, output, strict=True)}
            for full, x in each.items():
                outputs.setdefault(full, []).append(x.detach().flatten().to("cpu", torch.float64))

        return hook

    with ExitStack() as hooks:
        for name, module in _modules(parts):
            hooks.callback(module.register_forward_hook(note(name)).remove)
        yield outputs


def _modules(parts: Assembly) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of this rank's stages, except the head's loss, and their products."""
    placement = parts.stages.layers_of_stage
    last = parts.layers[-1].name
    for stage, modules in parts.stages.module.layers.items():
        for index, module in zip(placement[stage], modules, strict=True):
            layer = parts.layers[index].name
            if layer != last:
                yield layer, module
            for path, inner in module.named_modules():
                if isinstance(inner, _SEEN):
                    yield f"{layer}.{path}", inner


def _sum(values: list[Tensor]) -> tuple[float, int]:
    return float(sum(x.abs().sum() for x in values)), sum(x.numel() for x in values)


def _merged(ranks: Sequence[Sums]) -> Sizes:
    """Return the means over all ranks; whatever is replicated is so equally often."""
    merged: Sums = {}
    for sums in ranks:
        for name, measures in sums.items():
            for measure, (total, count) in measures.items():
                there, so_far = merged.setdefault(name, {}).get(measure, (0.0, 0))
                merged[name][measure] = there + total, so_far + count
    means: dict[str, dict[str, float]] = {}
    for name, measures in merged.items():
        means[name] = {measure: total / count for measure, (total, count) in measures.items()}
    return means
