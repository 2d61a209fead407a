"""Architectures of published models that a table leaves blank, each with its source."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from parallel3d.model.spec import LayerSpec
from parallel3d.model.transformer_cost import HeadCost
from parallel3d.models.gpt import spec as gpt
from parallel3d.models.llama import spec as llama
from parallel3d.models.moe import spec as moe
from parallel3d.plan.setting import layers_of


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model that speed and memory depend on; None where no source states one."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq: int | None = None
    family: Literal["gpt", "llama", "moe"] = "gpt"
    tied: bool | None = None
    """Whether the output projection is the token embedding; None: as the family has it."""
    dropout: float = 0.0
    """After the attention and the MLP, and on the attention's weights."""
    experts: tuple[tuple[str, Any], ...] = ()
    """Settings of the family "moe" that no column has, by name."""

    def filled(self, other: "Architecture") -> "Architecture":
        """A copy of the architecture, its blanks filled from `other`, whose family it takes."""
        names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "tied")
        blank = {name: getattr(other, name) for name in names if getattr(self, name) is None}
        return replace(self, family=other.family, experts=other.experts, **blank)

    @property
    def missing(self) -> list[str]:
        """The names of the sizes without which no layer can be built."""
        needed = ("layers", "hidden", "heads", "vocab", "seq")
        return [name for name in needed if getattr(self, name) is None]

    def specs(self) -> tuple[LayerSpec, ...]:
        """The layers of the architecture; two equal architectures get the same objects."""
        grouped = self.family == "gpt" and (self.kv_heads or self.heads) != self.heads
        return _specs(squared_relu(self) if grouped else self)


@lru_cache(maxsize=256)
def _specs(model: Architecture) -> tuple[LayerSpec, ...]:
    assert not model.missing
    sizes: dict[str, Any] = {
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.seq,
        "intermediate_size": model.ffn,
    }
    if model.tied is not None:
        sizes["tie_word_embeddings"] = model.tied
    if model.family == "gpt":
        sizes |= dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), model.dropout)
        return _whole_logits(layers_of(gpt.Config(family="gpt", **sizes)))
    sizes["num_key_value_heads"] = model.kv_heads
    if model.family == "moe":
        return _whole_logits(layers_of(moe.Config(family="moe", **sizes, **dict(model.experts))))
    return _whole_logits(layers_of(llama.Config(family="llama", **sizes)))


def _whole_logits(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """With a head as those programs have it: none computes logits part by part, and again."""
    *others, head = layers
    assert isinstance(head.cost, HeadCost)
    return *others, replace(head, cost=replace(head.cost, in_parts=False))


def _llama(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int) -> Architecture:
    return Architecture(layers, hidden, heads, kv, ffn, vocab, family="llama")


def _gpt(layers: int, hidden: int, heads: int, vocab: int) -> Architecture:
    return Architecture(layers, hidden, heads, vocab=vocab)


def squared_relu(model: Architecture) -> Architecture:
    """Nemotron (squared ReLU, no gate, grouped queries) as a llama with equally many products.

    Our gpt family has no grouped queries; two MLP matrices become three of two thirds the width.
    """
    hidden = model.hidden or 0
    ffn = model.ffn or 4 * hidden
    return replace(model, family="llama", ffn=2 * ffn // 3)


GPT = Architecture(family="gpt", vocab=50304)  # GPT-2's 50,257 tokens, padded to 128's multiple
MPT = Architecture(family="gpt")
LLAMA = Architecture(family="llama")

# The first pattern that the lower-case name of the model contains.
KNOWN: Mapping[str, Architecture] = {
    # meta-llama config.json; Llama 2: arXiv:2307.09288; Llama 3: arXiv:2407.21783, table 3
    "llama 2 13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama 2 70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama3 8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    # allenai/OLMo-core TransformerConfig.olmo2_*; arXiv:2501.00656, table 3; 100,278 tokens padded
    "olmo2 1b": _llama(16, 2048, 16, 16, 8192, 100352),
    "olmo2 7b": _llama(32, 4096, 32, 32, 11008, 100352),
    "olmo2 13b": _llama(40, 5120, 40, 40, 13824, 100352),
    "olmo 1b": _llama(16, 2048, 16, 16, 8192, 100352),
    "olmo 7b": _llama(32, 4096, 32, 32, 11008, 100352),
    # NVIDIA/NeMo recipes; checked: TFLOP/s over tokens/s of the table gives 6N + 12Lhs of these
    "gpt3-5b": _gpt(24, 4096, 32, 51200),
    "gpt3 5b": _gpt(24, 4096, 32, 51200),
    "gpt3-20b": _gpt(44, 6144, 48, 51200),
    "gpt3-175b": _gpt(96, 12288, 96, 51200),
    "gpt3 175b": _gpt(96, 12288, 96, 51200),
    "nemotron-8b": Architecture(32, 4096, 32, vocab=256000, tied=False),
    "nemotron-22b": Architecture(40, 6144, 48, vocab=256000, tied=False),
    # arXiv:2402.16819, table 1 (15B) and arXiv:2406.11704, table 1 (340B)
    "nemotron4 15b": Architecture(32, 6144, 48, 8, 24576, 256000),
    "nemotron-340b": Architecture(96, 18432, 96, 8, 73728, 256000),
    "nemotron4 340b": Architecture(96, 18432, 96, 8, 73728, 256000),
    # arXiv:2210.02414, appendix B: GeGLU with 8/3 x hidden, 150,528 tokens
    "glm-130b": _llama(70, 12288, 96, 96, 32768, 150528),
    # EleutherAI/gpt-neox-20b config.json
    "gpt-neox-20b": _gpt(44, 6144, 64, 50432),
    "mpt": MPT,
    "llama": LLAMA,
}


def _moe(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **experts: Any
) -> Architecture:
    sizes = layers, hidden, heads, kv, ffn, vocab
    return Architecture(*sizes, family="moe", tied=False, experts=tuple(experts.items()))


_QWEN3 = {"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128, "qk_norm": True}
# Mixtures of experts; their config.json on the hub.
_EXPERTS: dict[str, Architecture] = {
    "qwen330ba3b": _moe(48, 2048, 32, 4, 6144, 151936, moe_intermediate_size=768, **_QWEN3),
    "qwen3235ba22b": _moe(94, 4096, 64, 4, 12288, 151936, moe_intermediate_size=1536, **_QWEN3),
    "mixtral8x7b": _moe(32, 4096, 32, 8, 14336, 32000),
    "olmoe1b7b": _moe(
        16, 2048, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8, qk_norm=True,
        qk_norm_over="width", norm_topk_prob=False,
    ),
}  # fmt: skip

# The same for names without blanks and punctuation, where no pattern with sizes above is found.
_MORE: dict[str, Architecture] = _EXPERTS | {
    # meta-llama config.json; arXiv:2407.21783, table 3 (405B)
    "llama27b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama213b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama270b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama38b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama318b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama370b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama3170b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama3370b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama3405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "llama31405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "llama321b": replace(_llama(16, 2048, 32, 8, 8192, 128256), tied=True),
    "llama323b": replace(_llama(28, 3072, 24, 8, 8192, 128256), tied=True),
    # mistralai/Mistral-7B-v0.1, Qwen/Qwen2.5-*, TinyLlama config.json
    "mistral7b": _llama(32, 4096, 32, 8, 14336, 32000),
    "qwen257b": _llama(28, 3584, 28, 4, 18944, 152064),
    "qwen2514b": _llama(48, 5120, 40, 8, 13824, 152064),
    "qwen2532b": _llama(64, 5120, 40, 8, 27648, 152064),
    "qwen2572b": _llama(80, 8192, 64, 8, 29568, 152064),
    "tinyllama": _llama(22, 2048, 32, 4, 5632, 32000),
    # vocabularies alone: the same tokenizer for all sizes
    "llama2": Architecture(vocab=32000, family="llama"),
    "llama3": Architecture(vocab=128256, family="llama"),
    "mistral": LLAMA,
    "qwen": LLAMA,
    "codellama": LLAMA,
    "olmo": LLAMA,
    "smollm": LLAMA,
    "bloom": Architecture(vocab=250880),  # bigscience/bloom config.json
    "neox": Architecture(vocab=50432),  # EleutherAI/gpt-neox-20b config.json
    "pythia": MPT,
    "mtnlg": MPT,
    "nemotron": MPT,
}
_MORE |= dict.fromkeys(
    ("opt125m", "opt350m", "opt13b", "opt27b", "opt67b", "opt30b", "opt66b", "opt175b"),
    Architecture(vocab=50272),  # facebook/opt-* config.json
)
# Kinds of models whose layers the families here do not have.
_UNMODELLED: Mapping[str, str] = {
    r"mixtral|moe\b|\d+x\d+b|\ba\d+b\b|deepseek-?v[23]|dbrx|grok|switch": "a mixture of experts",
    r"\bt5|ul2|\bbart\b": "an encoder with a decoder",
    r"bert\b|\bvit\b": "an encoder, whose attention is not causal",
    r"mamba|rwkv|hyena|jamba": "no transformer, or not only one",
}


def known(name: str) -> Architecture:
    """The known sizes of the model called `name`; an unknown name is taken for a GPT."""
    return found(name) or GPT


def found(name: str) -> Architecture | None:
    """The known sizes of the model called `name`, or None."""
    lower = name.lower()
    squeezed = "".join(c for c in lower if c.isalnum())
    sized = next((model for part, model in KNOWN.items() if part in lower), None)
    if sized is None or sized == LLAMA:
        # "llama38b" is a part of "llama38blarge", too, but of no model that anybody has published.
        more = next((model for part, model in _MORE.items() if part in squeezed), None)
        sized = more or sized
    return sized or (GPT if "gpt" in lower else None)


def unmodelled(name: str) -> str | None:
    """The kind of the model called `name`, if it is a kind that the planner has no model of."""
    lower = name.lower()
    known_sizes = found(name)
    if known_sizes and known_sizes.family == "moe":
        return None
    return next((kind for words, kind in _UNMODELLED.items() if re.search(words, lower)), None)
