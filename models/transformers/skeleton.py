"""A causal language model of transformers without memory for its weights, and what it consists of.

A stage never repeats the model's forward: it calls the architecture's own, in which all layers but
its own pass their input on (`Skeleton.around`).
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from parallel3d.models.transformers import attention, experts, scored_inputs, trials
from parallel3d.models.transformers.facts import Unsupported
from parallel3d.models.transformers.on_meta import EmptyOnMeta
from parallel3d.models.transformers.plans import gathered, plan_of
from parallel3d.models.transformers.stand_ins import (
    Nothing,
    Port,
    Remembered,
    Same,
)
from parallel3d.models.transformers.watched import (
    IMPLEMENTATION,
    Watched,
    check_parameters,
    has_parameters,
    watch,
)

_MIXERS = re.compile(r"Conv(?!1D)|Mamba|SSM|Mixer|Delta|Recurrent|LinearAttention|RWKV|LSTM")
"""In the names of classes that mix tokens without attention (GPT-2's Conv1D is linear)."""


@dataclass
class Findings:
    """The facts that only a run of the model shows; to find them takes most of a skeleton's time.

    - `width`, `is_alone`, `has_plain_table`, `logits`: see `trials`.
    - `rms_norms`: the modules that compute an RMSNorm, and their eps, by name.
    """

    watched: Watched
    width: int
    is_alone: bool
    has_plain_table: bool
    logits: trials.Logits
    rms_norms: dict[str, float]


class Skeleton:
    """The parts of a causal language model of transformers; its parameters are on the meta device.

    - `model`: the whole model. `base`: the part without the output projection, at `prefix`.
    - `list`: the name of the base's list of layers. `token`: that of its table of tokens.
    - `output`: the name of the output projection in the model.
    - `plan`: the style of each linear layer under tensor parallelism (`plan_of`).
    - `known`: the findings of another skeleton of the same settings; None: find them out.

    Raises Unsupported, with the reason, for a model that cannot be cut into stages.
    """

    def __init__(self, settings: Any, known: Findings | None = None) -> None:
        adds_balance = getattr(settings, "output_router_logits", False)
        settings.output_router_logits = False  # no stage has the scores of all layers
        self.model = _built(settings)
        self.settings: Any = self.model.config
        self.base = self._find_base()
        self.prefix = _name_of(self.base, self.model)
        self.list = self._find_layers()
        self.layers = list(getattr(self.base, self.list))
        table = self.model.get_input_embeddings()
        output = self.model.get_output_embeddings()
        if type(output) is not nn.Linear:  # a class of its own may do more than a product
            raise Unsupported("has no plain linear output projection")
        self.output = _name_of(output, self.model)
        self.plan = plan_of(settings)
        self.watched = watch(self) if known is None else known.watched
        for name, count in self.watched.choices.items():
            self.model.get_submodule(name).parallel3d_choices = count
        self.token = next((n for n in self.watched.before if getattr(self.base, n) is table), "")
        rows = table.weight.shape[0]
        if rows != settings.vocab_size:
            more = rows - settings.vocab_size
            raise Unsupported(f"has a table with {more} rows more than vocab_size")
        if not self.token:
            raise Unsupported("does not look its tokens up in a table of the base model first")
        if known is None:
            check_parameters(self)
        self._device = torch.device("cpu")
        self._inputs: tuple[object, dict[str, Any]] = (None, {})
        self._angles = {
            name: Remembered(child)
            for name, child in self.base.named_children()
            if "Rotary" in type(child).__name__ and not has_parameters(child)
        }
        self.is_alone = False
        self.width = 1
        if known is None:
            self.rms_norms = self._find_rms_norms()
            self.width = trials.width_of(self)
            self.is_alone = trials.may_be_alone(self)
            self.has_plain_table = trials.has_plain_table(self)
            self.logits = trials.logits_of(self)
        else:
            found = known.rms_norms.items()
            self.rms_norms = {self.model.get_submodule(name): eps for name, eps in found}
            self.width = known.width
            self.is_alone = known.is_alone
            self.has_plain_table = known.has_plain_table
            self.logits = known.logits
        self.balance = experts.balance_of(self.model) if adds_balance else 0.0

    @property
    def findings(self) -> Findings:
        """The findings of the model's run, to be kept."""
        names = {module: name for name, module in self.model.named_modules()}
        norms = {names[module]: eps for module, eps in self.rms_norms.items()}
        return Findings(
            self.watched, self.width, self.is_alone, self.has_plain_table, self.logits, norms
        )

    def with_vocabulary(self, size: int) -> "Skeleton":
        """Return the skeleton of the same model with another vocabulary, at no cost."""
        own = copy.copy(self)
        vars(own).pop("shapes", None)
        table = _with_rows(self.model.get_input_embeddings(), size)
        output = _with_rows(self.model.get_output_embeddings(), size)
        if self.is_tied:
            output._parameters["weight"] = table._parameters["weight"]
        model = _with_module(self.model, f"{self.prefix}.{self.token}".removeprefix("."), table)
        own.model = _with_module(model, self.output, output)
        own.base = own.model.get_submodule(self.prefix)
        own.settings = own.model.config = copy.copy(self.settings)
        own.settings.vocab_size = size
        return own

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter and bias of scores, by its name in transformers."""
        stored = {**self.model.state_dict()}
        return {name: tuple(x.shape) for name, x in stored.items() if name not in self.constants}

    @cached_property
    def constants(self) -> list[str]:
        """The buffers that transformers saves with the weights, but for biases of scores."""
        names = set(self.model.state_dict())
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            names.discard(name)
        for number, layer in enumerate(self.layers):
            for name in named_biases(layer):
                names.discard(f"{self.prefix}.{self.list}.{number}.{name}".removeprefix("."))
        return sorted(names)

    def saved(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that `save_pretrained` writes for some of the model's own."""
        saved: dict[str, Tensor] = revert_weight_conversion(self.model, weights)
        return saved

    @property
    def is_tied(self) -> bool:
        """True if the output projection has the table's weight."""
        table = self.model.get_input_embeddings()
        return bool(
            self.model.get_output_embeddings().weight is table.weight
            or self.settings.tie_word_embeddings
        )

    @property
    def heads(self) -> int:
        """The attention heads, which ranks share; features, in a model without attention."""
        return int(getattr(self.settings, "num_attention_heads", None) or self.settings.hidden_size)

    @property
    def has_interface(self) -> bool:
        """True if the attention is computed by the library's function."""
        return bool(self.settings._attn_implementation == IMPLEMENTATION)

    @property
    def isolates(self) -> bool:
        """True if only the library's attention mixes tokens, at positions that can be given.

        Each layer calls it, and has nothing else that is known to mix them: a convolution, or
        states that one token hands to the next.
        """
        prefix = f"{self.prefix}." if self.prefix else ""
        for number, layer in enumerate(self.layers):
            place = f"{prefix}{self.list}.{number}."
            if not any(name.startswith(place) for name in self.watched.calls):
                return False
            kinds = {type(module).__name__ for module in layer.modules()}
            if any(_MIXERS.search(kind) for kind in kinds):
                return False
        takes_positions = "position_ids" in signature(self.base.forward).parameters
        takes_positions &= not self.watched.counts
        has_chunks = any(call.sight.chunk is not None for call in self.watched.calls.values())
        # Its rotation depends on the last position of all tokens that are computed together.
        is_long = "longrope" in str(getattr(self.settings, "rope_parameters", None))
        return self.has_interface and takes_positions and not has_chunks and not is_long

    def around(
        self, number: int, layer: nn.Module | None, replaced: Mapping[str, nn.Module]
    ) -> tuple[nn.Module, Port]:
        """Return the base model around one layer, and the port at this layer.

        Its own modules before and after the layers do nothing, unless they are `replaced`.
        """
        numbers = [number] if self.is_alone else range(len(self.layers))
        ports = {
            i: Port(self.layers[i], self.watched.tuples.get(i), layer if i == number else None)
            for i in numbers
        }
        base = _shallow(self.base)
        base._modules[self.list] = nn.ModuleList(ports.values())
        if self.is_alone:
            base.config = self._config_at(number)
        base._modules.update(self._angles)
        for name in (*self.watched.before, *self.watched.after):
            is_table = isinstance(getattr(self.base, name), nn.Embedding)
            base._modules[name] = Nothing() if is_table else Same()
        base._modules.update(replaced)
        return base, ports[number]

    def whole(self, base: nn.Module, output: nn.Module) -> nn.Module:
        """Return the model around another base and another output projection."""
        model = _with_module(self.model, self.prefix, base)
        return _with_module(model, self.output, output)

    @cached_property
    def gathered(self) -> frozenset[str]:
        """The linear layers of the base model that are cut beside those of the plan, by name."""
        prefix = f"{self.prefix}." if self.prefix else ""
        plain = {name.removeprefix(prefix) for name in self.watched.plain}
        return gathered(self.plan, self.layers, self.list, plain, self.heads)

    def _find_rms_norms(self) -> dict[nn.Module, float]:
        """Return the modules that compute an RMSNorm, found by trying, with their eps.

        Those of transformers keep copies in fp32 for the backward, a fused kernel does not.
        """
        known: dict[object, bool] = {}
        found = {}
        for path, module in self.model.named_modules():
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            names = [name for name, _ in module.named_parameters()]
            if names != ["weight"] or not isinstance(eps, float) or module._buffers:
                continue
            if path not in self.watched.plain:
                continue
            key = type(module), eps, tuple(module.get_parameter("weight").shape)
            if key not in known:
                known[key] = trials.computes_rms_norm(module, eps)
            if known[key]:
                found[module] = eps
        return found

    def move_buffers(self, device: torch.device) -> None:
        """Move the tables that the model's own modules hold (frequencies) to a device, once."""
        if device == self._device:
            return
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._device = device

    def forget(self) -> None:
        """Compute the inputs and angles anew that are asked for next."""
        self._inputs = (None, {})
        for angles in self._angles.values():
            angles.forget()

    def inputs_of(self, batch: int, seq: int, like: Tensor) -> dict[str, Any]:
        """Return inputs in place of embeddings that no layer reads, and without a cache."""
        key = (batch, seq, self.width, like.dtype, like.device)
        if self._inputs[0] != key:
            with torch.inference_mode(False):
                embeddings = like.new_zeros(1).expand(batch, seq, self.width)
                positions = torch.arange(seq, device=like.device).unsqueeze(0)
            names = {"inputs_embeds": embeddings, "position_ids": positions, "use_cache": False}
            self._inputs = (key, names)
        return dict(self._inputs[1])

    def _config_at(self, number: int) -> Any:
        """Return the base's config in which lists with an entry for each layer have one alone."""
        own = copy.copy(self.base.config)
        for name, value in vars(own).items():
            if isinstance(value, list) and len(value) == len(self.layers):
                vars(own)[name] = [value[number]]
        return own

    def _find_base(self) -> nn.Module:
        """Return the part that has the table of tokens: it is named in different ways."""
        table = self.model.get_input_embeddings()
        parts: list[nn.Module] = [self.model.get_decoder(), self.model.base_model]
        parts.extend(self.model.children())
        for part in parts:
            if part is not self.model and table in part.modules():
                return part
        raise Unsupported("has no part of its own for what is before the output projection")

    def _find_layers(self) -> str:
        count = self.settings.num_hidden_layers
        for name, module in self.base.named_children():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return name
        raise Unsupported(f"has no list of its {count} layers (num_hidden_layers)")


def biases_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own biases of experts' scores: buffers of zeros that are saved, by name.

    They have no gradient, and a published model has values in them.
    """
    found: dict[str, Tensor] = {}
    for name, buffer in module._buffers.items():
        if buffer is None or name in module._non_persistent_buffers_set:
            continue
        is_zero = buffer.is_meta or not buffer.any()
        is_vector = buffer.dim() > 0 and buffer.numel() == max(buffer.shape)
        if is_vector and buffer.is_floating_point() and is_zero:
            found[name] = buffer
    return found


def named_biases(layer: nn.Module) -> dict[str, Tensor]:
    """Return the biases of experts' scores in a layer, by name."""
    found = {}
    for name, module in layer.named_modules():
        for leaf, bias in biases_of(module).items():
            found[f"{name}.{leaf}".removeprefix(".")] = bias
    return found


def _built(settings: Any) -> PreTrainedModel:
    """Return the model of a config with its buffers, and its parameters on the meta device."""
    kind = type(settings)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unsupported(f"is no causal language model of transformers ({settings.model_type})")
    if settings.is_encoder_decoder:
        raise Unsupported("has an encoder")
    chosen = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    own_attention = attention.implementation_of(chosen, IMPLEMENTATION)
    with init_empty_weights(include_buffers=False), no_init_weights(), EmptyOnMeta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            settings,
            dtype=torch.float32,
            attn_implementation=own_attention,
            experts_implementation="eager",
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise Unsupported(f"has the buffer {name} without values")
    for module in model.modules():
        _hold_frozen_as_buffers(module)
    scored_inputs.adapt(model)
    experts.register(IMPLEMENTATION)
    for module in model.modules():  # transformers refuses names of others, but runs them
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._experts_implementation_internal = IMPLEMENTATION
    return model.train()


def _hold_frozen_as_buffers(module: nn.Module) -> None:
    """Make buffers of a module's vectors that are declared to have no gradient (`biases_of`)."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None or parameter.requires_grad:
            continue
        if parameter.numel() == max(parameter.shape, default=0):
            del module._parameters[name]
            module.register_buffer(name, torch.zeros(parameter.shape, dtype=parameter.dtype))


def _name_of(module: nn.Module, inside: nn.Module) -> str:
    names: dict[nn.Module, str] = {own: name for name, own in inside.named_modules()}
    return names[module]


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its parts, which can be replaced."""
    shell = copy.copy(module)
    object.__setattr__(shell, "_modules", dict(module._modules))
    return shell


def _with_rows(module: Any, count: int) -> nn.Module:
    """Return a shallow copy of a module whose parameters have so many rows."""
    shell = _shallow(module)
    shell._parameters = {}
    for name, parameter in module._parameters.items():
        rows = parameter
        if parameter is not None:
            rows = nn.Parameter(parameter.new_empty(count, *parameter.shape[1:]))
        shell._parameters[name] = rows
    return shell


def _with_module(module: nn.Module, path: str, value: nn.Module) -> nn.Module:
    """Return a shallow copy of a module with another module at a path."""
    shell = _shallow(module)
    head, _, rest = path.partition(".")
    inner = module._modules[head]
    assert inner is not None, path
    shell._modules[head] = _with_module(inner, rest, value) if rest else value
    return shell
