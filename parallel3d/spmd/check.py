"""The check of a model's layers on tensor-parallel ranks, without starting one (floor 4).

One layer of each kind runs forward and backward on the meta device, once as the group's first rank
and once as its last one. From what its inputs and parameters are, each operator tells what its
result is, and each collective what it makes of it.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel3d import models
from parallel3d.config import RunConfig
from parallel3d.engine.reduction import Reduction
from parallel3d.errors import TrainingError
from parallel3d.model.spec import LayerSpec
from parallel3d.spmd.infer import Finding, Inference
from parallel3d.spmd.kinds import (
    PARTIAL,
    REPLICATED,
    UNKNOWN,
    Kind,
    Partial,
    Replicated,
    Unknown,
    Zero,
    cut,
)
from parallel3d.spmd.running import LayerRun, run_layer
from parallel3d.spmd.trace import CallSite, Differs, Node, joined
from parallel3d.tensor.cut import Cut as ParameterCut

_ANY_VOCABULARY = 1000  # of a corpus that is not known yet


def type_errors(config: RunConfig) -> list[str]:
    """What does not match between a config's layers on tp and dp ranks, a line for each.

    The config must have a mesh. Each line names the layer, file and line, and the rule.
    """
    return list(dict.fromkeys(f"{f.place}: {f.text}" for f in findings(config) if f.is_error))


def refuse_mismatches(config: RunConfig) -> None:
    """Raise TrainingError, with a line for each, if a config's layers do not match on tp ranks."""
    if lines := type_errors(config):
        head = f"the layers do not match on parallel3d.mesh.tp = {config.mesh.tp} ranks:"
        end = "mend the layer; if it is right, set parallel3d.train.check_layers to false"
        raise TrainingError("\n  ".join([head, *lines, end]))


def findings(config: RunConfig) -> list[Finding]:
    """Each mismatch between ranks, and each operator that could not be judged."""
    if config.mesh.tp == 1 and config.mesh.dp == 1:
        return []
    model = config.model
    if model.vocab_size == "auto":
        model = model.model_copy(update={"vocab_size": _ANY_VOCABULARY})
    layers = models.layers(model)
    kinds = {(layer.build, layer.params): layer for layer in reversed(layers)}
    found: list[Finding] = []
    for layer in reversed(kinds.values()):
        place = "first" if layer is layers[0] else "last" if layer is layers[-1] else "middle"
        found += _check(config, layer, place)
    return found


def _check(config: RunConfig, layer: LayerSpec, place: str) -> Iterator[Finding]:
    tp, dp = config.mesh.tp, config.mesh.dp
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            runs = [
                run_layer(config, layer, place, rank) for rank in ((0, tp - 1) if tp > 1 else (0,))
            ]
            replicas = [run_layer(config, layer, place, 0, dp_coord=1)] if dp != 1 else []
        except Exception as error:  # the model's own code
            # What has no meaning or no kernel on the meta device may run well on another.
            fails = type(error) is RuntimeError and "meta" not in str(error).lower()
            text = f"does not run without a device: {str(error).partition(chr(10))[0]}"
            yield Finding(CallSite(layer.name, "", False), text, is_error=fails)
            return
    try:
        nodes = joined([run.program for run in runs])
        of_replicas = joined([run.program for run in (runs[0], *replicas)])
    except Differs as error:
        yield Finding(CallSite(layer.name, "", False), str(error))
        return
    if replicas and not config.data.isolate_documents:
        yield from _over_replicas(layer, place, runs[0], of_replicas, tp)
    if tp > 1:
        yield from _over_tp(config, layer, place, runs[0], nodes)


def _over_replicas(
    layer: LayerSpec, place: str, run: LayerRun, nodes: Sequence[Node], tp: int
) -> Iterator[Finding]:
    """Over dp each rank has its own samples: the first dim of what flows is cut."""
    inference = Inference(tp, "dp")
    for ref in (*run.inputs, *run.given):
        inference.set(ref, cut(0) if ref.shape else REPLICATED)
    for ref in run.parameters.values():
        inference.set(ref, REPLICATED)
    inference.follow(nodes[: run.num_before_sums])
    yield from (f._replace(text=f"over dp: {f.text}") for f in inference.findings)
    here = CallSite(layer.name, _source(run.module), False)
    result, expected = inference.kind(run.result), PARTIAL if place == "last" else cut(0)
    if not _is(result, expected):
        yield Finding(here, f"over dp its result is {result}; it must be {expected}")
    for name, ref in run.gradients.items():
        kind = inference.kind(ref)
        if not _is(kind, PARTIAL):
            at = CallSite(name, _source(_owner(run.module, name, layer.name)), True)
            yield Finding(at, f"over dp its gradient is {kind}, and the engine averages it")


def _over_tp(
    config: RunConfig, layer: LayerSpec, place: str, run: LayerRun, nodes: Sequence[Node]
) -> Iterator[Finding]:
    tp = config.mesh.tp
    flow = cut(1) if config.mesh.sequence_parallel else REPLICATED
    inference = Inference(tp)
    for ref in run.inputs:
        inference.set(ref, REPLICATED)
    for ref in run.given:
        inference.set(ref, flow if ref.shape else REPLICATED)
    for h in run.held:
        inference.set(run.parameters[h.name], _of_cut(h.cut))
    inference.follow(nodes[: run.num_before_sums])
    ends = list(_ends(layer, place, run, inference, flow))
    if not ends:
        inference.follow(nodes[run.num_before_sums :])
        ends = list(_sums(run, inference))
    found = [*inference.findings, *ends]
    yield from found
    unknown = [name for name, ref in run.gradients.items() if inference.kind(ref) == UNKNOWN]
    if unknown and not found:
        text = f"the gradients of {', '.join(unknown)} could not be followed"
        yield Finding(CallSite(layer.name, "", True), text, is_error=False)


def _of_cut(of: ParameterCut) -> Kind:
    return REPLICATED if of.dim is None else cut(of.dim)


def _is(kind: Kind, expected: Kind) -> bool:
    """Whether a value may be taken for what is expected; nothing is said of what is unknown."""
    if isinstance(kind, Unknown | Zero):
        return True
    if isinstance(expected, Replicated):
        return isinstance(kind, Replicated)
    if isinstance(kind, Partial):
        return isinstance(expected, Partial) and kind.op == "sum"
    return kind == expected


def _ends(
    layer: LayerSpec, place: str, run: LayerRun, inference: Inference, flow: Kind
) -> Iterator[Finding]:
    """What flows out, what flows back, and the gradients: against what others take them for."""
    here = CallSite(layer.name, _source(run.module), False)
    result, expected = inference.kind(run.result), REPLICATED if place == "last" else flow
    if not _is(result, expected):
        what = "loss" if place == "last" else "value that flows to the next layer"
        yield Finding(here, f"the {what} is {result}; it must be {expected}")
    if place == "middle" and run.result.shape != run.given[0].shape:
        text = f"takes a value of shape {run.given[0].shape}, and gives one of {run.result.shape}"
        yield Finding(here, text)
    if run.gradient is not None and not _is(inference.kind(run.gradient), flow):
        found = inference.kind(run.gradient)
        text = f"the gradient that flows to the layer before is {found}; it must be {flow}"
        yield Finding(here._replace(backward=True), text)
    for h in run.held:
        at = CallSite(h.name, _source(_owner(run.module, h.name, layer.name)), True)
        if h.name not in run.gradients:
            yield Finding(at, "gets no gradient")
            continue
        kind = inference.kind(run.gradients[h.name])
        if h.cut.dim is not None:
            if not _is(kind, _of_cut(h.cut)):
                text = f"its gradient is {kind}; it must be cut along dim {h.cut.dim} as it is"
                yield Finding(at, text)
        elif h.partial and not _is(kind, PARTIAL):
            text = f"its gradient is {kind}, and the engine sums it over tp (ParamSpec.is_partial)"
            yield Finding(at, text)
        elif not h.partial and not _is(kind, REPLICATED):
            remedy = "; nobody sums it: ParamSpec.is_partial is to say so, or f or g is missing"
            yield Finding(at, f"its gradient is {kind}{remedy if kind == PARTIAL else ''}")


def _sums(run: LayerRun, inference: Inference) -> Iterator[Finding]:
    """The gradients after the engine's sums, as data parallelism takes them."""
    for h in run.held:
        kind = inference.kind(run.gradients[h.name])
        if not _is(kind, _of_cut(h.cut)):
            at = CallSite(h.name, _source(Reduction, "_sum"), True)
            yield Finding(at, f"its gradient is {kind} when the engine has summed it over tp")


def _owner(module: nn.Module, parameter: str, layer: str) -> nn.Module:
    path = parameter.removeprefix(f"{layer}.").rpartition(".")[0]
    return module.get_submodule(path)


def _source(owner: Any, method: str = "forward") -> str:
    """The file and line at which a module's (or a class's) method begins."""
    function = getattr(owner, method)
    try:
        path, line = Path(str(inspect.getsourcefile(function))), inspect.getsourcelines(function)[1]
    except (OSError, TypeError):
        return ""
    root = Path(__file__).parents[2]
    return f"{path.relative_to(root) if path.is_relative_to(root) else path}:{line}"
