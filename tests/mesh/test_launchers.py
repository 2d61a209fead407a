"""The variables of MPI, of Slurm in a plain shell, of half a launcher and of unknown ones."""

import os
import re
import socket
from dataclasses import replace
from datetime import timedelta

import pytest

from parallel3d.base.arguments import Parser
from parallel3d.base.errors import ConfigError, RankError
from parallel3d.mesh import join
from parallel3d.mesh.launch import Launch
from parallel3d.verify.local_ranks import free_port

pytestmark = pytest.mark.gloo

LAUNCHERS = re.compile("SLURM_|TORCHELASTIC_|OMPI_|PM|MASTER_|MPI_|.*RANK|.*WORLD_SIZE")
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": 5,
    "OMPI_COMM_WORLD_SIZE": 8,
    "OMPI_COMM_WORLD_LOCAL_RANK": 1,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 4,
    "MASTER_ADDR": "node0",
}
HYDRA = {
    "PMI_RANK": 5,
    "PMI_SIZE": 8,
    "MPI_LOCALRANKID": 1,
    "MPI_LOCALNRANKS": 4,
    "MASTER_ADDR": "node0",
}
# The shell of `sbatch`, whose job has four tasks, and of salloc with its interactive step.
BATCH = {"SLURM_JOB_ID": 7, "SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_LOCALID": 0}
INTERACTIVE = BATCH | {"SLURM_STEP_ID": 4294967290, "SLURM_STEP_NUM_TASKS": 1}
STEP = BATCH | {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 4, "MASTER_ADDR": "node0"}


@pytest.fixture
def launch_of(monkeypatch):
    """The launch of these variables and no other launcher's."""

    def launch(variables):
        for name in [*os.environ]:
            if LAUNCHERS.match(name):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        return Launch.from_environment()

    return launch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (OPEN_MPI, Launch(5, 8, 1, 4)),
        (HYDRA, Launch(5, 8, 1, 4)),
        ({"PMI_RANK": 1, "PMI_SIZE": 2}, Launch(1, 2, 1, 2)),  # all on one node, for all we know
        ({"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 1}, Launch(0, 1, 0)),
        (OPEN_MPI | BATCH, Launch(5, 8, 1, 4, jobs=(("slurm", "7", 0),))),  # mpirun in a job
        (OPEN_MPI | {"RANK": 0, "WORLD_SIZE": 1}, Launch(0, 1, 0)),  # torchrun in it
    ],
)
def test_variables_of_mpi_are_read(launch_of, variables, expected):
    assert launch_of(variables) == expected


def test_jobs_of_mpirun_meet_at_ports_of_their_own(launch_of):
    ports = {launch_of(OPEN_MPI | {"PMIX_NAMESPACE": job}).port for job in (1, 2)}
    assert len(ports) == 2 and all(29500 <= port < 30500 for port in ports)


def test_mpirun_on_several_nodes_needs_an_address(launch_of):
    del (variables := dict(OPEN_MPI))["MASTER_ADDR"]
    with pytest.raises(ConfigError, match=r"mpirun -x MASTER_ADDR=\$\(hostname\)"):
        launch_of(variables)


@pytest.mark.parametrize("variables", [BATCH, BATCH | {"MASTER_ADDR": "node0"}, INTERACTIVE])
def test_shell_of_a_slurm_job_starts_one_process(launch_of, variables):
    launch = launch_of(variables)
    assert (launch.rank, launch.world_size) == (0, 1)


def test_task_of_srun_is_a_rank_while_it_lives(launch_of):
    assert launch_of(STEP | {"SLURM_TASK_PID": os.getppid()}).world_size == 4
    of_the_host = os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC
    left_over = launch_of(STEP | {"SLURM_TASK_PID": 2**22 - 1})  # the largest id: no ancestor's
    assert left_over.world_size == (1 if of_the_host else 4)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": 4}, "found WORLD_SIZE=4"),
        ({"LOCAL_RANK": 1, "WORLD_SIZE": 2}, "found LOCAL_RANK=1, WORLD_SIZE=2"),
        ({"RANK": 1}, "WORLD_SIZE is not set, but others are; .*found RANK=1"),
        ({"RANK": 2, "WORLD_SIZE": 2}, 'RANK = "2"; .* from 0 to 1; found RANK=2, WORLD_SIZE=2'),
        ({"FLUX_TASK_RANK": 3}, "found FLUX_TASK_RANK=3"),
        ({"JSM_NAMESPACE_RANK": 0, "JSM_NAMESPACE_SIZE": 4}, "found JSM_NAMESPACE_RANK=0"),
        ({"PALS_RANKID": 1}, "found PALS_RANKID=1"),
        ({"OMPI_COMM_WORLD_RANK": 1}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"PMI_RANK": 1}, "PMI_SIZE is not set"),
        (OPEN_MPI | {"MASTER_PORT": "http"}, 'MASTER_PORT = "http"; .* from 0 to 65535'),
        (STEP | {"MASTER_PORT": 99999}, 'MASTER_PORT = "99999"; .* from 0 to 65535'),
        ({"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": -1}, 'MASTER_PORT = "-1"; .* to 65535'),
    ],
)
def test_half_a_launcher_or_an_unknown_one_is_refused_with_its_variables(
    launch_of, variables, words
):
    with pytest.raises(ConfigError, match=words):
        launch_of(variables)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_of_an_unknown_launcher_waits_briefly_for_the_others(launch_of, monkeypatch, rank):
    monkeypatch.setattr(join, "_SECONDS_OF_UNKNOWN", 0.0)
    monkeypatch.setattr(join, "_LEAST_SECONDS_OF_UNKNOWN", 0.2)
    monkeypatch.setattr(join, "_store", None)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    launch = launch_of({"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank} | place)
    with pytest.raises(RankError, match=r"the 2 ranks have not met at 127.0.0.1.*found LOCAL_RANK"):
        join.meet(launch, join.STARTUP_TIMEOUT)


def test_unknown_master_address_is_named_without_torch(launch_of, monkeypatch, capfd) -> None:
    """Torch waited for a minute, and printed its stack in C++ before the message."""

    def unknown(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(join, "_store", None)
    monkeypatch.setattr(join, "_SECONDS_OF_UNKNOWN", 0.0)
    monkeypatch.setattr(join, "_LEAST_SECONDS_OF_UNKNOWN", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    place = {"MASTER_ADDR": "nowhere", "MASTER_PORT": free_port()}
    launch = launch_of({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0} | place)
    with pytest.raises(RankError, match=r"MASTER_ADDR = nowhere: no host has this name \(Name or"):
        join.meet(launch, timedelta(seconds=5))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("is_known", [True, False])
def test_port_in_use_is_said_and_no_rank_is_accused(launch_of, monkeypatch, is_known):
    monkeypatch.setattr(join, "_store", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        launch = launch_of({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0} | place)
        with pytest.raises(RankError) as caught:
            join.meet(replace(launch, is_known=is_known), timedelta(seconds=5))
    message = str(caught.value)
    assert f"cannot serve the ranks' store at 127.0.0.1:{port}" in message
    assert "in use" in message and "died" not in message and "not met" not in message


HARMLESS = [{}, {"WORLD_SIZE": 1}, {"NODE_RANK": 0}, {"MASTER_ADDR": "node0"}]


@pytest.mark.parametrize("variables", HARMLESS)
def test_variables_that_also_stand_in_plain_shells_start_one_process(launch_of, variables):
    assert launch_of(variables) == Launch(0, 1, 0)


@pytest.mark.parametrize(
    "words",
    [
        ["--deepspeed_config", "a.json"],
        ["--deepspeed_config=a.json"],
        ["--deepspeed", "a.json"],
        ["--deepspeed", "--deepspeed_config", "a.json"],
        ["--json", "--config", "a.json", "--deepspeed"],
    ],
)
def test_config_has_deepspeeds_names(words):
    parser = Parser()
    parser.add_config()
    parser.add_json()
    args, overrides = parser.parse_known_args([*words, "--train.steps", "3"])
    assert (args.config, overrides) == ("a.json", ["--train.steps", "3"])


@pytest.mark.parametrize("name", ["--config", "--deepspeed", "--deepspeed_config"])
def test_two_configs_are_refused_by_name(name, capsys):
    parser = Parser()
    parser.add_config()
    assert parser.parse_args(["--config", "a.json", name, "a.json"]).config == "a.json"
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", "a.json", name, "b.json"])
    assert "names a.json and b.json; keep one of them" in capsys.readouterr().err
