"""Remedies about files, folders, paths and ranks: each is done as it is written, and helps."""

import json
import re
from pathlib import Path

import pytest

from parallel3d import models
from parallel3d.base.paths import expand_path
from parallel3d.base.reader import find, parse, read, setting_pairs
from parallel3d.config import RunConfig, hardware, settings
from parallel3d.config.normalise import apply_overrides
from parallel3d.schedule import schedules
from tests.config.configs import raw
from tests.config.test_folders import folders  # noqa: F401
from tests.config.test_hardware import PLAIN
from tests.config.test_pretrained import LLAMA, config_of, published
from tests.remedies import refused

pytestmark = pytest.mark.pure

BATCH = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


# The text of a config


@pytest.mark.parametrize(
    ("wrong", "remedy", "right"),
    [
        ('{"a": 1, "a": 2}', "keep one of them", '{"a": 2}'),
        ('{"a": NaN}', "write a finite number", '{"a": 0.5}'),
        ('{"a": 1 # one\n}', "write JSON (comments // and /* */", '{"a": 1 // one\n/* b */}'),
        ('{"a": 1', "and trailing commas are allowed)", '{"a": 1,}'),
        ('{"a": ' + 5000 * "9" + "}", "write a shorter number", '{"a": 9}'),
        ('{"a": ' + 200 * "[" + 200 * "]" + "}", "remove brackets", '{"a": [[]]}'),
        ("[1]", "write {...}", '{"a": 1}'),
    ],
)
def test_text_of_a_config_is_mended(wrong, remedy, right):
    with refused(remedy):
        parse(wrong, "ds.json")
    assert parse(right, "ds.json")


def test_file_is_named_by_a_path_or_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("use a path, or one of those in configs/") as refusal:
        find("mine.json")
    for name in re.findall(r"[\w.-]+\.json", refusal.text.partition("configs/: ")[2]):
        assert find(name).is_file()
    (tmp_path / "mine.json").write_text("{}")
    assert read(find("mine.json")) == {}
    (tmp_path / "mine.json").unlink()
    with refused("name a file that exists and can be read"):
        read(tmp_path / "mine.json")


def test_text_in_another_encoding_is_converted(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"a": 1}', encoding="utf-16")
    with refused("convert it to UTF-8"):
        read(path)
    path.write_text(path.read_text(encoding="utf-16"), encoding="utf-8")
    assert read(path) == {"a": 1}


def test_settings_of_torchtitan_are_written_as_json(tmp_path):
    """`convert config` reads no TOML, and a page has the settings by name."""
    path = tmp_path / "llama3_8b.toml"
    path.write_text("[training]\nlocal_batch_size = 1\n")
    with refused("write its settings to a JSON file"):
        RunConfig.from_json(str(path))
    path.with_suffix(".json").write_text(json.dumps(raw()))
    assert RunConfig.from_json(str(path.with_suffix(".json")))


@pytest.mark.parametrize(
    ("wrong", "remedy", "right"),
    [
        ("--a.b.c 2", "set --a.b as a whole", "--a.b 2"),
        ("--list.7.x 2", "use 0 to 1 in place of 7", "--list.1.x 2"),
        ("--one.name.x 2", "use 0 in place of name", "--one.0.x 2"),
        ("--empty.0 2", "write --empty [...]", "--empty [2]"),
        ("--a.b", "write --a.b value", "--a.b value"),
        ("a.b 2", "write --dotted.path value", "--a.b 2"),
        ("--a {'x':1}", "write JSON", '--a {"x":1}'),
    ],
)
def test_words_of_a_command_line_are_mended(wrong, remedy, right):
    def given():
        return {"a": {"b": 1}, "list": [{}, {}], "one": [{}], "empty": []}

    with refused(remedy):
        apply_overrides(given(), wrong.split())
    assert [*setting_pairs(right.split())]
    apply_overrides(given(), right.split())


# Paths and folders


def test_path_is_written_as_a_whole_or_its_variable_exported(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="write the whole path"):
        expand_path("~nobody-here/runs")
    with pytest.raises(ValueError, match="export it, or write the whole path"):
        expand_path("$WHERE_RUNS_ARE/runs")
    monkeypatch.setenv("WHERE_RUNS_ARE", str(tmp_path))
    assert expand_path("$WHERE_RUNS_ARE/runs") == f"{tmp_path}/runs"
    assert expand_path(f"{tmp_path}/runs") == f"{tmp_path}/runs"


def test_folder_of_families_is_created_or_another_is_named(folders, tmp_path):  # noqa: F811
    own, _ = folders

    def read_with(folder):
        return RunConfig.from_dict(raw(**{"parallel3d.run.model_folders": [str(folder)]}))

    with refused("create it, or name another one"):
        read_with(tmp_path / "none")
    assert read_with(own)
    (tmp_path / "none").mkdir()
    assert read_with(tmp_path / "none")
    (own / "tiny").rename(own / "gpt")
    with refused("rename it"):
        read_with(own)
    (own / "gpt").rename(own / "tiny")
    assert read_with(own) and "tiny" in models.families()


# Hardware


@pytest.mark.parametrize("name", ["A100 SXM4", "V100 SXM2", "80 GB", "abacus"])
def test_hardware_is_one_of_the_names_that_the_message_lists(name):
    with refused("use one of ") as refusal:
        hardware.load(name)
    names = re.findall(r"\b[A-Z0-9]+[A-Z0-9-]*-\d+GB\b", refusal.text)
    assert len(names) >= 2
    for listed in names:
        assert hardware.load(listed).name == listed


def test_hardware_file_is_like_those_that_are_shipped(tmp_path):
    path = tmp_path / "mine.json"
    with refused("name one like those in configs/hardware"):
        hardware.load(str(path))
    shipped = next(hardware.DIRECTORY.glob("A100*.json"))
    path.write_text(shipped.read_text())
    assert hardware.load(str(path))


@pytest.mark.parametrize(
    ("wrong", "remedy", "right"),
    [
        ({"memory_bandwidth": 0}, "write what was measured or published", {}),
        ({"memory_bandwidth": 4e30}, "use the units of docs/planner.md", {}),
        ({"devices_per_node": 1.5}, "round it", {"devices_per_node": 2}),
        ({"matmul_flops": {"bf17": 1e14}}, "bf16", {"matmul_flops": {"bf16": 1e14}}),
    ],
)
def test_figure_is_written_as_the_message_says(tmp_path, wrong, remedy, right):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(PLAIN | wrong))
    with refused(remedy):
        hardware.load(str(path))
    path.write_text(json.dumps(PLAIN | right))
    assert hardware.load(str(path))


# Published models


# A name, the file, what it becomes (None: nothing), and the remedy.
DAMAGES = [
    ("no config", "config.json", None, "name a folder that transformers can load"),
    ("index cut", "model.safetensors.index.json", b"{", "download it again"),
    ("index of others", "model.safetensors.index.json", b"[]", "download it again"),
    ("no shard", "b.safetensors", None, "download it"),
    ("shard cut", "b.safetensors", b"abc", "download it again"),
    ("config cut", "config.json", b"{", "write JSON"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=[name for name, *_ in DAMAGES])
def test_file_of_a_model_is_downloaded_again(tmp_path, damage):
    _, name, content, remedy = damage
    folder = published(tmp_path / "model", LLAMA, ("a.safetensors", "b.safetensors"))
    shards = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    path = folder / name
    whole = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with refused(remedy):
        config_of(folder)
    path.write_bytes(whole)
    assert config_of(folder).model.hidden_size == LLAMA["hidden_size"]


def test_weights_are_downloaded(tmp_path):
    folder = published(tmp_path / "model", LLAMA, ())
    with refused("has no model.safetensors and no index of shards; download them"):
        config_of(folder)
    assert config_of(published(folder, LLAMA))


def test_folder_with_a_config_json_is_named(tmp_path):
    with refused("name a folder with config.json, or a model on the hub"):
        config_of(tmp_path / "nowhere")
    assert config_of(published(tmp_path / "model", LLAMA))


def test_field_of_a_published_model_is_downloaded_again(tmp_path):
    with refused("mend it, or download it again"):
        config_of(published(tmp_path / "model", LLAMA | {"rope_scaling": "x"}))
    assert config_of(published(tmp_path / "model", LLAMA))


# Ranks


def resolved(ranks, batch=None, host_size=None, **changes):
    return RunConfig.from_dict(raw(**changes)).resolve(ranks, batch, host_size)


FIRST = {"parallel3d.mesh": {"pp": 2, "tp": 2}}


def test_number_of_processes_is_one_that_the_mesh_divides():
    with refused("start 4 processes, or choose a pp x tp that divides 6"):
        resolved(6, **FIRST)
    assert resolved(4, **FIRST)
    assert resolved(6, **{"parallel3d.mesh": {"pp": 2, "tp": 1}})


def test_number_of_processes_is_that_of_the_mesh():
    mesh = FIRST["parallel3d.mesh"]
    with refused('start 12 processes, or set dp to 2 or "auto"'):
        resolved(8, **{"parallel3d.mesh": mesh | {"dp": 3}})
    assert resolved(12, **{"parallel3d.mesh": mesh | {"dp": 3}})
    for dp in (2, "auto"):
        assert resolved(8, **{"parallel3d.mesh": mesh | {"dp": dp}}).mesh.dp == 2


def test_fallback_is_added_or_another_number_of_processes_started():
    elastic = FIRST["parallel3d.mesh"] | {"dp": 2, "fallbacks": ["2x1x2", "1x1x2"]}
    with refused("add a mesh for 3 processes, or start one of these numbers: 2, 4, 8") as refusal:
        resolved(3, **{"parallel3d.mesh": elastic})
    added = [*elastic["fallbacks"], "3x1x1"]
    assert resolved(3, **{"parallel3d.mesh": elastic | {"fallbacks": added}})
    for number in re.findall(r"\d+", refusal.text.rpartition("numbers: ")[2]):
        assert resolved(int(number), **{"parallel3d.mesh": elastic})


def test_copies_are_a_number_or_lie_in_hosts():
    mesh = {"pp": 1, "tp": 4, "dp_shards": "node"}
    with refused("use a number, or a cp and tp that divide the ranks of a host"):
        resolved(12, host_size=6, **{"parallel3d.mesh": mesh})
    assert resolved(12, host_size=6, **{"parallel3d.mesh": mesh | {"dp_shards": 3}})
    assert resolved(12, host_size=6, **{"parallel3d.mesh": mesh | {"tp": 2}})


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({BATCH: 20, MICRO: 2, ACCUMULATION: None}, 3),
        ({BATCH: 21, MICRO: 2, ACCUMULATION: None}, 3),
        ({BATCH: 22, MICRO: None, ACCUMULATION: 4}, 3),
        ({BATCH: 22, MICRO: None, ACCUMULATION: 4}, 2),
        ({BATCH: 5, MICRO: 3, ACCUMULATION: None}, 2),
    ],
)
def test_batch_is_a_multiple_or_another_size_follows(sizes, ranks):
    changes = {"parallel3d.mesh": {}} | sizes
    with refused("is not a multiple of ") as refusal:
        resolved(ranks, **changes)
    numbers = re.search(r"; use (\d+)(?: or (\d+))?", refusal.text)
    for number in filter(None, numbers.groups()):
        assert resolved(ranks, **changes | {BATCH: int(number)}).train_batch_size == int(number)
    named = re.findall(r'"(\w+)": "auto"', refusal.text)
    assert (len(named) > 0) == (sizes[MICRO] is not None or sizes[BATCH] % ranks == 0)
    for name in named:
        assert resolved(ranks, **changes | {name: "auto"})


def test_batch_of_a_run_that_resumes_is_kept_or_another_is_asked_for():
    changes = {"parallel3d.mesh": {}}
    with refused("use a dp of 1, 2, 4, 8, 16, or ask for --train_batch_size 12 or 18"):
        resolved(3, 16, **changes)
    for dp in (1, 2, 4, 8, 16):
        assert resolved(dp, 16, **changes).train_batch_size == 16
    for batch in (12, 18):
        file = raw(**changes)
        apply_overrides(file, [f"--{BATCH}", str(batch)])
        assert RunConfig.from_dict(file).resolve(3, 16).train_batch_size == batch


def test_batch_of_a_run_that_resumes_is_enough_for_the_schedule():
    pipeline = {"schedule": "zb_v", "stages_per_rank": 2}
    changes = {"parallel3d.mesh": {"pp": 2}, "parallel3d.pipeline": pipeline}
    with refused("use a smaller dp or pp, or ask for a larger --train_batch_size"):
        resolved(8, 8, **changes)
    assert resolved(4, 8, **changes)
    file = raw(**changes)
    apply_overrides(file, [f"--{BATCH}", "32"])
    assert RunConfig.from_dict(file).resolve(8, 8).train_batch_size == 32


def test_length_is_at_least_a_step():
    short = {"parallel3d.train": {"max_tokens": 500}, "parallel3d.mesh": {}}
    with refused("or more, or a smaller batch") as refusal:
        resolved(1, **short)
    least = int(re.search(r"use (\d+) or more", refusal.text)[1])
    assert resolved(1, **short | {"parallel3d.train": {"max_tokens": least}}).train.steps == 1
    assert resolved(1, **short | {MICRO: 1, ACCUMULATION: 3}).train.steps == 1
    epochs = {"parallel3d.train": {"epochs": 0.5}, "parallel3d.mesh": {}}
    with refused("use more epochs or a smaller batch"):
        resolved(1, **epochs).with_corpus(4096, 10 * 128)
    assert resolved(1, **epochs | {"parallel3d.train": {"epochs": 1}}).with_corpus(4096, 1280)
    assert resolved(1, **epochs | {ACCUMULATION: 2}).with_corpus(4096, 10 * 128)


# Schedules


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize("sizes", [(2, 1, 1), (3, 2, 2), (4, 4, 3)])
def test_schedule_has_the_stages_and_microbatches_that_it_names(name, sizes):
    ranks, microbatches, stages = sizes
    reason = schedules.why_not(name, ranks, microbatches, stages)
    if not reason:
        return
    mends = 0
    if named := re.search(r"use stages_per_rank = (\d+)", reason):
        stages = int(named[1])
        mends += 1
    if named := re.search(r"use (\d+) microbatches", reason):
        microbatches = int(named[1])
        mends += 1
    if named := re.search(r"a multiple of (\d+)|multiple of pp=(\d+)", reason):
        microbatches = int(named[1] or named[2])
        mends += 1
    after = schedules.why_not(name, ranks, microbatches, stages)
    assert mends and after != reason, reason
    if named := re.search(r"or the schedule '(\w+)'", reason):
        other = schedules.why_not(named[1], ranks, sizes[1], sizes[2]) or ""
        assert reason.partition("; ")[0] not in other


# Names in messages

ROOT = Path(__file__).parents[2]
OURS = re.compile(
    r"parallel3d\.(?:checkpoint|data|mesh|model|pipeline|plan|run|train)\.[a-z_0-9.]*[a-z0-9]"
)
GONE = {"parallel3d.data.remote_cache_bytes"}  # a note says that it was removed


def test_settings_that_messages_name_exist():
    """Other names that begin like settings are modules, and what is in them."""
    named = set(GONE)
    for setting in settings():
        parts = re.sub(r"\[\]|\.NAME", "", setting.path).split(".")
        named |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    unknown = []
    for folder in ("parallel3d", "models", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in set(OURS.findall(path.read_text())) - named:
                module = ROOT / name.replace(".", "/")
                within = module.parent.with_suffix(".py")
                is_code = module.is_dir() or module.with_suffix(".py").exists() or within.exists()
                if not is_code:
                    unknown.append(f"{path.relative_to(ROOT)}: {name}")
    assert not unknown
