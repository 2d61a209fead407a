"""The names of transformers for the parameters of another program.

Most programs train the modules of transformers, whose names they put behind a prefix. Others have
their own: Megatron-DeepSpeed, GPT-NeoX and torchtitan. In a pipeline of DeepSpeed, parameters have
the number of their layer, or the key of a tied module; blocks are the layers with attention.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d import models
from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.extras.foreign.checkpoints.tensors import FROM_WEIGHTS, ForeignTensor
from parallel3d.model.config import ModelConfig

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Derived:
    """A tensor of transformers: a foreign one, or a part of it, in another order."""

    tensor: ForeignTensor
    transform: Transform | None = None

    def read(self) -> Tensor:
        """Return the tensor in fp32; raises CheckpointError."""
        value = self.tensor.read()
        return value if self.transform is None else self.transform(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what `read` returns; raises RuntimeError if the tensor does not fit."""
        if self.transform is None:
            return self.tensor.shape
        return tuple(self.transform(torch.empty(self.tensor.shape, device="meta")).shape)


class _Layout(NamedTuple):
    """Where a class of transformers has the parts of a model."""

    block: str
    token: str
    position: str
    norm: str
    output: str


_LAYOUTS = {
    "gpt2": _Layout(
        "transformer.h.",
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.",
        "lm_head.weight",
    ),
    "gpt_neox": _Layout(
        "gpt_neox.layers.",
        "gpt_neox.embed_in.weight",
        "",
        "gpt_neox.final_layer_norm.",
        "embed_out.weight",
    ),
    "llama": _Layout(
        "model.layers.", "model.embed_tokens.weight", "", "model.norm.", "lm_head.weight"
    ),
}
# The names of Megatron-DeepSpeed and GPT-NeoX in a block, GPT-2's, and how these follow from them.
_GPT2 = """
input_layernorm.weight            ln_1.weight         same
input_layernorm.bias              ln_1.bias           same
attention.query_key_value.weight  attn.c_attn.weight  qkv transposed
attention.query_key_value.bias    attn.c_attn.bias    qkv
attention.dense.weight            attn.c_proj.weight  transposed
attention.dense.bias              attn.c_proj.bias    same
post_attention_layernorm.weight   ln_2.weight         same
post_attention_layernorm.bias     ln_2.bias           same
mlp.dense_h_to_4h.weight          mlp.c_fc.weight     transposed
mlp.dense_h_to_4h.bias            mlp.c_fc.bias       same
mlp.dense_4h_to_h.weight          mlp.c_proj.weight   transposed
mlp.dense_4h_to_h.bias            mlp.c_proj.bias     same
"""
# The same for Llama, then GPT-NeoX's own, and torchtitan's from `attention.wq.weight` on.
_LLAMA = """
attention.query_key_value.weight  self_attn.q_proj.weight          q
attention.query_key_value.weight  self_attn.k_proj.weight          k
attention.query_key_value.weight  self_attn.v_proj.weight          v
attention.dense.weight            self_attn.o_proj.weight          same
mlp.dense_h_to_4h.weight          mlp.gate_proj.weight             first half
mlp.dense_h_to_4h.weight          mlp.up_proj.weight               second half
mlp.dense_4h_to_h.weight          mlp.down_proj.weight             same
input_layernorm.scale             input_layernorm.weight           same
post_attention_layernorm.scale    post_attention_layernorm.weight  same
mlp.w1.weight                     mlp.gate_proj.weight             same
mlp.w3.weight                     mlp.up_proj.weight               same
mlp.w2.weight                     mlp.down_proj.weight             same
attention.wq.weight               self_attn.q_proj.weight          pairs
attention.wk.weight               self_attn.k_proj.weight          pairs
attention.wv.weight               self_attn.v_proj.weight          same
attention.wo.weight               self_attn.o_proj.weight          same
feed_forward.w1.weight            mlp.gate_proj.weight             same
feed_forward.w3.weight            mlp.up_proj.weight               same
feed_forward.w2.weight            mlp.down_proj.weight             same
attention_norm.weight             input_layernorm.weight           same
ffn_norm.weight                   post_attention_layernorm.weight  same
"""


def _table(lines: str) -> dict[str, list[tuple[str, str]]]:
    """Return the targets of each name, and how they follow from it."""
    table = defaultdict(list)
    for line in lines.strip().splitlines():
        name, target, how = line.split(maxsplit=2)
        table[name].append((target, how))
    return dict(table)


_TABLES = {"gpt2": _table(_GPT2), "llama": _table(_LLAMA)}
_LAYERS = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_PIPELINE = re.compile(r"(?:sequential\.)?(\d+)\.(.+)")
_ATTENTION = re.compile(r"(?:^|\.)(?:self_)?att(?:n|ention)\.")


class Names:
    """The names of a model's parameters in transformers."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the model of transformers without memory, for its names and their order.

        Raises ConfigError if transformers has no class for the model.
        """
        from transformers import AutoModelForCausalLM

        family: Any = models.huggingface(config.family)
        try:
            if family is None:
                raise ValueError(f'family "{config.family}" has no names in transformers')
            self._settings: Any = family.architecture(config)
        except ValueError as error:
            raise ConfigError(
                f"parallel3d.model: {error}; a checkpoint of another program needs a model of "
                "transformers"
            ) from None
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(self._settings)
        self.order = {name: tuple(p.shape) for name, p in model.named_parameters()}
        """The shapes of the parameters by name, in the order of the modules; tied ones once."""

    def resolve(self, foreign: Mapping[str, ForeignTensor], folder: object) -> dict[str, Derived]:
        """Return foreign tensors by transformers' names.

        Raises CheckpointError if the program's names are not known.
        """
        prefix = self._prefix(foreign)
        if prefix is not None:
            return {
                name.removeprefix(prefix): Derived(tensor)
                for name, tensor in foreign.items()
                if name.startswith(prefix)
            }
        kind = self._settings.model_type
        kind = "llama" if kind not in _LAYOUTS and "model.norm.weight" in self.order else kind
        if kind not in _LAYOUTS:
            raise CheckpointError(
                f"{folder}: {next(iter(foreign))} is no name of transformers' {kind}, and its own "
                f"names are not known; {FROM_WEIGHTS}"
            )
        found = dict(self._from_table(foreign, kind, folder))
        for name, derived in found.items():
            self._check_shape(name, derived, folder)
        return found

    def _prefix(self, foreign: Mapping[str, ForeignTensor]) -> str | None:
        """Return the prefix behind which the names are transformers'; None if they are not."""
        hits: dict[str, int] = {}
        for name in self.order:
            for own in (own for own in foreign if own.endswith(name)):
                prefix = own.removesuffix(name)
                if not prefix or prefix.endswith("."):
                    hits[prefix] = hits.get(prefix, 0) + 1
        best = max(hits, key=lambda prefix: hits[prefix], default=None)
        # A pipeline's last layer may have one name of transformers.
        return best if best is not None and 2 * hits[best] > len(self.order) else None

    def _from_table(
        self, foreign: Mapping[str, ForeignTensor], kind: str, folder: object
    ) -> Iterator[tuple[str, Derived]]:
        layout = _LAYOUTS[kind]
        numbers = _block_numbers(foreign)
        for own, tensor in foreign.items():
            number, leaf = _split(own)
            if number in numbers:
                block = f"{layout.block}{numbers.index(number)}."
                for target, transform in self._in_block(leaf, kind, own, folder):
                    yield f"{block}{target}", Derived(tensor, transform)
            elif (
                number < min(numbers, default=0)
                or "embed" in own
                or leaf.startswith(("wte", "wpe"))
            ):
                is_position = "position" in own or leaf.startswith("wpe")
                yield layout.position if is_position else layout.token, Derived(tensor)
            elif len(tensor.shape) > 1:
                yield layout.output, Derived(tensor)
            else:
                last = leaf.rpartition(".")[2].replace("scale", "weight")
                yield f"{layout.norm}{last}", Derived(tensor)

    def _in_block(
        self, leaf: str, kind: str, own: str, folder: object
    ) -> Iterator[tuple[str, Transform | None]]:
        """Yield the names that follow from a block's parameter, with how."""
        block = f"{_LAYOUTS[kind].block}0."
        leaves = {name.removeprefix(block) for name in self.order if name.startswith(block)}
        known = [target for target in leaves if leaf == target or leaf.endswith(f".{target}")]
        plain = leaf.replace("self_attention.", "attention.")
        rows = _TABLES.get(kind, {})
        if plain in leaves:
            known = [plain]
        if known:
            yield max(known, key=len), None
            return
        row = next((r for name, r in rows.items() if f".{plain}".endswith(f".{name}")), None)
        if row is None:
            raise CheckpointError(
                f"{folder}: {own} has no counterpart in transformers' {kind} that is known here; "
                f"{FROM_WEIGHTS}"
            )
        is_fused = "query_key_value" in leaf
        if is_fused and self._kv_heads != self._heads and "self_attention" not in leaf:
            raise CheckpointError(
                f"{folder}: {own} has grouped queries in GPT-NeoX's order, which is not known "
                f"here; {FROM_WEIGHTS}"
            )
        for target, how in row:
            yield target, self._transform(how)

    @property
    def _heads(self) -> int:
        return int(self._settings.num_attention_heads)

    @property
    def _kv_heads(self) -> int:
        return int(getattr(self._settings, "num_key_value_heads", None) or self._heads)

    def _transform(self, how: str) -> Transform | None:
        if how == "same":
            return None
        if how == "transposed":
            return Tensor.t
        if how.endswith("half"):
            return lambda value: value.chunk(2)[how.startswith("second")]
        if how == "pairs":
            return self._without_pairs
        if how.startswith("qkv"):
            is_transposed = how.endswith("transposed")
            return lambda value: _transposed_if(torch.cat(self._qkv(value)), is_transposed)
        return lambda value: self._qkv(value)["qkv".index(how)]

    def _qkv(self, value: Tensor) -> list[Tensor]:
        """Return query, key and value of a fused weight or bias.

        Its rows are, for each key's head: those of its queries' heads, its own, and its value's
        (Megatron-LM, `ParallelAttention`).
        """
        per = self._heads // self._kv_heads
        rows = value.unflatten(0, (self._kv_heads, per + 2, -1))
        parts = rows.split((per, 1, 1), dim=1)
        return [part.reshape(-1, *value.shape[1:]) for part in parts]

    def _without_pairs(self, value: Tensor) -> Tensor:
        """Return rows whose rotary pairs are i and i + half, from neighbours (torchtitan)."""
        size = getattr(self._settings, "head_dim", None)
        size = size or self._settings.hidden_size // self._heads
        pairs = value.view(-1, size // 2, 2, *value.shape[1:])
        return pairs.transpose(1, 2).reshape(value.shape)

    def _check_shape(self, name: str, derived: Derived, folder: object) -> None:
        if name not in self.order:
            return
        try:
            shape: object = list(derived.shape)
        except RuntimeError:
            shape = f"cut from {list(derived.tensor.shape)}"
        if shape != list(self.order[name]):
            raise CheckpointError(
                f"{folder}: {name} has the shape {shape} there, and {list(self.order[name])} in "
                "parallel3d.model; set the sizes of the run (a padded vocabulary counts as padded)"
            )


def _transposed_if(value: Tensor, is_transposed: bool) -> Tensor:
    return value.t() if is_transposed else value


def _split(name: str) -> tuple[int, str]:
    """Return the number of a parameter's layer and its name there.

    -1 stands for an embedding, and 2^31 for what follows the blocks.
    """
    match = _LAYERS.fullmatch(name) or _PIPELINE.fullmatch(name)
    if match:
        return int(match[1]), match[2]
    if name.startswith("tied_modules.") or "embedding" in name:
        return -1, name.rpartition("embed")[2]
    return 2**31, name


def _block_numbers(foreign: Mapping[str, ForeignTensor]) -> list[int]:
    """Return the numbers of the layers with attention, in order."""
    numbers = set()
    for name in foreign:
        number, leaf = _split(name)
        if _ATTENTION.search(leaf):
            numbers.add(number)
    return sorted(numbers)
