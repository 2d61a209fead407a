"""Hardware descriptions: figures of devices, each with its source.

They are read from configs/hardware/*.json and from the user's folder,
$XDG_CONFIG_HOME/parallel3d/hardware (default ~/.config), which takes precedence.
"""

import json
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    model_validator,
)

from parallel3d.base import explain, reader
from parallel3d.base.counts import read_number
from parallel3d.base.errors import ConfigError
from parallel3d.base.paths import expand_path
from parallel3d.base.section import ABSENT, Problem, Problems, Section, Strings

DIRECTORY = reader.CONFIGS / "hardware"
THIS_MACHINE = "this-machine"
"""Name of the description that `parallel3d plan --calibrate` writes."""
_MAKERS = {"nvidia", "geforce", "tesla", "amd", "instinct"}
DTYPES = ("fp32", "bf16", "fp16", "fp8")
Kernels = Literal["eager", "compiled", "tuned"]
"""Classes of a program's kernels, as in parallel3d.plan.setting.Software."""
KINDS = ("matmul", "attention", "traffic", "overhead")  # kinds of work that shared cores slow down
# Bounds of plausible bandwidths, rates, sizes and latencies in SI units; beyond them sums overflow.
_LEAST = 1e-15
_MOST = 1e21


def _plausible(value: float, info: ValidationInfo) -> float:
    """Refuse implausible figures in a file; ideal devices, made by code, may have any speed."""
    if info.context is None:
        return value
    if value <= 0:
        raise ValueError("must be greater than 0; write what was measured or published")
    if not _LEAST <= value <= _MOST:
        raise ValueError(
            f"must be {_LEAST:g} to {_MOST:g}, in bytes, FLOPs and seconds; "
            "use the units of docs/planner.md"
        )
    return value


def _read(value: object) -> object:
    return float(read_number(value, "bytes")) if isinstance(value, str) else value


class Figure(Section):
    """A number and its source, or a plain number."""

    value: Annotated[float, BeforeValidator(_read), AfterValidator(_plausible)]
    """The number, in the unit of the field that holds it."""
    source: str = ""
    """Document that states the number; "" if none does."""

    @model_validator(mode="before")
    @classmethod
    def _of_plain_number(cls, value: object) -> object:
        is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
        return {"value": value} if is_plain else value


def _whole(figure: Figure) -> Figure:
    if not figure.value.is_integer():
        raise Problem("value", figure.value, "must be a whole number", "round it").error()
    return figure


def _fraction(figure: Figure) -> Figure:
    if figure.value > 1:
        remedy = "write a number above 0 and up to 1"
        raise Problem("value", figure.value, "must be a fraction", remedy).error()
    return figure


def _known(names: tuple[str, ...]) -> AfterValidator:
    """Return a validator that refuses tables with other keys than `names`."""

    def check(table: Mapping[str, Figure]) -> Mapping[str, Figure]:
        rule = "is not a key of this table"
        remedy = f"use {', '.join(names)}"
        if unknown := [name for name in table if name not in names]:
            raise Problems([Problem(name, ABSENT, rule, remedy) for name in unknown])
        return table

    return AfterValidator(check)


Count = Annotated[Figure, AfterValidator(_whole)]
ByDtype = Annotated[Mapping[str, Figure], _known(DTYPES)]
ByKernels = Annotated[
    Mapping[str, Annotated[Figure, AfterValidator(_fraction)]], _known(get_args(Kernels))
]


class Link(Section):
    """A connection between devices."""

    bandwidth: Figure
    """Bytes per second that a device sends while it receives as many (one direction)."""
    latency: Figure
    """Seconds before the first byte of a message arrives."""
    one_ring: bool = False
    """True if collectives between nodes use the interface of one device only."""


class Host(Section):
    """The host's resources per device, for offload."""

    memory_bytes: Figure
    """Host memory per device, in bytes."""
    device_bandwidth: Figure
    """Bytes per second between host and device (PCIe), in one direction, per device."""
    adam_params: Figure
    """Parameters per second that the CPU's Adam updates on one device's share of the cores."""
    nvme_read: Figure | None = None
    """Bytes per second read from NVMe, per device."""
    nvme_write: Figure | None = None
    """Bytes per second written to NVMe, per device."""


class Cores(Section):
    """Devices that are processes on the cores of one machine."""

    count: Count
    """Processes among which the cores are divided equally."""
    alone: Annotated[Mapping[str, Annotated[Figure, AfterValidator(_fraction)]], _known(KINDS)]
    """Time of a process that has the machine to itself, as a fraction of its time among `count`
    processes, by kind of work: "matmul", "attention", "traffic" (memory-bound), "overhead" (host
    code)."""


class Hardware(Section):
    """One kind of device, and the machines that hold it."""

    name: str = ""
    """Name in tables: that of the file without .json, if it is not set."""
    aliases: Strings = ()
    """Other names on the command line, in lower case."""
    device_names: Strings = ()
    """Patterns of the device names that the driver reports."""
    peak_flops: ByDtype
    """Peak dense FLOP/s by data type ("bf16", "fp16", "fp8"), where a source states it."""
    memory_bytes: Figure
    """Device memory as sold, 1 GB = 1e9 bytes."""
    memory_bandwidth: Figure | None = None
    """Bytes per second to and from device memory."""
    matmul_flops: ByDtype = Field(default={})
    """Highest measured FLOP/s of a large matrix product, by data type."""
    kernels: ByKernels = Field(default={})
    """Fraction of `matmul_flops` that the products of a program reach, by the class of its kernels
    ("eager", "compiled", "tuned"), where it was measured; otherwise the fitted fraction."""
    devices_per_node: Count | None = None
    """Devices connected by `link`; other devices are reached by `network`."""
    link: Link | None = None
    """Connection between the devices of a node (NVLink)."""
    network: Link | None = None
    """Connection between nodes, per device."""
    host: Host | None = None
    """The host's resources, for offload; null if unknown."""
    adam_params: Figure | None = None
    """Parameters per second that Adam updates on the device; null: limited by memory bandwidth."""
    cores: Cores | None = None
    """For devices that are processes on shared cores; null for devices with cores of their own."""
    curves: Mapping[str, float] | None = None
    """Efficiencies measured on this machine (`parallel3d plan --calibrate`); null: fitted ones."""

    def peak(self, dtype: str) -> float | None:
        """Return the peak dense FLOP/s in `dtype`, or None if no source states it.

        Devices with bf16 multiply fp16 at the same rate.
        """
        figure = self.peak_flops.get(dtype)
        if figure is None and dtype == "fp16":
            figure = self.peak_flops.get("bf16")
        return figure.value if figure else None

    def sharing(self, devices: int) -> int:
        """Return how many devices of a mesh share a node: equally many on each, over half a node.

        - `devices`: of the mesh.
        """
        node = int(self.devices_per_node.value) if self.devices_per_node else devices
        if devices <= node:
            return devices
        return next((n for n in range(node, node // 2, -1) if devices % n == 0), node)

    def slowdown(self, kind: str, devices: int) -> float:
        """Return the factor on the time of a kind of work on a mesh of `devices` processes.

        Those of a node share its cores. The figures are for `cores.count` processes: fewer have
        more threads each, more take turns.
        """
        if self.cores is None:
            return 1.0
        alone = self.cores.alone.get(kind)
        count = self.cores.count.value
        devices = self.sharing(devices)
        if devices >= count or alone is None:
            return self.crowd(devices)
        return alone.value + (1 - alone.value) * (devices - 1) / (count - 1)

    def crowd(self, devices: int) -> float:
        """Return how many processes share a core's time, of a mesh of `devices`; at least 1."""
        if self.cores is None:
            return 1.0
        return max(1.0, self.sharing(devices) / self.cores.count.value)


def user_folder() -> Path:
    """Return the folder of the user's own hardware descriptions, which may not exist."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG standard says to ignore relative paths.
    home = Path(base) if os.path.isabs(base) else Path.home() / ".config"
    return home / "parallel3d" / "hardware"


def names() -> list[str]:
    """Return the sorted names of the described hardware."""
    return sorted(_files())


def _files() -> dict[str, Path]:
    folders = (DIRECTORY, user_folder())
    return {path.stem: path for folder in folders for path in folder.glob("*.json")}


def load(name: str, place: str = "parallel3d.run.hardware") -> Hardware:
    """Return the hardware with a name or alias, or at a path that ends in .json.

    A name may be in any case, and spelled as a driver or a shop does: "NVIDIA A100 80 GB".

    - `place`: the setting or option that has the name, for the message.

    Raises ConfigError if there is no such description.
    """
    try:
        return _at(file_of(name))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{place} = {json.dumps(name)}: {error}") from None


def file_of(name: str) -> Path:
    """Return the file with the description that `load` reads for a name, an alias or a path.

    Raises ValueError with rule and remedy if there is none.
    """
    known = names()
    plain = name.removesuffix(".json")
    if name != plain and plain not in known:
        path = Path(expand_path(name))
        if not os.path.isfile(path):
            raise ValueError(
                f"is not a file (working directory {os.getcwd()}); name one like those in "
                "configs/hardware"
            )
        return path
    lower = plain.lower()
    files = _files()
    matches = [n for n in known if n.lower() == lower]
    for match in matches or [n for n in known if lower in _at(files[n]).aliases]:
        return files[match]
    words = _words(plain)
    matches = [n for n in known if words and words <= _known_words(_at(files[n]))]
    if len(matches) == 1:
        return files[matches[0]]
    if matches:
        raise ValueError(f"may be {' or '.join(matches)}; use one of these names")
    if words == _words(THIS_MACHINE):
        raise ValueError(
            "is not measured yet; run `parallel3d plan --calibrate` first, on the machine that "
            "will train"
        )
    raise ValueError(
        f"is not described; use one of {', '.join(known)}; or the path of a file like those in "
        "configs/hardware"
    )


def _words(text: str) -> set[str]:
    """Return the words of a device's name without its maker: "a100", "sxm", "80gb"."""
    text = re.sub(r"(\d)\s*(gib|gb|g)\b", r"\1gb", text.lower())
    text = re.sub(r"\bsxm\d\b", "sxm", text)
    return set(re.findall(r"[a-z0-9]+", text)) - _MAKERS


def _known_words(hardware: Hardware) -> set[str]:
    """Return all words by which people and drivers call a device."""
    return _words(" ".join([hardware.name, *hardware.aliases, *hardware.device_names]))


def _at(path: Path) -> Hardware:
    raw = {"name": path.stem} | reader.read(path)
    return explain.checked(Hardware, raw, str(path), context="file")


def recognise(device_name: str) -> Hardware | None:
    """Return the hardware with the driver's `device_name`, or None (for a CPU, for example)."""
    for hardware in map(load, names()):
        if any(fnmatchcase(device_name, pattern) for pattern in hardware.device_names):
            return hardware
    return None
