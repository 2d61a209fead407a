"""Finds out what a model of transformers consists of, on the meta device."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from parallel3d.base.errors import ConfigError
from parallel3d.model.spec import CutOver, Init, ParamSpec
from parallel3d.models.common import vocab_size
from parallel3d.models.pretrained import NEUTRAL
from parallel3d.models.transformers.facts import Facts, Sizes, Sparse, Unsupported, kept
from parallel3d.models.transformers.initial_values import recorded
from parallel3d.models.transformers.plans import ROW
from parallel3d.models.transformers.regions import LayerPlan, Place
from parallel3d.models.transformers.routed import routers_of
from parallel3d.models.transformers.skeleton import Findings, Skeleton, named_biases
from parallel3d.models.transformers.spec import Config

_TYPO = 0.9  # difflib's ratio of a misspelt field
# Fields of every config.json that are no setting of the architecture, and earlier names.
_GENERAL = (
    "auto_map",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
)


def settings_of(config: str) -> Any:
    """Return the transformers config of some fields as JSON; raises Unsupported."""
    fields = json.loads(config)
    kind = str(fields.get("model_type"))
    if kind not in CONFIG_MAPPING:
        rule = "is not known to transformers" if "model_type" in fields else "is missing"
        raise Unsupported(rule, remedy=_instead_of(fields))
    if fields.get("quantization_config"):
        text = "quantizes the weights, which parallel3d does not support"
        raise Unsupported(text, "quantization_config", "remove it, to train them unquantized")
    chosen = CONFIG_MAPPING[kind]
    default = chosen()
    text = default.get_text_config()
    if text is not default and not default.is_encoder_decoder:
        raise Unsupported(
            f'has more than a text model; its text model is a "{text.model_type}"',
            remedy=f'use the fields of its text_config, with "model_type": "{text.model_type}"',
        )
    known = _known_to(default)
    own = {}
    for name, value in fields.items():
        # A null that the class does not know would hide the default of what reads it (head_dim).
        if name != "model_type" and (value is not None or name in known):
            own[name] = value
    try:
        with _quiet():
            settings = chosen(**own)
    # Broad: each class checks its fields in its own way.
    except Exception as error:
        named = re.search(r"field '(\w+)'", str(error))
        where = named[1] if named and named[1] in fields else "model_type"
        reason = str(error).splitlines()[-1].strip()
        text = f"is refused by {chosen.__name__}: {reason}"
        raise Unsupported(text, where, "change its fields") from None
    for name in _unknown(fields, settings):
        if _is_misspelt(name, known):
            otherwise = "remove it, or use another model"
            raise Unsupported(f"is no field of a {kind}", name, _near(name, known, otherwise))
    settings.use_cache = False
    # Broad: some classes check their fields in a way of their own.
    with suppress(Exception):  # in pretraining every token counts
        settings.pad_token_id = None
    return settings


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to ourselves what a class of configs remarks on fields that training does not read."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _known_to(default: Any) -> set[str]:
    """Return the names of the fields that a class of configs has, by its defaults."""
    own = {name for name in default.to_dict() if not name.startswith("_")}
    return {*own, *default.attribute_map, *NEUTRAL, *_GENERAL}


def _unknown(fields: Mapping[str, object], settings: Any) -> list[str]:
    """Return the fields with a value that a class of configs does not have, but keeps.

    Published files have many: those of an earlier version, of code beside them, of other programs.
    The class has taken those that it does not keep for others, whose earlier names they are.
    """
    known = _known_to(type(settings)())
    named = {name for name, value in fields.items() if value is not None and name not in known}
    return sorted(name for name in named if name[:1] != "_" and hasattr(settings, name))


def _is_misspelt(name: str, known: Iterable[str]) -> bool:
    """Return True if an unknown field is nearly a known one, and not that one with more words."""
    near = get_close_matches(name, known, n=1, cutoff=_TYPO)
    return bool(near) and not _words_of(near[0]) < _words_of(name)


def _words_of(name: str) -> set[str]:
    return set(filter(None, name.split("_")))


def _instead_of(fields: Mapping[str, Any]) -> str:
    """Return a remedy for an unknown model_type: that of the class which the file names, if any."""
    names = fields.get("architectures") or ()
    found = []
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name in names:
            found.append((SequenceMatcher(None, kind, name.lower()).ratio(), kind))
    if found:  # several types may have one class
        kind = max(found)[1]
        return f'"architectures" names the class of "{kind}", which is the model_type to use'
    if "model_type" not in fields:
        return "add it"
    return _near(str(fields["model_type"]), CONFIG_MAPPING, "use another model")


def _near(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a remedy for an unknown name: there are too many known ones to list."""
    near = get_close_matches(name, known, n=1)
    return f'the nearest one is "{near[0]}"' if near else otherwise


FINDINGS = TypeAdapter(Findings)
"""Reads and writes what is found out by running a model."""


@lru_cache(maxsize=32)
def skeleton_from(config: str) -> Skeleton:
    """Return the skeleton of a model from the fields of its config.json; raises Unsupported."""
    settings = settings_of(config)
    made = []

    def find() -> str:
        made.append(Skeleton(settings))
        return FINDINGS.dump_json(made[0].findings).decode()

    try:
        text = kept(Skeleton.__module__, config, find)
        return made[0] if made else Skeleton(settings, FINDINGS.validate_json(text))
    except Unsupported:
        raise
    # Broad: an architecture's own code may fail in any way, on a config that it does not expect.
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise Unsupported(f"cannot be cut into stages ({type(error).__name__}: {first})") from None


@lru_cache(maxsize=32)
def skeleton_of(config: Config) -> Skeleton:
    """Return the skeleton of a model's config: that of its facts, with rows for its vocabulary."""
    return skeleton_from(config.json_of_facts).with_vocabulary(vocab_size(config))


def find(config: str) -> Facts:
    """Return the facts of a model from the fields of its config.json; raises Unsupported."""
    skeleton = skeleton_from(config)
    try:
        inits = recorded(skeleton.model)
    except ConfigError as error:
        raise Unsupported(str(error)) from None
    prefix = f"{skeleton.prefix}." if skeleton.prefix else ""
    embedding = []
    for child in skeleton.watched.before:
        for name, parameter in getattr(skeleton.base, child).named_parameters():
            place = Place(tuple(parameter.shape), whole=True)
            own = f"{child}.{name}"
            if child == skeleton.token:
                place = Place(tuple(parameter.shape), 0)
                own = f"{child}.table.{name}"
            embedding.append(_spec(own, parameter, place, inits[f"{prefix}{child}.{name}"]))
    blocks = []
    sparse = []
    first: dict[object, int] = {}
    kinds = []
    for number, layer in enumerate(skeleton.layers):
        plan = LayerPlan(skeleton, number)
        specs = []
        for name, parameter in layer.named_parameters():
            init = inits[f"{prefix}{skeleton.list}.{number}.{name}"]
            spec = _spec(f"layer.{name}", parameter, plan.place(name), init)
            specs.append(replace(spec, role="hidden") if _is_hidden(layer, name) else spec)
        for name, bias in named_biases(layer).items():
            path = f"{prefix}{skeleton.list}.{number}.{name}"
            if inits.get(path, Init()) != Init():
                raise Unsupported(f"has the parameter {path}, which gets no gradient")
            own = f"layer.{name}"
            specs.append(ParamSpec(own, tuple(bias.shape), (), Init(), False, role="balance"))
        blocks.append(tuple(specs))
        sparse.append(_experts_of(skeleton, plan))
        kinds.append(first.setdefault(_kind(plan, specs), number))
    head = []
    for child in skeleton.watched.after:
        for name, parameter in getattr(skeleton.base, child).named_parameters():
            place = Place(tuple(parameter.shape))
            own = f"tail.{child}.{name}"
            head.append(_spec(own, parameter, place, inits[f"{prefix}{child}.{name}"]))
    table = f"{prefix}{skeleton.token}.weight"
    for name, parameter in skeleton.model.get_output_embeddings().named_parameters():
        init = inits.get(f"{skeleton.output}.{name}") or inits[table]
        head.append(_spec(f"output.{name}", parameter, Place(tuple(parameter.shape), 0), init))
    tied: tuple[tuple[str, str], ...] = ()
    if skeleton.is_tied:
        tied = (("output.weight", f"embedding.{skeleton.token}.table.weight"),)
    calls = skeleton.watched.calls.values()
    if any(call.softcap is not None and call.dropout for call in calls):
        raise Unsupported("has dropout of soft-capped scores; set attention_dropout to 0")
    return Facts(
        sizes=_sizes(skeleton),
        embedding=tuple(embedding),
        blocks=tuple(blocks),
        head=tuple(head),
        tied=tied,
        cut=_share_cut(spec for block in blocks for spec in block),
        kinds=tuple(kinds),
        isolates=skeleton.isolates,
        attention_dropout=max((call.dropout for call in calls), default=0.0),
        sparse=tuple(sparse),
        balance=skeleton.balance,
        unknown=tuple(_unknown(json.loads(config), skeleton.settings)),
    )


def _experts_of(skeleton: Skeleton, plan: LayerPlan) -> Sparse:
    if plan.experts is None:
        return Sparse()
    experts = plan.layer.get_submodule(plan.experts)
    scores = routers_of(plan.layer, skeleton)
    return Sparse(int(experts.num_experts), int(experts.parallel3d_choices), len(scores) == 1)


def _spec(name: str, like: nn.Parameter, place: Place, init: Init) -> ParamSpec:
    cut: CutOver = ("experts",) if place.experts else ()
    if place.dim is not None:
        cut = (*cut, *[None] * (place.dim - len(cut)), "tensor")
    decays = like.dim() > 1 and not name.endswith("bias")  # matrices, and experts'
    return ParamSpec(
        name,
        place.shape,
        cut,
        init,
        decays,
        units=place.units,
        partial=place.partial,
        whole=place.whole,
    )


def _kind(plan: LayerPlan, specs: list[ParamSpec]) -> object:
    """Return what decides on a layer's cost: its modules, its parameters, and its attention."""
    modules = [(name, type(module)) for name, module in plan.layer.named_modules()]
    params = [replace(spec, init=Init()) for spec in specs]
    calls = [(name, call._replace(scale=None)) for name, call in plan.calls.items()]
    return tuple(modules), tuple(params), tuple(calls)


def _is_hidden(layer: nn.Module, name: str) -> bool:
    """True for the weight of a linear layer or of experts, but not of a router."""
    owner, _, leaf = name.rpartition(".")
    module = layer.get_submodule(owner)
    if isinstance(module, nn.Linear | Conv1D):
        return leaf == "weight" and not owner.endswith(("gate", "router"))
    is_packed = hasattr(module, "is_concatenated")
    return is_packed and layer.get_parameter(name).dim() == 3


def _share_cut(specs: Iterator[ParamSpec]) -> float:
    total = 0
    cut = 0
    for spec in specs:
        total += spec.numel
        if spec.cut_over:
            cut += spec.numel
    return cut / total


def _sizes(skeleton: Skeleton) -> Sizes:
    settings = skeleton.settings
    calls = list(skeleton.watched.calls.values())
    heads = skeleton.heads
    hidden = settings.hidden_size
    return Sizes(
        hidden_size=hidden,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=min((call.kv_heads for call in calls), default=heads),
        head_size=calls[0].key_size if calls else hidden // heads,
        inner_size=_inner_size(skeleton),
        max_position_embeddings=getattr(settings, "max_position_embeddings", None) or 2**31,
        initializer_range=getattr(settings, "initializer_range", None) or 0.02,
    )


def _inner_size(skeleton: Skeleton) -> int:
    """Return the widest dim that a row-parallel layer sums over, or 4 x hidden."""
    widths = [0]
    plan = LayerPlan(skeleton, 0)
    for name, module in skeleton.layers[0].named_modules():
        is_in_region = name.rpartition(".")[0] in plan.regions
        if isinstance(module, nn.Linear) and is_in_region and plan.style(name) == ROW:
            widths.append(module.in_features)
    return max(widths) or 4 * int(skeleton.settings.hidden_size)


def answer(config: str) -> str:
    """Return the facts of a model, or why it is not supported, as JSON (`facts`)."""
    try:
        return json.dumps(asdict(find(config)))
    except Unsupported as error:
        return json.dumps({"unsupported": [str(error), error.field, error.remedy]})
