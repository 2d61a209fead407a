"""One call of a communication, and the buffers that it reads and writes."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Operation:
    """A communication in its group's queue.

    `says` is what this rank tells the ranks that it meets, `expects` what each of those, by its
    rank in the group, has to tell. `run` moves the data. `outputs` are pairs: a caller's buffer,
    and where `run` puts its result. It has to be over within `seconds`, its queue's.
    """

    def __init__(
        self,
        says: str,
        *,
        kind: str,
        expects: Mapping[int, str],
        run: Callable[[], object],
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.says, self.kind, self.expects, self.run = says, kind, expects, run
        self.posted, self.seconds = time.monotonic(), 0.0
        self.error: Exception | None = None
        self.end: Any = torch.futures.Future()
        self._settling = threading.Lock()
        self._outputs = list(outputs)
        for buffer, _ in outputs:
            _poison(buffer)
        # What is read may be a part of what is written, as in a gather in place.
        self._read = [(tensor, _bits(tensor)) for tensor in inputs]

    def __str__(self) -> str:
        return self.says

    @property
    def is_over(self) -> bool:
        """Whether the operation has ended or failed."""
        return bool(self.end.done())

    @property
    def is_delivered(self) -> bool:
        """Whether no result of the operation is left outside the caller's buffers."""
        return not self._outputs

    @property
    def problem(self) -> str:
        """What is wrong if a buffer that is still being read has changed; "" if none has."""
        same = all(torch.equal(_bits(tensor), before) for tensor, before in self._read)
        return "" if same else "the buffer changed before it was over"

    def settle(self, error: Exception | None = None) -> None:
        """Mark the operation as over or failed; only the first call counts."""
        with self._settling:
            if not self.is_over:
                self.error, self._read = error, []
                self.end.set_result(None)

    def deliver(self) -> str:
        """Fill the caller's buffers; gives what is wrong if one was used meanwhile."""
        outputs, self._outputs = self._outputs, []
        with torch.no_grad():
            for buffer, result in outputs:
                if not torch.equal(_bits(buffer), _bits(_poison(torch.empty_like(buffer)))):
                    return "its result's buffer was written before `wait`"
                buffer.copy_(result)
        return ""


class Handle(dist.Work):
    """What the caller holds of an operation, whose result must be waited for."""

    def __init__(self, operation: Operation, blame: Callable[[Operation, str], Exception]) -> None:
        super().__init__()
        self._operation, self._blame = operation, blame

    def __del__(self) -> None:
        if not self._operation.is_delivered and self._operation.error is None:
            self._blame(self._operation, "nobody waited for its result")

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is over, deaf to signals as a device's wait is; then deliver.

        Raises StrictError; `timeout` is ignored, as the group's own stands.
        """
        self._operation.end.wait()
        if self._operation.error is not None:
            raise self._operation.error
        if problem := self._operation.deliver():
            raise self._blame(self._operation, problem)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self._operation.is_over

    def is_success(self) -> bool:
        """Whether the operation is over and nothing was wrong."""
        return self._operation.is_over and self._operation.error is None


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor of any device to where gloo can move it; the host waits for the copy."""
    return tensor.detach().contiguous().to("cpu", copy=True)


def describe(tensors: Sequence[Tensor]) -> str:
    """Elements and types of tensors, as in "12 float32"."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + tensor.numel()
    return ", ".join(f"{size} {name}" for name, size in sizes.items())


def _poison(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(255 if tensor.dtype == torch.uint8 else -1)


def _bits(tensor: Tensor) -> Tensor:
    """A copy on the host, in which NaNs are equal."""
    return on_host(tensor).view(-1).view(torch.uint8)
