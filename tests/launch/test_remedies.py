"""Each remedy of a command's message is applied as it is written, and the command goes on."""

import json
import re
import shlex

import pytest

from launch import convert, draw, generate, plan, prepare, quick, report
from parallel3d.config import RunConfig
from parallel3d.extras.report import runs
from tests.checkpoint.folders import make_checkpoint, seal, state_of
from tests.remedies import refused

pytestmark = pytest.mark.gloo

LLAMA = {"family": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TRAINERS = {"per_device_train_batch_size": 4, "max_steps": 5, "model_name_or_path": "gpt2"}


@pytest.fixture
def command(called, tmp_path, monkeypatch):
    """Calls a command in an empty folder; gives its exit code and what it prints on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(module, *words):
        code, _, err = called(module.main, module.__name__, *words)
        return code, err

    return run


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# convert config


def test_deepspeed_config_gets_the_block_that_the_message_shows(command, tmp_path):
    file = write(tmp_path / "zero.json", {"train_batch_size": 8, "zero_optimization": {"stage": 1}})
    code, err = command(convert, "config", file)
    assert code == 2
    block = json.loads(re.search(r'add a block to it, "parallel3d": (\{.*\}), with your', err)[1])
    block["model"] = LLAMA  # "with your model"
    write(file, json.loads(file.read_text()) | {"parallel3d": block})
    assert RunConfig.from_json(str(file)).train.steps == 1000
    code, err = command(convert, "config", file)
    assert code == 2 and "run it: deepspeed launch/train.py --config" in err


def test_deepspeed_config_of_a_trainer_stands_beside_its_arguments(command, tmp_path):
    zero = write(tmp_path / "zero.json", {"zero_optimization": {"stage": 1}})
    assert "name the Trainer's arguments beside it" in command(convert, "config", zero)[1]
    arguments = write(tmp_path / "arguments.json", TRAINERS)
    assert command(convert, "config", zero, arguments)[0] == 0
    write(arguments, TRAINERS | {"deepspeed": "elsewhere/zero.json"})
    code, err = command(convert, "config", arguments)
    assert code == 2
    shown = re.search(r"parallel3d convert (config .*)", err)[1].replace("PATH/TO/", "")
    assert command(convert, *shlex.split(shown))[0] == 0


def test_contradicting_arguments_are_made_equal_or_auto(command, tmp_path):
    arguments = write(tmp_path / "arguments.json", TRAINERS | {"gradient_accumulation_steps": 4})
    zero = tmp_path / "zero.json"
    write(zero, {"gradient_accumulation_steps": 2})
    code, err = command(convert, "config", zero, arguments)
    assert code == 2 and 'make them equal, or write "auto" in the DeepSpeed file' in err
    own = json.loads(arguments.read_text())
    inside = write(tmp_path / "inside.json", own | {"deepspeed": "zero.json"})
    code, err = command(convert, "config", inside)
    assert code == 2 and 'make them equal, or write "auto" there' in err
    for value in (4, "auto"):
        write(zero, {"gradient_accumulation_steps": value})
        assert command(convert, "config", zero, arguments)[0] == 0
        assert command(convert, "config", arguments, zero)[0] == 0
        assert command(convert, "config", inside)[0] == 0


def test_file_of_settings_is_written_as_the_messages_say(command, tmp_path):
    good = json.dumps(TRAINERS)  # JSON is YAML
    for text, remedy in {
        "a: [": "write valid YAML",
        "word": "write a block of settings in YAML",
        "colour: 3": "name another file",
    }.items():
        file = write(tmp_path / "a.yaml", text)
        code, err = command(convert, "config", file)
        assert code == 2 and remedy in err, err
        write(file, good)
        assert command(convert, "config", file)[0] == 0
    file = write(tmp_path / "a.py", "def (")
    code, err = command(convert, "config", file)
    assert code == 2 and "name another file" in err
    call = "TrainingArguments('out', max_steps=5, per_device_train_batch_size=4)"
    write(file, f"{call}\nload_dataset('owner/texts')")
    code, err = command(convert, "config", file, write(tmp_path / "b.json", TRAINERS))
    assert code == 0, err


def test_existing_output_is_removed_or_another_is_named(command, tmp_path):
    file = write(tmp_path / "arguments.json", TRAINERS)
    (tmp_path / "ds.json").touch()
    code, err = command(convert, "config", file, "--out", "ds.json")
    assert code == 2 and "remove it, or name another file" in err
    assert command(convert, "config", file, "--out", "other.json")[0] == 0
    (tmp_path / "ds.json").unlink()
    assert command(convert, "config", file, "--out", "ds.json")[0] == 0


# prepare, plan, draw, quick

IDS = {"tokenizer": "none", "vocab_size": 300, "end_of_text_id": 7, "held_out_fraction": 0}


def test_manifest_is_of_a_stream(command, tmp_path):
    from tests.data.ids import writers
    from tests.data.ids.test_formats import ENDED

    writers.numpys(tmp_path / "a.npy", ENDED)
    data = {"source": "tokens", "paths": ["a.npy"], "sequence_length": 8, "cache": "cache", **IDS}
    words = ("--config", "ds.json", "--train_batch_size", 4)
    words += ("--gradient_accumulation_steps", "null")
    stream = json.dumps(data | {"stream": True, "manifest": "m", "stream_window": "all"})
    code, err = command(prepare, *words, "--data", json.dumps(data), "--manifest")
    assert code == 2 and 'add "stream": true, or drop --manifest' in err
    code, err = command(prepare, *words, "--data", json.dumps(data))
    assert code == 0, err
    code, err = command(prepare, *words, "--data", stream, "--manifest")
    assert code == 0, err


def test_documents_are_counted_before_they_are_shown():
    """By a manifest that counts them, or in a corpus."""
    text = {"source": "jsonl", "paths": ["a.jsonl"], "sequence_length": 8, "tokenizer": "gpt2"}
    stream = text | {"stream": True, "manifest": "m"}

    def options_of(data):
        config = RunConfig.from_json("ds.json", ["--data", json.dumps(data)])
        return prepare.check_options(config, False, "--show")

    with refused('use "manifest", or the same files without stream'):
        options_of(stream | {"count": "as-read"})
    options_of(stream | {"count": "manifest"})
    options_of(text)


def test_format_of_other_programs_is_the_one_that_exists(command):
    code, err = command(prepare, "--config", "ds.json", "--to", "nemo", "out")
    assert code == 2 and "the only one is megatron" in err


def test_plan_has_a_config_and_a_row_to_draw(command):
    code, err = command(plan)
    assert code == 2 and "set a config file, or the name of one in configs/" in err
    words = ("--config", "gpt2-124m.json", "--hardware", "h100", "--devices", 1, "--rows", 1)
    assert command(plan, *words)[0] == 0
    code, err = command(plan, *words, "--svg", "a.svg")
    assert code == 2 and "add --explain 1" in err
    code, err = command(plan, *words, "--svg", "a.svg", "--explain", 1)
    assert code == 0, err


def test_measured_step_is_that_of_a_run(command, tmp_path):
    for text in ("{", "{}", "[]", '{"spans": 3}'):
        code, err = command(draw, "--measured", write(tmp_path / "a.json", text))
        assert code == 2 and "use a run's profile/spans.json" in err


def test_quick_starts_its_ranks_itself(command, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    code, err = command(quick, "--minutes", 1)
    assert code == 2 and "start `parallel3d quick` without a launcher" in err


WISHES = [
    ([], "add it, or --params 5M or --tokens 100M", [["--minutes", "1"], ["--params", "5M"]]),
    (["--minutes", "0"], "write one such as 20, 500k, 1.2B or 1e24", [["--minutes", "20"]]),
    (["--tokens", "many"], "write one such as 20", [["--tokens", "500k"], ["--tokens", "1.2B"]]),
    (
        ["--minutes", "1", "--params", "1M", "--tokens", "1M"],
        "remove one",
        [["--minutes", "1", "--params", "1M"], ["--params", "1M", "--tokens", "1M"]],
    ),
    (["--minutes", "1", "--config", "ds.json"], "use one of the two", [["--minutes", "1"]]),
    (["--minutes", "1", "--data", "songs"], "use one of stories", [["--minutes", "1"]]),
]


@pytest.mark.parametrize(("wrong", "remedy", "mends"), WISHES, ids=range(len(WISHES)))
def test_wishes_of_a_quick_run_are_written_as_asked(monkeypatch, capsys, wrong, remedy, mends):
    monkeypatch.setattr("sys.argv", ["quick.py", *wrong])
    with pytest.raises(SystemExit):
        quick.parse_args()
    assert remedy in capsys.readouterr().err.replace("'", "")
    for words in mends:
        monkeypatch.setattr("sys.argv", ["quick.py", *words])
        assert quick.parse_args()


@pytest.mark.parametrize(
    ("wrong", "remedy", "right"),
    [
        ([], "give a text, or use --chat", ["--prompt", "a"]),
        ([], "give a text, or use --chat", ["--chat"]),
        (["--prompt", "caf\udce9"], "change its encoding", ["--prompt", "café"]),
        (["--prompt", "a", "--top-p", "2"], "use 0.8", ["--prompt", "a", "--top-p", "0.8"]),
        (["--prompt", "a", "--top-k", "0"], "use 1 or more", ["--prompt", "a", "--top-k", "1"]),
        (["--prompt", "a", "--sed", "3"], "see --help", ["--prompt", "a", "--seed", "3"]),
        (["--prompt"], "write --prompt VALUE", ["--prompt", "VALUE"]),
    ],
)
def test_options_of_generate_are_written_as_asked(monkeypatch, capsys, wrong, remedy, right):
    monkeypatch.setattr("sys.argv", ["generate.py", "runs/first", *wrong])
    with pytest.raises(SystemExit):
        generate.parse_args()
    assert remedy in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["generate.py", "runs/first", *right])
    assert generate.parse_args()


def test_data_as_a_block_does_not_choose_a_run():
    block = '{"source": "text"}'
    assert not quick.is_meant_by(["--config", "ds.json", "--data", block])
    assert not quick.is_meant_by([f"--data={block}"])
    assert quick.is_meant_by(["--data", "stories"])
    assert quick.is_meant_by(["--minutes", "3", "--data", block])


# report, replay


def test_report_is_of_a_run_with_a_step(command, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "pictures", lambda *_: {})  # tests/report draws them
    code, err = command(report, tmp_path / "none")
    assert code == 2 and "name the folder of a run, such as runs/first" in err
    run = tmp_path / "runs/first"
    run.mkdir(parents=True)
    raw = RunConfig.from_json("ds.json", []).resolve(1).to_dict()
    raw["parallel3d"]["model"]["vocab_size"] = 4096
    write(run / "config.json", raw)
    write(run / "metrics.jsonl", "")
    code, err = command(report, run)
    assert code == 2 and "wait for the first step" in err
    line = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 10, "seconds": 1.0}
    write(run / "metrics.jsonl", json.dumps(line) + "\n")
    code, err = command(report, run)
    assert code == 0, err
    # It wrote tmp.html beside the folder that was named.
    code, err = command(report, run, "--to", tmp_path)
    assert code == 2 and "is a folder; name a file in it" in err
    code, err = command(report, run, "--to", tmp_path / "page.html")
    assert code == 0 and (tmp_path / "page.html").is_file(), err


def test_replayed_step_is_one_of_the_run(tmp_path):
    from parallel3d.extras.guard.replay import replay_config

    run = tmp_path / "run"
    raw = RunConfig.from_json("ds.json", []).resolve(1).to_dict()
    folder = make_checkpoint(run / "checkpoints", step=2)
    write(folder / "state.json", state_of(2) | {"config": raw})
    seal(folder, 2)
    lines = [json.dumps({"step": step, "loss": 2.0}) + "\n" for step in (1, 2, 3)]
    write(run / "metrics.jsonl", "".join(lines))
    with refused("has 3 steps; use one of them"):
        replay_config(run, 9, None, [])
    with refused("use a step after one of its checkpoints"):
        replay_config(run, 2, None, [])
    _, checkpoint = replay_config(run, 3, None, [])
    assert checkpoint.name == "step-2"
