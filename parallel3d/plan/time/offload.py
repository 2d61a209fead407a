"""Seconds of offload: transfers between device, host and NVMe, and the CPU's optimizer."""

from parallel3d.base.errors import ConfigError
from parallel3d.config.hardware import Host
from parallel3d.model.spec import STATE_BYTES
from parallel3d.plan.setting import Device
from parallel3d.plan.time.machine import Machine


def update_seconds(
    elements: float, device: Device, moved_bytes: float, machine: Machine
) -> tuple[float, float]:
    """Seconds of the CPU's Adam for `elements` elements, and of the bytes it moves.

    `moved_bytes`: bytes of gradients to the host and of new weights back. With "nvme" the
    optimizer's state is read and written, too.
    """
    adam = elements / host_of(machine).adam_params.value
    moved = to_host_seconds(moved_bytes, machine)
    if device == "nvme":
        moved += nvme_seconds(elements * STATE_BYTES, machine, writes=True)
    if machine.software.overlaps_offload:
        moved -= min(adam, machine.curves.overlap * moved)
    return adam, moved


def fetch_seconds(num_bytes: float, device: Device, machine: Machine) -> float:
    """Seconds until `num_bytes` of offloaded weights are on the device."""
    if device == "none":
        return 0.0
    disk = nvme_seconds(num_bytes, machine, writes=False) if device == "nvme" else 0.0
    return disk + to_host_seconds(num_bytes, machine)


def to_host_seconds(num_bytes: float, machine: Machine) -> float:
    """Seconds to move `num_bytes` between device and host, in either direction."""
    return num_bytes / (host_of(machine).device_bandwidth.value * machine.curves.host)


def nvme_seconds(num_bytes: float, machine: Machine, writes: bool) -> float:
    """Seconds to read `num_bytes` from NVMe, and also to write them if `writes`."""
    host, name = host_of(machine), machine.hardware.name
    if host.nvme_read is None or host.nvme_write is None:
        raise ConfigError(
            f"hardware {name}: the speed of its NVMe is not known; add host.nvme_read and "
            f'host.nvme_write to configs/hardware/{name}.json, or offload to "cpu"'
        )
    seconds = num_bytes / host.nvme_read.value
    seconds += num_bytes / host.nvme_write.value if writes else 0.0
    return seconds / machine.curves.host


def host_of(machine: Machine) -> Host:
    """The figures of the device's host; raises ConfigError where none are known."""
    if machine.hardware.host is None:
        name = machine.hardware.name
        raise ConfigError(
            f"hardware {name}: nothing is known of its host; add `host` to "
            f"configs/hardware/{name}.json, or plan without offload"
        )
    return machine.hardware.host
