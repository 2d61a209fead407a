"""The context of layers that a test builds by themselves."""

from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.random_key import RandomKey


def layer_context(group, **options):
    """Return the context of layers whose weights `group` cuts; they draw no dropout masks."""
    return LayerContext(group, RandomKey(0), **options)
