"""Where a device stands, whose host has gone on (floor 1)."""

from collections import deque
from contextlib import suppress

import torch

_MOST = 4096  # actions that a host may be ahead; it blocks long before


class DeviceMarks:
    """An event at the end of each of a rank's actions, on the device's current stream.

    The main thread records them, and another one may ask at any time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: deque[tuple[str, bool, torch.Event]] = deque(maxlen=_MOST)

    def end(self, text: str, computes: bool) -> None:
        """Mark the end of an action; `computes`: it needs nothing of other ranks but tp peers."""
        event = torch.Event(self._device)
        event.record()
        self._open.append((text, computes, event))

    def standing(self) -> tuple[str, bool] | None:
        """Return the action in which the device is, and if it computes; None if it has ended all.

        A device that has failed stays where it is.
        """
        with suppress(IndexError):  # the main thread has dropped the oldest
            while self._open:
                text, computes, event = self._open[0]
                if not _is_over(event):
                    return text, computes
                self._open.popleft()
        return None


def _is_over(event: torch.Event) -> bool:
    try:
        return event.query()
    except RuntimeError:
        return False
