"""Choice of how long ZeRO-3's weights stay gathered, where a config leaves it open."""

from parallel3d.config.hardware import Hardware
from parallel3d.plan.memory.peak import Memory
from parallel3d.plan.search.candidates import gathered_longest
from parallel3d.plan.search.remedy import Room, worst
from parallel3d.plan.setting import Setting
from parallel3d.schedule.sharding import Weights


def choose_weights(setting: Setting, hardware: Hardware) -> tuple[Weights, Memory]:
    """The fastest `weights` choice that fits, and the memory of its fullest rank.

    "per_step" (with no offload of parameters, see candidates.ways), then "per_pass"; where neither
    fits, what holds less of "per_pass" and "per_microbatch".
    """
    room = Room.of(hardware)
    ways = gathered_longest(setting.offload_param)
    tried = {way: worst(setting.but(weights=way), room, hardware) for way in ways}
    for way, memory in tried.items():
        if room.fits(memory):
            return way, memory
    least = min(ways[-2:], key=lambda way: tried[way].total)
    return least, tried[least]
