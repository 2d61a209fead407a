"""What a device can do at most, from configs/hardware/*.json; each figure names its source."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from pydantic import ValidationError

from parallel3d.config import explain, reader
from parallel3d.config.section import Problems, Section, Strings
from parallel3d.errors import ConfigError

DIRECTORY = reader.CONFIGS / "hardware"


class Figure(Section):
    """A number and where it is from."""

    value: float
    """The number, in the unit that the field's name says."""
    source: str
    """The document that states it."""


class Hardware(Section):
    """One kind of device."""

    name: str
    """The name that run.hardware takes: the file's name without .json."""
    device_names: Strings
    """Patterns of the names by which the driver calls the device."""
    peak_flops: Mapping[str, Figure]
    """Dense FLOP/s by dtype ("bf16", "fp16", "fp8"); a dtype without a source is not there."""
    memory_bytes: Figure
    """Device memory as sold, 1 GB = 1e9 bytes."""

    def peak(self, dtype: str) -> float | None:
        """Peak dense FLOP/s in `dtype`, or None where no source states it."""
        figure = self.peak_flops.get(dtype)
        return figure.value if figure else None


def names() -> list[str]:
    """The hardware that is described in configs/hardware."""
    return sorted(path.stem for path in DIRECTORY.glob("*.json"))


def load(name: str) -> Hardware:
    """The hardware of that name; raises ConfigError if it is not described."""
    if name not in names():
        raise ConfigError(
            f'parallel3d.run.hardware = "{name}" is not described; use "auto" or one of: '
            f"{', '.join(names())}; or add configs/hardware/{name}.json"
        )
    path = DIRECTORY / f"{name}.json"
    raw = reader.read(path)
    try:
        return Hardware.model_validate(raw)
    except ValidationError as error:
        raise Problems(explain.problems_in(error, raw, Hardware), str(path)) from None


def recognise(device_name: str) -> Hardware | None:
    """The hardware that the driver calls `device_name`, or None: a CPU, say, is not described."""
    for hardware in map(load, names()):
        if any(fnmatchcase(device_name, pattern) for pattern in hardware.device_names):
            return hardware
    return None
