"""launch/checkpoint.py: what scripts rely on, that is standard output, --json and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from launch import checkpoint as command
from tests.checkpoint.folders import FIRST, KINDS, SECOND, make_checkpoint, seal, state_of

pytestmark = pytest.mark.gloo

COMMAND = Path(__file__).parents[2] / "launch/checkpoint.py"


@pytest.fixture
def run_folder(tmp_path):
    """A run's folder with two checkpoints, and what killed saves and deletes leave."""
    checkpoints = tmp_path / "my-run" / "checkpoints"
    make_checkpoint(checkpoints, step=9)
    make_checkpoint(checkpoints, step=10, seed=1)
    for name in ("step-11.tmp", "step-8.deleted", "step-12.rejected"):
        (checkpoints / name).mkdir()
    (checkpoints / "latest").write_text("step-11\n")
    return tmp_path / "my-run"


@pytest.fixture
def run(monkeypatch, capsys):
    """Give a function that runs the command: exit code, standard output, standard error."""

    def run_it(*arguments):
        monkeypatch.setattr(sys, "argv", ["checkpoint.py", *map(str, arguments)])
        code = command.main()
        return code, *capsys.readouterr()

    return run_it


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_inspect_json_describes_the_newest_checkpoint(run, run_folder):
    folder = run_folder / "checkpoints" / "step-10"
    code, out, err = run("inspect", run_folder, "--json")
    assert code == 0 and err == ""
    report = json.loads(out)
    state = state_of(10)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    numel = 5 * 2 + 4
    tensors = 4 * numel * len(KINDS)
    assert report == {
        **{key: value for key, value in state.items() if key != "parameters"},
        "path": str(folder),
        "num_parameters": 2,
        "num_elements": numel,
        "parameters": {"embedding.weight": [5, 2], "blocks.0.norm.weight": [4]},
        "bytes": {
            **dict.fromkeys(KINDS, 4 * numel),
            "other": sum(sizes.values()) - tensors,
            "total": sum(sizes.values()),
        },
        "files": [
            {
                "file": name,
                "bytes": sizes[name],
                "chunks": chunks,
                "digest": xxhash.xxh3_128_hexdigest((folder / name).read_bytes()),
            }
            for name, chunks in ((FIRST, 6), (SECOND, 6), ("state.json", 0))
        ],
    }
    for path in (run_folder / "checkpoints", folder):
        assert json.loads(run("inspect", path, "--json")[1]) == report
    older = json.loads(run("inspect", run_folder / "checkpoints" / "step-9", "--json")[1])
    assert older["step"] == 9


@pytest.mark.parametrize("width", [80, 140])
def test_inspect_text_fits_the_terminal(run, run_folder, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = run("inspect", run_folder)
    assert code == 0 and err == ""
    words = " ".join(out.split())
    for text in ("step 10 tokens 40,960", "pp 1, dp 2, tp 1", "torch 2.13.0", "master 56"):
        assert text in words, text
    assert "shard-" not in out, "files are left to --json"
    assert all(len(line) <= width for line in out[out.index("format") :].splitlines())


def test_inspect_shows_a_config_to_train_with(run, run_folder):
    code, out, _ = run("inspect", run_folder, "--show-config")
    assert code == 0 and json.loads(out) == state_of(10)["config"]


def test_inspect_shows_state_with_unexpected_values(run, tmp_path):
    folder = make_checkpoint(tmp_path)
    state = {"format": 1, "step": 10, "mesh": [1], "config": {"parallel3d": 3}}
    state["parameters"] = {"w": {"shape": [2]}}
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder, 10)
    code, out, _ = run("inspect", folder)
    assert code == 0 and "tokens           none" in out


def test_verify_reports_sound_checkpoints_and_leftovers(run, run_folder):
    code, out, err = run("verify", run_folder)
    assert code == 0 and err == ""
    rows = [line.split()[:2] for line in out.splitlines()]
    assert rows[:2] == [["step-10", "ok"], ["step-9", "ok"]], "the newest first"
    assert "step-11.tmp           unfinished" in out
    assert "step-8.deleted        partly deleted" in out
    assert "step-12.rejected      set aside" in out
    code, out, err = run("verify", run_folder, "--json")
    assert code == 0 and "step-10" in err
    report = json.loads(out)
    assert report["ok"] is True and report["bad"] == []
    names = [row["folder"] for row in report["left_over"]]
    assert names == ["step-11.tmp", "step-12.rejected", "step-8.deleted"]


def test_verify_names_damaged_files(run, run_folder):
    checkpoints = run_folder / "checkpoints"
    damage(checkpoints / "step-9" / SECOND)
    (checkpoints / "step-9" / "state.json").unlink()
    expected = [
        {"file": f"step-9/{SECOND}", "reason": "its contents do not match the manifest "},
        {"file": "step-9/state.json", "reason": "missing"},
    ]
    code, out, _ = run("verify", run_folder, "--json")
    report = json.loads(out)
    assert code == 1 and report["ok"] is False
    assert [row["file"] for row in report["bad"]] == [row["file"] for row in expected]
    for row, reported in zip(expected, report["bad"], strict=True):
        assert reported["reason"].startswith(row["reason"])
    code, out, _ = run("verify", checkpoints)
    assert code == 1
    assert "step-9                DAMAGED" in out and "state.json: missing" in out
    assert run("verify", checkpoints / "step-10")[0] == 0
    (checkpoints / "step-10" / "manifest.json").unlink()
    code, out, _ = run("verify", checkpoints / "step-10", "--json")
    assert code == 1
    assert [row["file"] for row in json.loads(out)["bad"]] == ["step-10/manifest.json"]


def test_inspect_refuses_a_damaged_checkpoint(run, run_folder):
    newest = run_folder / "checkpoints" / "step-10"
    for name in ("state.json", "manifest.json", FIRST):
        data = (newest / name).read_bytes()
        (newest / name).write_bytes(data[:-1])
        code, out, err = run("inspect", run_folder, "--json")
        assert code == 2 and out == "" and name in err
        (newest / name).write_bytes(data)
    state = (newest / "state.json").read_bytes()
    (newest / "state.json").write_bytes(state.replace(b"40960", b"40961"))
    code, out, err = run("inspect", run_folder)
    assert code == 2 and out == "" and "do not match the manifest" in err
    (newest / "state.json").write_bytes(state)
    assert run("inspect", run_folder)[0] == 0


def test_missing_checkpoint_is_exit_code_2(run, run_folder, tmp_path):
    bare = tmp_path / "bare"
    (bare / "checkpoints" / "step-5.tmp").mkdir(parents=True)
    file = tmp_path / "file"
    file.write_text("")
    for path, word in [
        (tmp_path / "nowhere", "no checkpoint there"),
        (file, "no checkpoint there"),
        (bare, "step-5.tmp is unfinished"),
        (bare / "checkpoints" / "step-5.tmp", "no checkpoint there"),
    ]:
        for action in ("inspect", "verify"):
            code, out, err = run(action, path, "--json")
            assert code == 2 and out == "" and word in err and str(path) in err


def test_command_runs_in_the_checkpoint_folder(run, run_folder, monkeypatch):
    monkeypatch.chdir(run_folder / "checkpoints" / "step-9")
    code, out, err = run("verify", ".", "--json")
    assert code == 0 and json.loads(out)["ok"] is True
    assert err.startswith("step-9                ok")


@pytest.mark.slow  # `main` is called above; tests/launch/test_train.py starts a command
def test_command_runs_from_a_shell_in_the_checkpoint_folder(run_folder):
    """Imports, exit code and a working directory within the checkpoint."""
    folder = run_folder / "checkpoints" / "step-9"
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, str(COMMAND), "verify", ".", "--json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
    assert done.stderr.startswith("step-9                ok")
