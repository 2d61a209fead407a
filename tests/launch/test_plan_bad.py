"""Nonsense for launch/plan.py: exit code 2, one message, and nothing before it."""

import json
from copy import deepcopy
from pathlib import Path

import pytest

from launch import plan
from parallel3d.config import hardware

pytestmark = pytest.mark.pure

CONFIG = ("--config", "gpt2-1.5b.json")
MACHINE = ("--hardware", "a100-80gb", "--devices", "8")
ON_A_NODE = (*CONFIG, *MACHINE)
DESCRIBED = json.loads((hardware.DIRECTORY / "H100-SXM5-80GB.json").read_text())
FIGURE = {"value": 1e12, "source": "this test"}


@pytest.fixture
def refused(called):
    """Gives what the command says to a command line that it must refuse."""

    def run(*arguments: str) -> str:
        code, out, err = called(plan.main, "plan.py", *arguments)
        assert (code, out) == (2, ""), err
        assert err.startswith("plan: ") and err.endswith("\n") and "Traceback" not in err
        assert err.count("\n") == 1 or "problem" in err.splitlines()[0]
        assert "; " in err or "," in err  # a remedy
        return err

    return run


COMMANDS = [
    (("--devices", "abc"), "--devices = abc: must be a whole number; use 1 or more"),
    (("--devices", "1.5"), "--devices = 1.5: must be a whole number"),
    (("--devices", "-4"), "--devices = -4: is too small; use 1 or more"),
    (("--devices", "0"), "--devices = 0: is too small"),
    (("--devices", "9" * 5000), "is too large; use 10,000,000 or less"),
    (("--devices", "1000000000000000"), "is too large; use 10,000,000 or less"),
    (("--devices",), "--devices: has no value"),
    (("--devices", "53"), "no mesh of 53 devices divides the model's heads"),
    (("--rows", "0"), "--rows = 0: is too small"),
    (("--rows", "three"), "--rows = three: must be a whole number"),
    (("--explain", "0"), "--explain = 0: is too small"),
    (("--explain", "-1"), "--explain = -1: is too small"),
    (("--explain", "1.5"), "--explain = 1.5: must be a whole number"),
    (("--svg", "row.svg"), "--svg = row.svg: needs a row to draw; add --explain 1"),
    (("--trace", "row.json"), "--trace = row.json: needs a row to draw"),
    (("--explain", "1", "--svg", "/"), '--svg = "/": is a folder; name a file in it'),
    (("--explain", "1", "--svg", "/nowhere/a.svg"), "'/nowhere' does not exist; create it"),
    (("--explain", "1", "--trace", "/nowhere/a.json"), "--trace = \"/nowhere/a.json\": the folder"),
    (("--explain", "1", "--svg", ""), "--svg = \"\": is a folder"),
    (("--fix", "pp"), "--fix pp: has no value; write NAME=VALUE"),
    (("--fix", "pp=x"), 'pp = "x": must be an integer'),
    (("--fix", "pp=2", "--fix", "pp=4"), "--fix pp: is set twice; set it once"),
    (("--fix", "schedul=gpipe"), 'the nearest one is "schedule"'),
    (("--fix", "zero_stage=true"), "zero_stage = true: must be an integer"),
    (("--fix", "zero_stage=9"), "zero_stage = 9: must be at most 3"),
    (("--fix", "sequence_parallel=1"), "sequence_parallel = 1: must be true or false"),
    (("--fix", "schedule=zz"), "choose from breadth_first, gpipe, interleaved"),
    (("--fix", "micro_batch=" + "[" * 100_000), "must be an integer"),
    (("--fix", "tp=3"), "no mesh of 8 devices divides the model's heads"),
    (("--fix",), "--fix: has no value"),
    (("--hardware", "abacus"), '--hardware = "abacus": is not described; use one of A100'),
    (("--hardware", "/"), '--hardware = "/": is not described'),
    (("--hardware", ""), '--hardware = "": is not described'),
    (("--hardware", "nowhere.json"), '--hardware = "nowhere.json": is not a file'),
    (("--hardware", "v100-32gb"), "V100-SXM2-32GB supports fp16, but not bf16"),
    (("--config", "gpt5.json"), "no config file 'gpt5.json'"),
    (("--config", "/"), "no config file '/': it is a folder"),
    (("--config", "a\0b"), "no config file"),
    (("--json=yes",), "--json = 'yes': takes no value"),
    (("--parallel3d.model.vocab_size", "1000000000000"), "parameters need at least"),
    (("--parallel3d.model.num_hidden_layers", "1000000000"), "is above the limit of 2,000 layers"),
    (("--gradient_accumulation_steps", "1" + 30 * "0"), "gradient_accumulation_steps = 1000"),
    (("--parallel3d.mesh.pp", "1000000000"), "parallel3d.mesh.pp"),
    (("--nonsense", "3"), "nonsense = 3: is not a setting"),
    (("--validate", "nowhere.csv"), "python -m benchmarks.published"),
    (("gpt2",), "'gpt2': unexpected argument; write --dotted.path value"),
    (("--train_batch_size", "1001"), "is not a multiple of train_micro_batch_size_per_gpu=4 x"),
    (("--parallel3d.model.hidden_size", "1601"), "num_attention_heads"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), COMMANDS)
def test_bad_command_line_gives_one_message(refused, arguments, words):
    config = () if "--config" in arguments else CONFIG
    assert words in refused(*config, *MACHINE, *arguments)


def test_missing_config_is_refused(refused):
    assert "--config: is missing; set a config file" in refused("--hardware", "h100")


def test_row_beyond_the_table_is_refused(refused):
    err = refused(*ON_A_NODE, "--fix", "pp=8", "tp=1", "--rows", "1", "--explain", "9")
    assert "--explain 9: must be at most 1" in err


def changed(path: str, value: object) -> dict:
    """A description in which `value` stands at the dotted path; None: nothing does."""
    raw = deepcopy(DESCRIBED)
    *blocks, key = path.split(".")
    block = raw
    for name in blocks:
        block = block.setdefault(name, {})
    block.pop(key, None)
    if value is not None:
        block[key] = value
    return raw


FIGURES = [
    ("memory_bytes.value", 0, "must be greater than 0; write what was measured"),
    ("link.latency.value", -3e-6, "link.latency.value = -3e-06: must be greater than 0"),
    ("memory_bytes.value", True, "memory_bytes.value = true: must be a number"),
    ("memory_bytes.value", "much", 'memory_bytes.value = "much": must be a number'),
    ("network.latency.value", 1e300, "must be 1e-15 to 1e+21"),
    ("network.bandwidth.value", 1e-300, "must be 1e-15"),
    ("devices_per_node.value", 7.5, "devices_per_node.value = 7.5: must be a whole number"),
    ("memory_bytes", [8e10], 'block of settings; write {"value": ...}'),
    ("memory_bytes", None, "memory_bytes: is required; add it: Device memory"),
    ("memory_bytes.source", 7, "memory_bytes.source = 7: must be a string"),
    ("peak_flops.bf61", FIGURE, 'peak_flops.bf61: is not a key of this table; use'),
    ("peak_flops.bf16.valeu", 1, 'valeu = 1: is not a setting; the nearest one is "value"'),
    ("memory_bandwith", FIGURE, 'the nearest one is "memory_bandwidth"'),
    ("tpu", FIGURE, "tpu = {"),
    ("host.nvme_reed", FIGURE, 'the nearest one is "nvme_read"'),
    ("name", 3, "name = 3: must be a string"),
    ("cores", {"count": FIGURE, "alone": {"matmul": FIGURE}}, "matmul.value = 1000000000000.0: "),
    ("curves", {"matmull": 0.8}, "curves.matmull = 0.8: must be a curve with a number above 0"),
    ("curves", {"traffic": -0.5}, "curves.traffic = -0.5: must be a curve with a number above 0"),
    ("curves", {"traffic": True}, "curves.traffic = true: must be a number"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "words"), FIGURES)
def test_bad_figure_gives_one_message(refused, tmp_path, path, value, words):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(changed(path, value)))
    assert words in refused(*ON_A_NODE, "--hardware", str(file))


WHOLE = json.dumps(DESCRIBED, indent=1)
FILES = {
    "no last brace": (WHOLE.rstrip()[:-1].encode(), "the text ends there"),
    "no last brace, a new line": (f"{WHOLE.rstrip()[:-1]}\n".encode(), "the text ends there"),
    "empty": (b"", "the text ends there"),
    "a list": (b"[]", "must be one object, not []"),
    "binary": (bytes(range(256)), "convert it to UTF-8"),
    "UTF-16": (WHOLE.encode("utf-16"), "convert it to UTF-8"),
    "NaN": (WHOLE.replace("80000000000.0", "NaN").encode(), "NaN is not JSON"),
    "infinite": (WHOLE.replace("80000000000.0", "1e400").encode(), "must be finite"),
    "twice": (WHOLE.replace('"aliases"', '"name"').encode(), "the key 'name' appears 2 times"),
    "deep": (b"[" * 100_000, "more than 100 blocks or lists are nested"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("flag", ["--hardware", "--config"])
def test_invalid_hardware_file_is_refused(refused, tmp_path, name, flag):
    content, words = FILES[name]
    file = tmp_path / "mine.json"
    file.write_bytes(content)
    if flag == "--hardware" or name != "infinite":
        config = () if flag == "--config" else CONFIG
        assert words in refused(*config, *MACHINE, flag, str(file))


def test_folder_as_hardware_is_refused(refused, tmp_path):
    (tmp_path / "mine.json").mkdir()
    assert "is not a file" in refused(*ON_A_NODE, "--hardware", str(tmp_path / "mine.json"))


def test_hardware_file_of_the_user_is_accepted(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(changed("name", "mine")), encoding="utf-8-sig")
    assert hardware.load(str(file)).name == "mine"
    assert Path(hardware.DIRECTORY / "H100-SXM5-80GB.json").exists()
    assert hardware.load("H100-SXM5-80GB.json").name == "H100-SXM5-80GB"


@pytest.mark.parametrize("rows", [1, 3])
def test_requested_number_of_rows_is_shown(called, rows):
    """Of all kinds together: five faster ones that do not fit are known here."""
    asked = ("--fix", "dp=1", "recompute=none", "--json", "--rows", rows)
    code, out, _ = called(plan.main, "plan.py", *ON_A_NODE, *asked)
    assert code == 0 and len(json.loads(out)["plans"]) == rows
