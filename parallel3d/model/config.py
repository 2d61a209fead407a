"""The settings that the library reads of a model of any family (floor 0, no torch)."""

from collections.abc import Hashable, Mapping
from typing import Literal, Protocol, Self, runtime_checkable


class ModelConfig(Hashable, Protocol):
    """The settings of every family's `Config`, a frozen pydantic model (docs/add-a-model.md)."""

    @property
    def family(self) -> str:
        """The model family: the name of a folder in models/."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def num_hidden_layers(self) -> int:
        """Number of transformer blocks, without the embedding and the head."""

    @property
    def num_attention_heads(self) -> int:
        """Query heads per block."""

    @property
    def inner_size(self) -> int:
        """Inner width of the MLP."""

    @property
    def vocab_size(self) -> int | Literal["auto"]:
        """Rows of the embedding; "auto" until the tokenizer is known."""

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence."""

    def model_copy(self, *, update: Mapping[str, object] | None = None) -> Self:
        """Return a copy with some settings changed."""

    def model_dump(self, *, mode: str = "python") -> dict[str, object]:
        """Return the settings by name."""


class TransformerConfig(ModelConfig, Protocol):
    """The settings that the parts of models/common.py read as well."""

    @property
    def initializer_range(self) -> float:
        """Standard deviation of weights."""

    @property
    def tie_word_embeddings(self) -> bool:
        """True if the output projection shares the token embedding's weight."""


@runtime_checkable
class HasKeyValueHeads(Protocol):
    """A config with grouped queries."""

    @property
    def num_key_value_heads(self) -> int | None:
        """Key/value heads; None means one per query head."""
