"""What is known of the hardware of a run."""

import torch

from parallel3d.config import RunConfig, hardware
from parallel3d.mesh.device import pick_device
from parallel3d.mesh.launch import Launch


def machine_of(config: RunConfig, launch: Launch) -> hardware.Hardware:
    """The hardware of a run: named by the config, else by the device, else this machine.

    Raises ConfigError, with what to do, where nothing is known of it.
    """
    known = known_hardware(config, pick_device(launch))
    return known or hardware.load(hardware.THIS_MACHINE)


def known_hardware(config: RunConfig, device: torch.device) -> hardware.Hardware | None:
    """The hardware that the config names, or the `device` if configs/hardware describes it."""
    if config.run.hardware != "auto":
        return hardware.load(config.run.hardware)
    if device.type == "cpu":
        return None
    return hardware.recognise(torch.get_device_module(device).get_device_name(device))


def described(config: RunConfig, device: torch.device) -> hardware.Hardware | None:
    """The description of a run's hardware, this machine's measured figures as a last resort."""
    known = known_hardware(config, device)
    if known is None and hardware.THIS_MACHINE in hardware.names():
        return hardware.load(hardware.THIS_MACHINE)
    return known
