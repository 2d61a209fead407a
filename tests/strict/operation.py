"""One call of a communication, and the buffers that it reads and writes."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Buffer:
    """A caller's tensor that an operation does not keep alive, as a kernel in flight does not."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._dtype = tensor.dtype
        self._device = tensor.device

    def tensor(self) -> Tensor | None:
        """Return the tensor, or None if the caller has freed its memory."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, *self._layout)


class Operation:
    """A communication in its group's queue, which must be over within the queue's `seconds`.

    - says: this rank's message to the ranks that it meets.
    - expects: the message that each of those ranks must send, by its rank in the group.
    - run: moves the data.
    - inputs: the caller's tensors that are only read.
    - outputs: pairs of a caller's tensor and the copy in which `run` leaves its result.
    - copies: the copies that `run` reads. They become NaN if the caller frees a tensor before
      `run`, as memory that the allocator has given away; the outputs, if it does before `wait`.
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
        copies: Sequence[Tensor] = (),
    ) -> None:
        self.says = says
        self.kind = kind
        self.expects = expects
        self._run = run
        self.posted = time.monotonic()
        self.seconds = 0.0
        self.error: Exception | None = None
        self.end: Any = torch.futures.Future()
        self._settling = threading.Lock()
        self._outputs = [(Buffer(tensor), result) for tensor, result in outputs]
        self._copies = copies
        self._buffers = [*map(Buffer, inputs), *(buffer for buffer, _ in self._outputs)]
        for tensor, _ in outputs:
            _poison(tensor)
        # An input may be a part of an output, as in a gather in place.
        self._read = [(Buffer(tensor), _bits(tensor)) for tensor in inputs]

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
        inputs = [(buffer.tensor(), before) for buffer, before in self._read]
        same = all(t is None or torch.equal(_bits(t), before) for t, before in inputs)
        return "" if same else "the buffer changed before it was over"

    @property
    def is_freed(self) -> bool:
        """True if the caller has freed the memory of a tensor."""
        return any(buffer.tensor() is None for buffer in self._buffers)

    def run(self) -> None:
        """Move the data: NaN if the caller has freed a tensor."""
        if self.is_freed:
            for copy in self._copies:
                _poison(copy)
        self._run()

    def settle(self, error: Exception | None = None) -> None:
        """Mark the operation as over or failed; only the first call counts."""
        with self._settling:
            if not self.is_over:
                self.error = error
                self._read = []
                self.end.set_result(None)

    def deliver(self) -> str:
        """Fill the caller's tensors; return a problem if one was written meanwhile."""
        outputs = self._outputs
        self._outputs = []
        is_freed = self.is_freed
        with torch.no_grad():
            for buffer, result in outputs:
                if (tensor := buffer.tensor()) is None:
                    continue
                if not torch.equal(_bits(tensor), _bits(_poison(torch.empty_like(tensor)))):
                    return "its result's buffer was written before `wait`"
                tensor.copy_(_poison(result) if is_freed else result)
        return ""


class Handle(dist.Work):
    """What the caller holds of an operation, whose result must be waited for."""

    def __init__(self, operation: Operation, blame: Callable[[Operation, str], Exception]) -> None:
        super().__init__()
        self._operation = operation
        self._blame = blame
        self.tensors: Sequence[Tensor] = ()  # kept until `wait`

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
        self.tensors = ()
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
