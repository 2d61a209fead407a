"""docs/clusters/: each file is read by its scheduler's own parser.

tests/launch/test_launchers.py runs their command.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.pure

FOLDER = Path(__file__).parents[2] / "docs" / "clusters"
NAMES = ("slurm.sbatch", "jobset.yaml", "skypilot.yaml")


def read(name):
    return yaml.safe_load((FOLDER / name).read_text())


def script_of(name):
    """The lines of shell that a file starts on each node."""
    if name == "slurm.sbatch":
        return (FOLDER / name).read_text()
    if name == "skypilot.yaml":
        return read(name)["run"]
    pod = read(name)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod["containers"][0]["args"][0]


def command_of(name):
    """The command that trains, with one space between its words."""
    (command,) = re.findall(r"torchrun(?:.*\\\n)*.*", script_of(name))
    return " ".join(command.replace("\\\n", " ").split())


def test_all_start_the_same_command():
    assert len({command_of(name) for name in NAMES}) == 1
    page = (FOLDER.parent / "several-nodes.md").read_text()
    assert all(f"clusters/{name}" in page for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_shell_can_read_the_script(name):
    subprocess.run(["bash", "-n"], input=script_of(name), text=True, check=True)


def test_variables_of_the_command_are_set():
    names = set(re.findall(r"\$(\w+)", command_of("slurm.sbatch")))
    for name in ("slurm.sbatch", "skypilot.yaml"):
        assert names <= set(re.findall(r"export (\w+)=", script_of(name)))
    pod = read("jobset.yaml")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert names <= {variable["name"] for variable in pod["containers"][0]["env"]}


@pytest.mark.slow  # the models take seconds to import
def test_jobset_has_only_fields_of_its_schema():
    """Kubeflow's own models of the API drop a field that they do not know."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    document = read("jobset.yaml")
    assert JobsetV1alpha2JobSet.from_dict(document).to_dict() == document


def test_pods_find_the_first_one_by_the_name_that_jobset_gives_it():
    """SET-JOB-0-INDEX.SET."""
    document = read("jobset.yaml")
    name = document["metadata"]["name"]
    job = document["spec"]["replicatedJobs"][0]["name"]
    pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    variables = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    assert variables["HEAD"] == f"{name}-{job}-0-0.{name}"
    assert variables["NODES"] == str(
        document["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
    )


@pytest.mark.slow
def test_skypilot_reads_its_file():
    sky = pytest.importorskip("sky", reason="pip install skypilot reads it; it is not installed")
    task = sky.Task.from_yaml(str(FOLDER / "skypilot.yaml"))
    assert task.num_nodes == 2


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("sbatch"), reason="Slurm is not installed")
def test_slurm_knows_the_options():
    """A controller is not needed to see an unknown option."""
    command = ["sbatch", "--test-only", str(FOLDER / "slurm.sbatch")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "unrecognized option" not in done.stderr
