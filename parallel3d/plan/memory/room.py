"""Whether the ranks of a setting fit into their devices and hosts, and what does not."""

from parallel3d.config.hardware import Hardware
from parallel3d.plan.memory.peak import Memory, exceeds, per_rank
from parallel3d.plan.setting import Setting


def room_of(hardware: Hardware) -> tuple[int, int]:
    """Return the bytes of memory of one device, and of its share of the host."""
    host = hardware.host
    return int(hardware.memory_bytes.value), int(host.memory_bytes.value) if host else 0


def reason_of(memory: Memory, hardware: Hardware) -> str:
    """Return what exceeds device or host memory, by how much, and the largest part of it.

    The text is empty if the rank fits.
    """
    device, host = room_of(hardware)
    reasons = []
    if (over := memory.total - device) > 0:
        part = max(memory.parts, key=lambda name: memory.parts[name])
        reasons.append(
            f"device memory: {over:,} bytes over ({gib(memory.total)} of {gib(device)} GiB on "
            f"pp rank {memory.pp_coord}, {gib(memory.parts[part])} of them {part})"
        )
    if (over := memory.host - host) > 0:
        reasons.append(
            f"host memory: {over:,} bytes over ({gib(memory.host)} of {gib(host)} GiB "
            "for each device)"
        )
    return "; ".join(reasons)


def gib(num_bytes: float) -> str:
    """Return a number of bytes as text in GiB: 123, 12.3, 0.123."""
    size = num_bytes / 2**30
    if size >= 100:
        return f"{size:.0f}"
    return f"{size:.1f}" if size >= 1 else f"{size:.3f}"


def all_fit(setting: Setting, hardware: Hardware, room: tuple[int, int] | None = None) -> bool:
    """Return True if all ranks fit. The first is looked at first: it most often decides.

    - `room`: bytes of a device and of its host, if they are not those of the hardware.
    """
    room = room or room_of(hardware)
    return not any(exceeds(setting, coord, hardware, room) for coord in range(setting.mesh.pp))


def worst(setting: Setting, hardware: Hardware) -> Memory:
    """Return the memory of the decisive rank: the fullest, or one that exceeds host memory."""
    device, host = room_of(hardware)

    def lack(memory: Memory) -> tuple[int, bool, int]:
        return max(0, memory.total - device), memory.host > host, memory.total

    return max(per_rank(setting, hardware), key=lack)
