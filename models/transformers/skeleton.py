"""A causal language model of transformers without memory for its weights, and what it consists of.

A stage never repeats the model's forward: it calls the architecture's own, in which all layers but
its own pass their input on (`Skeleton.around`).
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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

from parallel3d.models.transformers import attention, experts, trials
from parallel3d.models.transformers.facts import Unsupported
from parallel3d.models.transformers.on_meta import EmptyOnMeta, MixedWithMeta, tables_kept
from parallel3d.models.transformers.plans import gathered, plan_of
from parallel3d.models.transformers.stand_ins import (
    Nothing,
    Port,
    Remembered,
    Same,
)

IMPLEMENTATION = "parallel3d"
"""The name of the library's functions in the interfaces of transformers."""
_MIXERS = re.compile(r"Conv(?!1D)|Mamba|SSM|Mixer|Delta|Recurrent|LinearAttention|RWKV|LSTM")
"""In the names of classes that mix tokens without attention (GPT-2's Conv1D is linear)."""
_PROBE = (2, 8)  # the batch and the sequence of the forward that is watched


@dataclass
class Watched:
    """The findings of one forward and backward on the meta device.

    - `tuples`: the layers that return tuples, and how many values those have.
    - `before`, `after`: the modules of the base model that run before and after all layers, by
      name: those with weights, and norms without.
    - `calls`: the calls of attention functions, by the module that made them.
    - `without_gradient`: parameters that no gradient reached.
    - `plain`: the modules without parts of their own that were called, with one tensor and nothing
      else, by name. Another one's weight may be read by its parent.
    """

    tuples: dict[int, int] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    calls: dict[str, attention.Call] = field(default_factory=dict)
    without_gradient: list[str] = field(default_factory=list)
    plain: set[str] = field(default_factory=set)


class Skeleton:
    """The parts of a causal language model of transformers; its parameters are on the meta device.

    - `model`: the whole model. `base`: the part without the output projection, at `prefix`.
    - `list`: the name of the base's list of layers. `token`: that of its table of tokens.
    - `output`: the name of the output projection in the model.
    - `plan`: the style of each linear layer under tensor parallelism (`plan_of`).

    Raises Unsupported, with the reason, for a model that cannot be cut into stages.
    """

    def __init__(self, settings: Any) -> None:
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
        self.watched = self._watch()
        self.token = next((n for n in self.watched.before if getattr(self.base, n) is table), "")
        rows = table.weight.shape[0]
        if rows != settings.vocab_size:
            more = rows - settings.vocab_size
            raise Unsupported(f"has a table with {more} rows more than vocab_size")
        if not self.token:
            raise Unsupported("does not look its tokens up in a table of the base model first")
        self._check_parameters()
        _ = self.rms_norms  # tried here, not where ZeRO-3 changes how tensors are made
        self._device = torch.device("cpu")
        self.width = 1
        self._inputs: tuple[object, dict[str, Any]] = (None, {})
        self._angles = {
            name: Remembered(child)
            for name, child in self.base.named_children()
            if "Rotary" in type(child).__name__ and not _has_parameters(child)
        }
        self.is_alone = False
        self.width = trials.width_of(self)
        self.is_alone = trials.may_be_alone(self)
        self.has_plain_table = trials.has_plain_table(self)
        self.logits = trials.logits_of(self)
        self.balance = experts.balance_of(self.model) if adds_balance else 0.0

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
        # Its rotation depends on the last position of all tokens that are computed together.
        is_long = "longrope" in str(getattr(self.settings, "rope_parameters", None))
        return self.has_interface and takes_positions and not is_long

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

    @cached_property
    def rms_norms(self) -> dict[nn.Module, float]:
        """The modules that compute an RMSNorm, found by trying, with their eps.

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

    def _watch(self) -> Watched:
        """Run the model forward and backward on the meta device, and note what happens."""
        found = Watched()
        order: list[str] = []
        states: dict[int, int] = {}  # tensors that a layer returned besides the stream
        hooks = []
        names = {module: name for name, module in self.model.named_modules()}

        def leave(number: int, _: nn.Module, output: object) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if isinstance(output, tuple):
                found.tuples[number] = len(output)
            shape = (*_PROBE, self.settings.hidden_size)
            if not isinstance(parts[0], Tensor) or tuple(parts[0].shape) != shape:
                raise Unsupported("has layers that pass on more than one stream of [hidden_size]")
            states.update({id(x): number for x in parts[1:] if isinstance(x, Tensor)})
            kept.extend(parts)

        def enter(number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
            order.append("")
            for value in (*args, *kwargs.values()):
                if id(value) in states:
                    raise Unsupported(
                        f"passes a state from layer {states[id(value)]} to layer {number}, besides "
                        "the stream"
                    )

        def pass_through(name: str, child: nn.Module, output: object) -> None:
            shape = (*_PROBE, self.settings.hidden_size)
            changes = isinstance(output, Tensor) and tuple(output.shape) == shape
            if _has_parameters(child) or (changes and not isinstance(child, nn.Dropout)):
                order.append(name)

        def call(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            (odd if kwargs or len(args) != 1 else found.plain).add(name)

        odd: set[str] = set()
        for module, name in names.items():
            if not module._modules:
                called = _bound(call, name)
                hooks.append(module.register_forward_pre_hook(called, with_kwargs=True))
        kept: list[object] = []  # so that no id is given twice
        dropouts = [m for m in self.model.modules() if isinstance(m, nn.Dropout)]
        probabilities = [module.p for module in dropouts]
        for module in dropouts:  # the library's take their places
            module.p = 0.0
        for number, layer in enumerate(self.layers):
            enter_hook = _bound(enter, number)
            hooks.append(layer.register_forward_pre_hook(enter_hook, with_kwargs=True))
            hooks.append(layer.register_forward_hook(_without_input(leave, number)))
        for name, child in self.base.named_children():
            if name != self.list:
                hooks.append(child.register_forward_hook(_without_input(pass_through, name)))
        tokens = torch.zeros(_PROBE, dtype=torch.int64)
        positions = torch.arange(_PROBE[1]).expand(_PROBE)
        try:
            mixed = MixedWithMeta()  # type: ignore[no-untyped-call]
            with (
                mixed,
                tables_kept(self.model),
                attention.recorded(IMPLEMENTATION) as calls,
            ):
                output = self.model(input_ids=tokens, position_ids=positions, use_cache=False)
                output.logits.float().sum().backward()
        except Unsupported:
            raise
        # Broad: the modules of an architecture raise errors of many types.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise Unsupported(f"cannot be traced without data ({reason})") from None
        finally:
            for hook in hooks:
                hook.remove()
            for module, p in zip(dropouts, probabilities, strict=True):
                module.p = p
        first = order.index("") if "" in order else len(order)
        last = len(order) - order[::-1].index("") if "" in order else 0
        found.before = list(dict.fromkeys(order[:first]))
        found.after = list(dict.fromkeys(order[last:]))
        found.plain -= odd
        found.calls = {names[module]: call for module, call in calls.items()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                found.without_gradient.append(name)
            parameter.grad = None
        return found

    def _check_parameters(self) -> None:
        """Raise Unsupported for parameters that no stage would have, or that do not train."""
        known = [f"{self.prefix}.{self.list}.", f"{self.output}."]
        for name in (*self.watched.before, *self.watched.after):
            known.append(f"{self.prefix}.{name}.")
        for name in self.watched.before:
            if name in self.watched.after and _has_parameters(getattr(self.base, name)):
                raise Unsupported(f"uses {name} before and after its layers")
        seen: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not name.startswith(tuple(known)):
                raise Unsupported(f"has the parameter {name} outside its layers")
            first = seen.setdefault(id(parameter), name)
            if first != name and not (name.startswith(self.output) and self.is_tied):
                raise Unsupported(f"shares the parameter {first} with {name}")
        if self.watched.without_gradient:
            first = self.watched.without_gradient[0]
            raise Unsupported(f"has the parameter {first}, which gets no gradient")


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


def _bound(function: Callable[..., None], first: object) -> Callable[..., None]:
    def hook(*args: object) -> None:
        function(first, *args)

    return hook


def _without_input(function: Callable[..., None], first: object) -> Callable[..., None]:
    def hook(module: nn.Module, _: object, output: object) -> None:
        function(first, module, output)

    return hook


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _name_of(module: nn.Module, inside: nn.Module) -> str:
    names: dict[nn.Module, str] = {own: name for name, own in inside.named_modules()}
    return names[module]


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its parts, which can be replaced."""
    shell = copy.copy(module)
    object.__setattr__(shell, "_modules", dict(module._modules))
    return shell


def _with_module(module: nn.Module, path: str, value: nn.Module) -> nn.Module:
    """Return a shallow copy of a module with another module at a path."""
    shell = _shallow(module)
    head, _, rest = path.partition(".")
    inner = module._modules[head]
    assert inner is not None, path
    shell._modules[head] = _with_module(inner, rest, value) if rest else value
    return shell
