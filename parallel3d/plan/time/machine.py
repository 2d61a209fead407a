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
_found: dict[tuple[int, int, int], tuple[Machine, Software, Curves]] = {}


def machine_of(hardware: Hardware, software: Software, curves: Curves) -> Machine:
    """The machine of this hardware, software and curves; equal arguments give one object."""
    ids = id(hardware), id(software), id(curves)
    if found := _found.get(ids):
        return found[0]
    if len(_found) > 4096:  # a fit tries thousands of curves
        _found.clear()
        _machines.clear()
    key = id(hardware), software, curves
    machine = _machines.setdefault(key, Machine(hardware, software, curves))
    # It holds on to all three, so that their ids are not given to others.
    _found[ids] = machine, software, curves
    return machine
