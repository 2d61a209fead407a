"""Hardware, software and curves as one cached object, the key of cached answers."""

from dataclasses import dataclass

from parallel3d.config.hardware import Hardware
from parallel3d.plan.setting import Software
from parallel3d.plan.time.operators import Curves


@dataclass(eq=False)
class Machine:
    """The hardware and program that run operators; equal machines are one object."""

    hardware: Hardware
    software: Software
    curves: Curves


_machines: dict[tuple[int, Software, Curves], Machine] = {}


def machine_of(hardware: Hardware, software: Software, curves: Curves) -> Machine:
    """Return the machine of this hardware, software and curves; equal ones are one object."""
    if len(_machines) > 4096:  # a fit tries thousands of curves
        _machines.clear()
    # It holds on to the hardware, so that its id is not given to another.
    return _machines.setdefault(
        (id(hardware), software, curves), Machine(hardware, software, curves)
    )
