"""Hardware: what a device can do at most, from configs/hardware/*.json and the user's own folder.

Each figure names its source. The user's own descriptions and measurements, which come first, are in
$XDG_CONFIG_HOME/parallel3d/hardware (~/.config without it).
"""

import json
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo

from parallel3d.base import explain, reader
from parallel3d.base.errors import ConfigError
from parallel3d.base.section import ABSENT, Problem, Problems, Section, Strings

DIRECTORY = reader.CONFIGS / "hardware"
THIS_MACHINE = "this-machine"
"""The name of what launch/plan.py --calibrate measures."""
DTYPES = ("fp32", "bf16", "fp16", "fp8")
KINDS = ("matmul", "attention", "traffic", "overhead")  # of work that shared cores slow down
# No bandwidth, rate or size is larger in SI units, no latency smaller: beyond them sums overflow.
_LEAST, _MOST = 1e-15, 1e21


def _plausible(value: float, info: ValidationInfo) -> float:
    """Refuses what no device has in a file; ideal ones, made by code, may be of any speed."""
    if info.context is None:
        return value
    if value <= 0:
        raise ValueError("must be greater than 0; write what was measured or published")
    if not _LEAST <= value <= _MOST:
        raise ValueError(
            f"no device is so: figures are {_LEAST:g} to {_MOST:g}, in bytes, FLOPs and seconds; "
            "write it in the unit of docs/planner.md"
        )
    return value


class Figure(Section):
    """A number and its source."""

    value: Annotated[float, AfterValidator(_plausible)]
    """The number, in the unit that the field's name says."""
    source: str = Field(min_length=1)
    """The document that states it."""


def _whole(figure: Figure) -> Figure:
    if not figure.value.is_integer():
        raise Problems([Problem("value", figure.value, "must be a whole number", "count them")])
    return figure


def _fraction(figure: Figure) -> Figure:
    if figure.value > 1:
        rule, remedy = "is a fraction", "write a number above 0 and up to 1"
        raise Problems([Problem("value", figure.value, rule, remedy)])
    return figure


def _known(names: tuple[str, ...]) -> AfterValidator:
    """Refuses a table with other keys than `names`."""

    def check(table: Mapping[str, Figure]) -> Mapping[str, Figure]:
        rule, remedy = "is none of the keys here", f"use {', '.join(names)}"
        if unknown := [Problem(n, ABSENT, rule, remedy) for n in table if n not in names]:
            raise Problems(unknown)
        return table

    return AfterValidator(check)


Count = Annotated[Figure, AfterValidator(_whole)]
ByDtype = Annotated[Mapping[str, Figure], _known(DTYPES)]


class Link(Section):
    """What connects devices: its speed and its latency."""

    bandwidth: Figure
    """Bytes a second that one device sends while it receives as many (one direction)."""
    latency: Figure
    """Seconds before the first byte of a message arrives."""
    one_ring: bool = False
    """Whether collectives pass from node to node by the interface of one device only."""


class Host(Section):
    """What a device's share of its host can do, for offload."""

    memory_bytes: Figure
    """Host memory for each device."""
    device_bandwidth: Figure
    """Bytes a second between host and device, in one direction (PCIe), for each device."""
    adam_params: Figure
    """Parameters a second that the CPU's Adam updates, for each device's share of the cores."""
    nvme_read: Figure | None = None
    """Bytes a second read from NVMe, for each device."""
    nvme_write: Figure | None = None
    """Bytes a second written to NVMe, for each device."""


class Cores(Section):
    """Devices that are processes on the cores of one machine."""

    count: Count
    """Processes that each have an equal share of the cores for themselves."""
    alone: Annotated[Mapping[str, Annotated[Figure, AfterValidator(_fraction)]], _known(KINDS)]
    """Seconds of a process alone on the machine, as a fraction of those of one among `count`, by
    kind of work: "matmul", "attention", "traffic" (memory-bound), "overhead" (the program's own).
    """


class Hardware(Section):
    """One kind of device, and the machines that hold it."""

    name: str
    """The name that run.hardware takes: the file's name without .json."""
    aliases: Strings = ()
    """Other names for it on a command line, in lower case."""
    device_names: Strings
    """Patterns of the names by which the driver calls the device."""
    peak_flops: ByDtype
    """Dense FLOP/s by dtype ("bf16", "fp16", "fp8"); a dtype without a source is not there."""
    memory_bytes: Figure
    """Device memory as sold, 1 GB = 1e9 bytes."""
    memory_bandwidth: Figure | None = None
    """Bytes a second to and from device memory."""
    matmul_flops: ByDtype = Field(default={})
    """The highest FLOP/s that was measured for a large matrix product, by dtype."""
    devices_per_node: Count | None = None
    """Devices that `link` connects; beyond them is `network`."""
    link: Link | None = None
    """Between the devices of a node (NVLink)."""
    network: Link | None = None
    """Between nodes, for each device."""
    host: Host | None = None
    """For offload; null where nothing is known."""
    adam_params: Figure | None = None
    """Parameters a second that the device's own Adam updates; null: bound by its memory."""
    cores: Cores | None = None
    """Where devices share the cores of a machine; null for a device of its own."""
    curves: Mapping[str, float] | None = None
    """Efficiencies measured on this very machine (launch/plan.py --calibrate); null: the fitted
    ones."""

    def peak(self, dtype: str) -> float | None:
        """Peak dense FLOP/s in `dtype`, or None where no source states it."""
        figure = self.peak_flops.get(dtype)
        return figure.value if figure else None

    def slowdown(self, kind: str, devices: int) -> float:
        """Return the factor on the seconds of a kind of work where `devices` share the cores.

        Figures are of `cores.count` processes; fewer have more threads each, more take turns.
        """
        if self.cores is None:
            return 1.0
        count, alone = self.cores.count.value, self.cores.alone.get(kind)
        if devices >= count or alone is None:
            return max(1.0, devices / count)
        return alone.value + (1 - alone.value) * (devices - 1) / (count - 1)


def user_folder() -> Path:
    """The folder of the user's own descriptions of hardware, whether it exists or not."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # By the standard a relative path is none.
    home = Path(base) if os.path.isabs(base) else Path.home() / ".config"
    return home / "parallel3d" / "hardware"


def names() -> list[str]:
    """Names of the hardware that is described, in configs/hardware or by the user."""
    return sorted(_files())


def _files() -> dict[str, Path]:
    folders = (DIRECTORY, user_folder())
    return {path.stem: path for folder in folders for path in folder.glob("*.json")}


def load(name: str, place: str = "parallel3d.run.hardware") -> Hardware:
    """Return the hardware of a name or alias, in any case, or of a path that ends in .json.

    Raises ConfigError, which says that the name stands at `place`, if none is described.
    """
    if name.endswith(".json") and name.removesuffix(".json") not in names():
        return _at(Path(name))
    name = name.removesuffix(".json")
    wanted, known = name.lower(), names()
    described = [n for n in known if n.lower() == wanted]
    for found in described or [n for n in known if wanted in _at(_files()[n]).aliases]:
        return _at(_files()[found])
    if wanted == THIS_MACHINE:
        raise ConfigError(
            f'{place} = "{THIS_MACHINE}": is not measured yet; run '
            "`parallel3d plan --calibrate` first, on the machine that shall train"
        )
    auto = '"auto" or ' if "." in place else ""
    raise ConfigError(
        f"{place} = {json.dumps(name)}: is not described; use {auto}one of: "
        f"{', '.join(known)}; or the path of a file like those in configs/hardware"
    )


def _at(path: Path) -> Hardware:
    raw = reader.read(path)
    try:
        return Hardware.model_validate(raw, context="file")
    except ValidationError as error:
        raise Problems(explain.problems_in(error, raw, Hardware), str(path)) from None


def recognise(device_name: str) -> Hardware | None:
    """The hardware that the driver calls `device_name`, or None: a CPU, say, is not described."""
    for hardware in map(load, names()):
        if any(fnmatchcase(device_name, pattern) for pattern in hardware.device_names):
            return hardware
    return None
