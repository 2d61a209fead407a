"""For how long ZeRO-3's weights stay gathered, where a config leaves it open."""

from parallel3d.hardware import Hardware
from parallel3d.plan.memory.peak import Memory
from parallel3d.plan.search.remedy import Room, worst
from parallel3d.plan.setting import Setting
from parallel3d.schedule.sharding import Weights


def choose_weights(setting: Setting, hardware: Hardware) -> tuple[Weights, Memory]:
    """The fastest way for which there is room, and the memory of its fullest rank.

    "per_step", then "per_pass"; where neither fits, what holds less of "per_pass" and
    "per_microbatch". Who offloads parameters wants them off the device: "per_step" is not for
    them. But "per_microbatch" would fetch them from the host for each microbatch twice, so
    "per_pass" is tried all the same.
    """
    room = Room.of(hardware)
    ways: list[Weights] = ["per_step", "per_pass", "per_microbatch"]
    if setting.offload_param != "none":
        ways.remove("per_step")
    tried = {way: worst(setting.but(weights=way), room, hardware) for way in ways}
    for way, memory in tried.items():
        if room.fits(memory):
            return way, memory
    least = min(ways[-2:], key=lambda way: tried[way].total)
    return least, tried[least]
