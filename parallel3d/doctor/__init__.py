"""Check the machines of a launch before a run, and name the rank or host that differs."""

from parallel3d.calibrate.measure_device import Effort
from parallel3d.config import RunConfig
from parallel3d.doctor.hosts import Check, check_hosts, measure_host
from parallel3d.doctor.links import check_links, measure_links
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import find_nodes
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.train.known_hardware import described_hardware


def check(config: RunConfig, mesh: Mesh, effort: Effort | None = None) -> list[Check]:
    """Return the checks of all ranks, the same on each. Collective.

    `effort` has the seconds and the bytes of each measurement of a link.
    """
    num_bytes = 2**24 if mesh.device.type == "cpu" else 2**26
    nodes, hardware = find_nodes(mesh), described_hardware(config, mesh.device)
    pulse.doing("comparing hosts")
    rows = gather_json(mesh, measure_host(config, mesh), aside=True)
    pulse.doing("measuring links")
    effort = effort or Effort(seconds=0.5, copied_bytes=num_bytes)
    groups = list(measure_links(mesh, nodes, hardware, effort))
    name = hardware.name if hardware else ""
    return [*check_hosts(config, rows, nodes), *check_links(groups, nodes, name)]
