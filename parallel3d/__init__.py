"""Train GPT-scale transformers on a pipeline x data x tensor mesh (see docs/architecture.md)."""

__version__ = "0.2.0"
