"""The hardware of a run: its description, and the peak FLOP/s that MFU is relative to."""

import torch
from torch.utils.benchmark import Timer

from parallel3d.config import RunConfig, hardware
from parallel3d.mesh.device import pick_device
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh


def machine_of(config: RunConfig, launch: Launch) -> hardware.Hardware:
    """Return the hardware of a run: named by the config, else recognised, else this machine.

    Raises ConfigError with a remedy if none of them is known.
    """
    return described_hardware(config, pick_device(launch)) or hardware.load(hardware.THIS_MACHINE)


def known_hardware(config: RunConfig, device: torch.device) -> hardware.Hardware | None:
    """Return the hardware that the config names, else `device` if configs/hardware has it."""
    name = config.parallel3d.run.hardware
    if name != "auto":
        return hardware.load(name)
    if device.type == "cpu":
        return None
    return hardware.recognise(torch.get_device_module(device).get_device_name(device))


def described_hardware(config: RunConfig, device: torch.device) -> hardware.Hardware | None:
    """Return `known_hardware`, else this machine's measured figures, if it was calibrated."""
    known = known_hardware(config, device)
    if known is None and hardware.THIS_MACHINE in hardware.names():
        return hardware.load(hardware.THIS_MACHINE)
    return known


def peak(config: RunConfig, mesh: Mesh) -> tuple[str, float | None]:
    """Return the name and the FLOP/s of one device's peak, which MFU is relative to.

    It is the peak in configs/hardware, else the fastest matmul measured on all ranks at once.
    """
    precision = config.precision
    tf32 = config.parallel3d.train.tf32
    uses_tf32 = tf32 and precision == "fp32" and mesh.device.type != "cpu"
    dtype = "tf32" if uses_tf32 else precision
    known = known_hardware(config, mesh.device)
    published = known.peak(dtype) if known else None
    if known and published:
        return f"{known.name}'s {dtype} peak", published
    # Imported here because it loads DeepSpeed, which a plan does not need.
    from parallel3d.engine.engine_settings import DTYPES

    mesh.barrier()
    rows = mesh.messages.gather_floats([measure_peak_flops(mesh.device, DTYPES[precision])])
    return "a measured matmul", sum(row[0] for row in rows) / len(rows)


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large square matmul, with the layout of a linear layer.

    In fp16 torch multiplies other layouts on CPUs up to 60 times more slowly.

    Other ranks may use the same cores meanwhile, as they do in training.
    """
    size = 1024 if device.type == "cpu" else 8192
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    timer = Timer(
        "left @ right.t()",
        globals={"left": left, "right": right},
        num_threads=torch.get_num_threads(),
    )
    return 2 * size**3 / min(timer.timeit(1).mean for _ in range(3))
