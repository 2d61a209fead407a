"""Whether tensor parallelism's collectives of a backward run under its products, in this process.

Off, each is over (on a device: queued) before the next operator, which takes less memory: under
sequence parallelism the whole input and the whole gradient of it are not held at one time.
"""

_on = True


def use(on: bool) -> None:
    """Turn the overlap of collectives with products on or off from now on."""
    global _on
    _on = on


def is_on() -> bool:
    """Whether a collective of a backward is waited for after the products that do not need it."""
    return _on
