"""Settings of a published model that stand beside its weights."""

from typing import Any

from parallel3d.base.section import Section


class Published(Section):
    """Settings of a published model's folder that training leaves as they are."""

    config: dict[str, Any]
    """The fields of its config.json that do not affect training: special ids and the like."""
    generation: dict[str, Any] | None = None
    """The content of its generation_config.json; null if it has none."""
    architecture: str | None = None
    """The class in transformers, where several classes have these layers: Mistral without windows
    has those of Llama. Null for that of the family."""
