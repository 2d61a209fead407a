"""Runs every command of README.md and of the first pages of docs/, in the order of the pages.

In one folder, as a reader would: on a small corpus where a command names none, and for a few steps.
What the README shows of an output is compared with what is printed.
"""

import json
import subprocess

import pytest

from parallel3d.base.reader import read
from parallel3d.verify.local_ranks import free_port
from tests.launch.launching import Place, environment
from tests.launch.pages import NOT_RUN, ROOT, every_command, script_of, words_of

pytestmark = [pytest.mark.drill, pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = {
    "family": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SMALL = {
    "--data.source": "text",
    "--data.paths": "my-texts/**/*.txt",
    "--data.vocab_size": "270",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts of its own, a config of its own, and the commands."""
    root = tmp_path_factory.mktemp("a reader")
    Place(root)
    (root / "texts").rename(root / "my-texts")
    (root / "launch").symlink_to(ROOT / "launch")
    config = read(ROOT / "configs/ds.json")
    block = config["parallel3d"]
    block["model"] = MODEL
    block["data"] = {
        "source": "text",
        "paths": ["my-texts/**/*.txt"],
        "vocab_size": 270,
        "sequence_length": 128,
    }
    (root / "mine.json").write_text(json.dumps(config))
    return root


def typed(command):
    """A command as it is run: training is short and small, a port is free."""
    words = words_of(command)
    script, arguments = script_of(command)
    if script == "launch/train.py" and "--help" not in arguments:
        if "ds.json" in arguments:
            words += [x for key, value in SMALL.items() if key not in words for x in (key, value)]
        if "--train.steps" in words:
            words[words.index("--train.steps") + 1] = "6"
        else:
            words += ["--train.steps", "4", "--train.lr_schedule.warmup_steps", "1"]
    if words[0] in ("deepspeed", "torchrun"):
        words.insert(1, f"--master_port={free_port()}")
    return words


def run(command, place):
    """Run it; gives its standard output."""
    done = subprocess.run(
        typed(command),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=1000,
        env=environment() | {"XDG_CACHE_HOME": str(place / "cache"), "COLUMNS": "130"},
    )
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


@pytest.mark.parametrize("command", [c for c in every_command() if c not in NOT_RUN])
def test_command_of_a_page_runs(command, place):
    printed = run(command, place)
    if command.startswith("touch "):  # for a run that trains; left there it would stop the next one
        (place / command.split()[1]).unlink()
    readme = (ROOT / "README.md").read_text()
    if f"$ {command}\n" in readme:  # the output stands below it
        shown = readme.split(f"$ {command}\n")[1].split("\n\n")[0].splitlines()
        assert len(shown) >= 3
        for line in shown:
            assert line.strip() in printed, line


def test_files_left_by_the_commands_of_a_page(place):
    assert {path.name for path in (place / "runs").iterdir()} >= {"first", "mine", "alone"}
    assert (place / "runs/first/weights/model.safetensors").is_file()
