"""What is read of a file and of a command line; wrong words there are in test_config_bad.py."""

import json
import os
import re
from copy import deepcopy
from pathlib import Path

import pytest

from parallel3d.base import reader
from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import find, parse, read
from parallel3d.config import Parallel3DConfig, RunConfig
from parallel3d.config.deepspeed_keys import TOP_LEVEL
from parallel3d.config.normalise import apply_overrides, full_path
from parallel3d.config.run_settings import RunSettings
from tests.config.configs import raw

pytestmark = pytest.mark.pure


def test_comments_and_trailing_commas_are_accepted():
    text = """// first
    {
      "url": "http://x/*y*/,]", // a string keeps its // and its commas
      /* two
         lines */
      "list": [1, 2, /* last */ ],
      "quote": "a \\" // b",
    }
    """
    assert parse(text) == {"url": "http://x/*y*/,]", "list": [1, 2], "quote": 'a " // b'}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n "b": 2,\n "a": 3}', ["'a' appears 2 times"]),
        ('{"a": {"b": 1, "b": 1}}', ["'b' appears 2 times"]),
        ('{"a": NaN}', ["NaN is not JSON"]),
        ('{"a": -Infinity}', ["-Infinity is not JSON"]),
        ('{\n// comment\n"a" 1}', ["line 3, column 5", "':' delimiter"]),
        ('{/* one\ntwo */ "a": tru}', ["line 2", "column 13"]),
        ('{"a": 1e-3 # fast\n}', ["line 1", "comments //"]),
        ('{"a": [,]}', ["line 1"]),
        ('{"a": [1,,]}', ["line 1"]),
        ("{,}", ["line 1"]),
        ('{"a": 1 /* open', ["line 1"]),
        ("{'a': 1}", ["line 1"]),
        ("[1]", ["not [1]", "one object"]),
        ("", ["line 1", "the text ends there"]),
        ('{"a": {"b": 1}\n', ["line 2", "the text ends there"]),
        ("[" * 100_000, ["line 1", "more than 100 blocks or lists"]),
        ('{"a": ' + 5000 * "9" + "}", ["cannot be read (", "digits"]),
    ],
)
def test_bad_json_is_refused_with_its_place(text, words):
    with pytest.raises(ConfigError) as caught:
        parse(text, "ds.json")
    assert all(word in str(caught.value) for word in ["ds.json", *words])


def test_overrides_are_json_or_text():
    raw = {"a": {"b": 1}}
    apply_overrides(
        raw, ["--a.b", "2", "--a.c=x=y", "--d", "[1, 2]", "--e=true", "--f", "-1", "--d", '"3"']
    )
    assert raw == {"a": {"b": 2, "c": "x=y"}, "d": "3", "e": True, "f": -1}


@pytest.mark.parametrize("text", ["20261130", "1e3", "007", "true", "1.", "null-run"])
def test_name_on_the_command_line_stays_the_text_that_was_written(text):
    raw = {}
    apply_overrides(raw, ["--run.name", text, "--wandb.group", text, "--data.tokenizer", text])
    assert raw["parallel3d"] == {"run": {"name": text}, "data": {"tokenizer": text}}
    assert raw["wandb"] == {"group": text}


def test_null_and_quoted_texts_are_json_on_the_command_line():
    raw = {}
    apply_overrides(raw, ["--wandb.group", "null", "--run.name", '"7"', "--checkpoint.resume", "5"])
    assert raw["wandb"] == {"group": None}
    assert raw["parallel3d"] == {"run": {"name": "7"}, "checkpoint": {"resume": 5}}


@pytest.mark.parametrize(
    ("text", "number"),
    [(".5", 0.5), ("3.", 3.0), ("+1e-3", 1e-3), ("-.5e-1", -0.05), ("1E-3", 1e-3)],
)
def test_decimals_on_the_command_line_are_read_as_people_write_them(text, number):
    raw = {}
    apply_overrides(raw, ["--optimizer.params.lr", text])
    assert raw["optimizer"]["params"]["lr"] == number


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"enabled": true, "min_loss_scale": Infinity}', "Infinity is not JSON; write a finite"),
        ('{"enabled": true, "api_key": "secret",, }', "column 39: .*; write JSON"),
        ('{"enabled": true', "the text ends there; write JSON"),
        ("{'enabled': true}", "column 2: .*; write JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' appears 2 times"),
        ("[1, 2,, 3]", "column 7: .*; write JSON"),
    ],
)
def test_broken_block_on_the_command_line_is_refused(text, words):
    with pytest.raises(ConfigError, match=f"^--fp16.*{words}") as caught:
        apply_overrides({}, ["--fp16", text])
    assert "secret" not in str(caught.value)


def test_find_looks_in_the_working_and_config_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find("ds.json").parent.name == "configs"
    assert find("ds") == find("ds.json")
    assert find("configs/ds.json") == find("ds.json")  # the documents write it so
    assert find("configs/ladders/cpu.json").is_file()
    (tmp_path / "ds.json").write_text("{}")
    assert find("ds.json").resolve() == tmp_path / "ds.json"
    with pytest.raises(ConfigError, match=r"no config file 'nowhere\.json'.*ds\.json"):
        find("nowhere.json")
    with pytest.raises(ConfigError, match="no config file"):
        find("nowhere/ds.json")


def test_pipe_is_refused_and_a_home_is_expanded(tmp_path, monkeypatch):
    """A shell passes `<(...)` as a pipe, which one rank alone could read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="'~/pipe': it is no regular file"):
        find("~/pipe")
    (tmp_path / "ds.json").write_text("{}")
    assert find("~/ds.json") == tmp_path / "ds.json"


def test_byte_order_mark_is_skipped(tmp_path):
    file = tmp_path / "bom.json"
    file.write_text('{"a": 1}', encoding="utf-8-sig")
    assert read(file) == {"a": 1}


@pytest.mark.parametrize("content", [b"\x80\xff\x00", "{}".encode("utf-16")])
def test_file_without_utf8_text_is_refused(tmp_path, content):
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read .*ds.json: .*is not UTF-8 .*; convert it"):
        read(file)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "."])
def test_impossible_path_gives_one_message(name):
    with pytest.raises(ConfigError, match="no config file"):
        find(name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("mesh.pp", "parallel3d.mesh.pp"),
        ("mesh", "parallel3d.mesh"),
        ("model.hidden_size", "parallel3d.model.hidden_size"),
        ("run.name", "parallel3d.run.name"),
        ("train.lr_schedule.type", "parallel3d.train.lr_schedule.type"),
        ("parallel3d.mesh.pp", "parallel3d.mesh.pp"),
        # DeepSpeed has blocks of these names, with other keys
        ("checkpoint.every", "parallel3d.checkpoint.every"),
        ("checkpoint.evry", "parallel3d.checkpoint.evry"),
        ("checkpoint.tag_validation", "checkpoint.tag_validation"),
        ("checkpoint", "checkpoint"),
        ("pipeline.schedule", "parallel3d.pipeline.schedule"),
        ("pipeline.stages", "pipeline.stages"),
        ("optimizer.params.lr", "optimizer.params.lr"),
        ("zero_optimization.stage", "zero_optimization.stage"),
        ("steps", "steps"),
    ],
)
def test_short_path_becomes_full_path(path, expected):
    assert full_path(path) == expected


@pytest.mark.parametrize("depth", [120, 500, 5000])
@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a":', "}")], ids=["lists", "blocks"])
@pytest.mark.parametrize("path", ["parallel3d.data.paths", "gradient_clipping", "unknown"])
def test_deep_nesting_is_one_short_message(tmp_path, depth, opening, closing, path):
    text = json.dumps(raw(**{path: "HERE"}), indent=1)
    file = tmp_path / "ds.json"
    file.write_text(text.replace('"HERE"', f"{opening * depth}1{closing * depth}"))
    with pytest.raises(ConfigError, match=r"ds\.json, line \d+: more than 100 blocks") as caught:
        RunConfig.from_json(str(file))
    assert len(str(caught.value)) < 300


def test_our_settings_share_no_path_with_deepspeed_keys():
    assert not set(Parallel3DConfig.model_fields) & set(RunSettings.model_fields)
    shared = set(Parallel3DConfig.model_fields) & set(TOP_LEVEL)
    assert shared == {"checkpoint", "pipeline"}
    for section in shared:
        ours = Parallel3DConfig.model_fields[section].annotation.model_fields
        assert TOP_LEVEL[section].items and not set(ours) & set(TOP_LEVEL[section].items)


def test_short_paths_change_the_default_config():
    words = "--mesh.pp 2 --model.hidden_size 64 --run.name x --checkpoint.every=7"
    words += " --parallel3d.mesh.tp 2 --bf16.enabled=true"
    config = RunConfig.from_json("ds.json", words.split())
    assert (config.mesh.pp, config.mesh.tp, config.model.hidden_size) == (2, 2, 64)
    assert config.bf16.enabled
    assert (config.run.name, config.checkpoint.every) == ("x", 7)


def test_words_that_a_shell_made_of_a_pattern_are_a_list() -> None:
    words = "--data.paths a.txt b.txt --optimizer.params.betas 0.9 0.99 --mesh.dp -1"
    pairs = dict(reader.setting_pairs(words.split()))
    assert json.loads(pairs["data.paths"]) == ["a.txt", "b.txt"]
    assert json.loads(pairs["optimizer.params.betas"]) == [0.9, 0.99]
    assert pairs["mesh.dp"] == "-1"


LISTED = {"mixture": [{"field": "a"}, {"field": "b"}], "betas": [0.9, 0.999], "none": []}


def test_entries_of_lists_are_set_by_their_number() -> None:
    raw = {"data": deepcopy(LISTED)}
    reader.set_values(raw, [("data.mixture.1.field", "x"), ("data.betas.1", "0.95")])
    assert raw["data"]["mixture"] == [{"field": "a"}, {"field": "x"}]
    assert raw["data"]["betas"] == [0.9, 0.95]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mixture.2.field", "mixture is a list of 2; use 0 to 1 in place of 2"),
        ("mixture.-1.field", "mixture is a list of 2; use 0 to 1 in place of -1"),
        ("mixture.field", "mixture is a list of 2; use 0 to 1 in place of field"),
        ("betas.7", "betas is a list of 2; use 0 to 1 in place of 7"),
        ("betas.0.field", "'0' is 0.9, which has no settings; set --betas.0 as a whole"),
        ("none.0", "none is a list of 0; write --none [...]"),
    ],
)
def test_other_entries_give_one_message(path: str, message: str) -> None:
    raw = deepcopy(LISTED)
    with pytest.raises(ConfigError, match=re.escape(f"--{path}: {message}")):
        reader.set_values(raw, [(path, "1")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": "caf\xe9"}', "byte 0xe9 at offset 10 is not UTF-8"),
        (b"\xff\xfe{\x00}\x00", "byte 0xff at offset 0 is not UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read (Exceeds the limit"),
    ],
)
def test_unreadable_file_is_reported_by_its_own_error(tmp_path, content, message) -> None:
    file = tmp_path / "odd.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read(file)
    assert str(file) in str(caught.value)


def test_null_byte_in_a_path_is_not_called_an_encoding_error() -> None:
    with pytest.raises(ConfigError, match="embedded null byte") as caught:
        read(Path("a\0b"))
    assert "UTF-8" not in str(caught.value)
