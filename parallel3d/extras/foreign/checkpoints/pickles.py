"""Read pickled files of other programs without running their code.

torch's weights-only loader reads the files of `torch.save`, and `_Metadata` the index of a torch
distributed checkpoint. Both know plain containers and tensors. A few classes of DeepSpeed and torch
are replaced by `Inert`; any other class is refused by its name.
"""

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._weights_only_unpickler import _get_allowed_globals

from parallel3d.base.errors import CheckpointError, first_line
from parallel3d.checkpoint.chunks import ArrayFile, empty

_ZIP = b"PK\x03\x04"
_MOST_BYTES_SCANNED = 2**26


class Inert:
    """Stands for an object of a foreign class: `args` it was made of, and its `state`."""

    args: tuple[object, ...]
    state: Any

    def __new__(cls, *args: object) -> "Inert":
        """Return an object; pickles do not always call `__init__`."""
        made = super().__new__(cls)
        made.args = args
        made.state = {}
        return made

    def __init__(self, *args: object) -> None:
        """Accept any arguments."""

    def __setstate__(self, state: object) -> None:
        self.state = state


_STAND_INS = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "argparse.Namespace",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
)
_OF_METADATA = (
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "torch.serialization._get_layout",
    "torch.device",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)
_PLAIN = {
    "torch.Size": tuple,
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
}


class Stored(NamedTuple):
    """A tensor in a file of `torch.save`, which is not read yet."""

    path: Path
    at: int
    """Offset of the first byte in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def fill(self, out: Tensor, first: int = 0) -> None:
        """Fill a flat tensor with the elements from `first` on; raises CheckpointError."""
        with ArrayFile(self.path) as file:
            start = self.at + first * self.dtype.itemsize
            size = (out.numel(),)
            if start + out.numel() * self.dtype.itemsize > file.size:
                raise CheckpointError(f"{self.path}: is shorter than its tensors; copy it again")
            file.read_box(start, size, (0,), out, self.dtype)

    def read(self) -> Tensor:
        """Return the whole tensor."""
        out = empty(self.shape, self.dtype)
        self.fill(out.view(-1))
        return out


def load(path: Path) -> Any:
    """Return the contents of a file of `torch.save`, with a `Stored` for each tensor.

    Raises CheckpointError for any other file, and for a class that is not known here.
    """
    try:
        with open(path, "rb") as file:
            if file.read(len(_ZIP)) != _ZIP:
                no_zip = "is not a file of torch.save (a zip archive); load and save it with torch"
                reason = _refusal(path.read_bytes(), f"{no_zip} again")
                raise CheckpointError(f"{path}: {reason}")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; copy the whole folder") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); copy it again") from None
    stand_ins: list[Any] = [(_stand_in(name), name) for name in _STAND_INS]
    with (
        _reported(str(path), path.read_bytes),
        torch.serialization.safe_globals(stand_ins),
        FakeTensorMode(),
    ):
        return _with_places(torch.load(path, weights_only=True), path)


def load_bytes(data: bytes, place: str) -> Any:
    """Return what `torch.save` wrote as `data`, tensors included; raises CheckpointError."""
    with _reported(place, lambda: data):
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


@contextmanager
def _reported(place: str, read: Callable[[], bytes]) -> Iterator[None]:
    """Raise CheckpointError for what torch's loader refuses or cannot read.

    - `read`: returns the bytes that were loaded, in which a refused class is looked for.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        if match:
            raise CheckpointError(f"{place}: {_refused(match[1])}") from None
        loader = f"is refused by torch's weights-only loader ({first_line(error)[:200]})"
        raise CheckpointError(f"{place}: {_refusal(read(), loader)}") from None
    # Broad: a damaged file makes torch raise errors of many types.
    except (RuntimeError, OSError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{place}: cannot be read ({first_line(error)}); copy it again"
        ) from None


def load_metadata(path: Path) -> Inert:
    """Return the index of a torch distributed checkpoint; raises CheckpointError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); copy the whole folder"
        ) from None
    try:
        found = _Metadata(io.BytesIO(data)).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    # Broad: a damaged pickle raises errors of many types.
    except Exception as error:
        raise CheckpointError(
            f"{path}: cannot be read ({first_line(error)}); copy it again"
        ) from None
    if not isinstance(found, Inert):
        raise CheckpointError(f"{path}: is not the index of a torch distributed checkpoint")
    return found


class _Metadata(pickle.Unpickler):
    """Makes nothing but plain containers and `Inert` objects."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _OF_METADATA:
            return _stand_in(full)
        if full in _PLAIN:
            return _PLAIN[full]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise CheckpointError(_refused(full))


def _stand_in(full: str) -> type[Inert]:
    """Return a class of its own for a foreign class, by whose name it is called."""
    return type(full.rpartition(".")[2], (Inert,), {})


def _with_places(value: Any, path: Path) -> Any:
    """Return a loaded value with a `Stored` for each tensor."""
    if isinstance(value, Tensor):
        return _place(value, path)
    if isinstance(value, dict):
        return {key: _with_places(inner, path) for key, inner in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_with_places(inner, path) for inner in value)
    return value


def _place(tensor: Tensor, path: Path) -> Stored:
    storage: Any = tensor.untyped_storage()
    if not tensor.is_contiguous():
        raise CheckpointError(
            f"{path}: has a tensor of shape {list(tensor.shape)} that is not contiguous; save it "
            "again with .contiguous()"
        )
    at = getattr(storage, "_checkpoint_offset", 0)
    at += tensor.storage_offset() * tensor.element_size()
    return Stored(path, int(at), tuple(tensor.shape), tensor.dtype)


def _refusal(data: bytes, otherwise: str) -> str:
    """Return why a file is refused: the first class in it that is not known, or `otherwise`."""
    known = {*_STAND_INS, *_PLAIN, *_get_allowed_globals()}
    for name in _classes_in(data[:_MOST_BYTES_SCANNED]):
        if name not in known:
            return _refused(name)
    return otherwise


def _refused(name: str) -> str:
    return (
        f"has an object of {name}, whose code is not run here; save the checkpoint again without it"
    )


def _classes_in(data: bytes) -> Iterator[str]:
    """Yield the names of the classes and functions that the pickles in `data` ask for."""
    file = io.BytesIO(data)
    file.seek(max(data.find(b"\x80"), 0))  # the first opcode of a pickle, also in an archive
    while True:  # an old file of torch.save has several, one after another
        texts = list[str]()
        memo: dict[object, str] = {}
        try:
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in ("GLOBAL", "INST"):
                    yield str(argument).replace(" ", ".")
                elif opcode.name == "STACK_GLOBAL":
                    yield ".".join(texts[-2:])
                elif opcode.name == "MEMOIZE":
                    memo[len(memo)] = texts[-1] if texts else ""
                elif opcode.name in ("BINPUT", "LONG_BINPUT"):
                    memo[argument] = texts[-1] if texts else ""
                elif opcode.name in ("BINGET", "LONG_BINGET"):
                    texts.append(memo.get(argument, ""))
                elif isinstance(argument, str):
                    texts.append(argument)
        except ValueError:  # not a pickle, or its end is missing
            return
