"""Configs of other frameworks: what is taken trains the same model at the same rate, and nothing is
left out of the report. docs/coming-from.md is the example.
"""

import json
import re
from math import cos, pi, sqrt
from pathlib import Path
from textwrap import dedent

import pytest

from launch import convert as command
from parallel3d import models
from parallel3d.base import reader
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.document import settings
from parallel3d.config.learning_rate import rate
from parallel3d.extras.foreign import megatron, nanotron, neox, trainer
from parallel3d.extras.foreign.convert import check, convert

pytestmark = pytest.mark.pure

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
BLOCKS = [dedent(block) for block in re.findall(r"(?m)(?:^(?:    .*)?\n)+", PAGE) if block.strip()]
FILES = ("small.yaml", "small.yml", "train.sh", "arguments.json")


def theirs(name):
    """A file of the page, and the config that the page shows for it."""
    at = next(i for i, block in enumerate(BLOCKS) if f"`{name}`:\n\n" + indented(block) in PAGE)
    return BLOCKS[at].strip() + "\n", reader.parse(BLOCKS[at + 1])


def indented(block):
    return "".join(
        f"    {line}" if line.strip() else line for line in block.strip().splitlines(True)
    )


@pytest.fixture
def converted(tmp_path):
    """Converts a text; returns the config, and the rows by setting."""

    def converted(name, text):
        (tmp_path / name).write_text(text)
        config, rows = convert([str(tmp_path / name)])
        assert len({row.setting for row in rows}) == len(rows), "a setting has one row"
        return config, {row.setting: row for row in rows}

    return converted


@pytest.mark.parametrize("name", FILES)
def test_page_shows_the_written_config(name, converted):
    text, ours = theirs(name)
    config, rows = converted(name, text)
    assert config == ours
    assert all(row.why for row in rows.values() if row.verdict not in ("taken", "assumed"))


def test_every_config_of_the_page_loads():
    configs = [block for block in BLOCKS if '"parallel3d": {' in block]
    assert len(configs) == 7, "a worked example for each framework"
    for block in configs:
        check(reader.parse(block), "docs/coming-from.md")


@pytest.mark.parametrize("framework", [nanotron, neox, megatron, trainer])
def test_tables_name_existing_settings(framework):
    known = {doc.path for doc in settings()} | {"bf16.enabled, fp16.enabled", ""}
    known |= {path.rpartition(".")[0] for path in known} | {"parallel3d.data.mixture"}
    for setting, rule in framework.TABLE.items():
        assert rule.path.partition("@")[0] in known, setting
        assert rule.why, setting
    assert framework.DEFAULTS.keys() <= framework.TABLE.keys() | known


LLAMA = {
    "num-layers": 32,
    "hidden-size": 4096,
    "num-attention-heads": 32,
    "norm": "rmsnorm",
    "pos-emb": "rotary",
    "no-weight-tying": True,
    "use_bias_in_norms": False,
    "use_bias_in_attn_linear": False,
}


def of_neox(**changes):
    base = {"train_micro_batch_size_per_gpu": 1, "train-iters": 10, "seq-length": 64}
    return json.dumps(base | changes)


@pytest.mark.parametrize(
    ("name", "text", "vocabulary", "published"),
    [
        (
            "pythia-70m.yml",
            of_neox(
                **{
                    "num-layers": 6,
                    "hidden-size": 512,
                    "pos-emb": "rotary",
                    "num-attention-heads": 8,
                    "no-weight-tying": True,
                    "gpt-j-residual": True,
                    "rotary-pct": 0.25,
                }
            ),
            50304,
            70_426_624,
        ),
        (
            "llama-7b.yml",
            of_neox(**LLAMA, mlp_type="llama", activation="silu"),
            32000,
            6_738_415_616,
        ),
        (
            "llama-3-8b.yml",
            of_neox(**LLAMA, activation="swiglu", num_kv_heads=8, intermediate_size=43008),
            128256,
            8_030_261_248,
        ),
        (
            "gpt2.sh",
            "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
            "--max-position-embeddings 1024 --micro-batch-size 1 --train-iters 10 --lr 1e-4",
            50257,
            124_439_808,
        ),
    ],
)
def test_models_have_the_published_number_of_parameters(
    name, text, vocabulary, published, converted
):
    config = RunConfig.from_dict(converted(name, text)[0]).with_vocab_size(vocabulary)
    assert models.num_params(config.model) == published


def of_nanotron(start, decay, style, steps=1000):
    text, _ = theirs("small.yaml")
    text = re.sub(r"lr_decay_starting_step: .*", f"lr_decay_starting_step: {start}", text)
    text = re.sub(r"lr_decay_steps: .*", f"lr_decay_steps: {decay}", text)
    text = text.replace("lr_warmup_steps: 2000", "lr_warmup_steps: 100")
    text = text.replace("min_decay_lr: 0", "min_decay_lr: 3.0e-4")
    return text.replace("1-sqrt", style).replace("train_steps: 100000", f"train_steps: {steps}")


@pytest.mark.parametrize(
    ("start", "decay", "style", "shape"),
    [
        ("null", 900, "cosine", lambda progress: (1 + cos(pi * progress)) / 2),
        ("null", "null", "linear", lambda progress: 1 - progress),
        (800, 200, "1-sqrt", lambda progress: 1 - sqrt(progress)),
        ("null", 900, "1-sqrt", lambda progress: 1 - sqrt(progress)),
        (1000, 200, "1-sqrt", lambda progress: 1),
    ],
)
def test_learning_rate_equals_that_of_nanotron(start, decay, style, shape, converted):
    """nanotron.helpers.lr_scheduler_builder, whose steps are counted from 0 before the first."""
    config, rows = converted("run.yaml", of_nanotron(start, decay, style))
    assert not [row for row in rows.values() if row.verdict == "DIFFERS"]
    config = RunConfig.from_dict(config).resolve(16).completed()
    first = 100 if start == "null" else start
    for step in (1, 50, 100, 500, 799, 801, 900, 999, 1000):
        progress = max(0, step - first) / max(1, 1000 - first)
        expected = 3e-4 + (3e-3 - 3e-4) * shape(progress) if step > 100 else 3e-3 * step / 100
        assert rate(config, step - 1) == pytest.approx(expected, rel=1e-6), step


def test_unsupported_decay_is_reported(converted):
    _, rows = converted("run.yaml", of_nanotron(800, 100, "linear"))
    assert (rows["last step of the decay"].value, rows["shape of the decay"].value) == (
        900,
        "linear",
    )


def test_samples_become_steps(converted):
    config, _ = converted("train.sh", theirs("train.sh")[0])
    train = config["parallel3d"]["train"]
    assert (train["steps"], train["lr_schedule"]["warmup_steps"]) == (1280000 / 128, 12800 / 128)


def test_samples_need_a_batch(converted):
    text = theirs("train.sh")[0].replace("--global-batch-size 128", "")
    text = text.replace("--train-samples 1280000", "--train-iters 10")
    _, rows = converted("train.sh", text)
    assert rows["warmup_steps in samples"].verdict == "UNKNOWN"


@pytest.mark.parametrize(
    ("name", "old", "new", "setting"),
    [
        ("small.yaml", "hidden_act: silu", "hidden_act: gelu", "model.model_config.hidden_act"),
        (
            "small.yaml",
            "    hidden_act",
            "    moe_config: {num_experts: 8}\n    hidden_act",
            "model.model_config.moe_config",
        ),
        ("small.yml", '"rotary",', '"alibi",', "pos_emb"),
        ("small.yml", '"rotary",', '"rotary", "num_experts": 4,', "num_experts"),
        ("small.yml", '"rotary",', '"rotary", "norm": "rmsnorm",', "the architecture"),
        ("train.sh", "--swiglu", "--swiglu --num-experts 8", "num-experts"),
        ("train.sh", "--normalization RMSNorm", "", "the architecture"),
    ],
)
def test_unsupported_model_is_refused_and_no_file_written(
    name, old, new, setting, tmp_path, called, converted
):
    text = theirs(name)[0]
    assert old in text
    text = text.replace(old, new)
    assert converted(name, text)[1][setting].verdict == "REFUSED"
    code, printed, _ = called(
        command.main, "convert", "config", tmp_path / name, "--out", tmp_path / "ds.json", "--json"
    )
    assert code == 1 and not json.loads(printed)["ok"] and not (tmp_path / "ds.json").exists()


@pytest.mark.parametrize(
    ("name", "old", "new", "interval"),
    [
        ("small.yaml", "hidden_act: silu", "hidden_act: silu\n    no_rope_layer: 4", 4),
        pytest.param(
            "train.sh", "--swiglu", "--swiglu --no-rope-freq 4", 4, marks=pytest.mark.slow
        ),
        ("train.sh", "--swiglu", "--swiglu --no-rope-freq [0,0,1]*2", None),
    ],
)
def test_layers_without_positions(name, old, new, interval, converted):
    text = theirs(name)[0]
    assert old in text
    config, rows = converted(name, text.replace(old, new, 1))
    model = config["parallel3d"]["model"]
    if interval:
        assert model["config"]["no_rope_layer_interval"] == interval
        assert model["family"] == "transformers" and model["config"]["model_type"] == "smollm3"
        assert RunConfig.from_dict(config).model.num_hidden_layers > 1
    else:
        assert model["family"] == "llama"
    row = next(row for setting, row in rows.items() if "no" in setting and "rope" in setting)
    assert row.verdict == ("taken" if interval else "REFUSED")


@pytest.mark.parametrize(
    ("name", "old", "new", "setting"),
    [
        ("small.yaml", "tokens: {", "tokens: {new_thing: 1, ", "tokens.new_thing"),
        ("small.yml", '"rotary",', '"rotary", "new-thing": 1,', "new_thing"),
        ("small.yml", '"stage": 1', '"stage": 1, "stag": 1', "zero_optimization.stag"),
        ("train.sh", "--swiglu", "--swiglu --new-thing 1", "new-thing"),
        ("train.sh", "--lr 3e-4", "--lr $LR", "lr"),
        ("train.sh", "TP=2", 'if [ "$1" = big ]; then\n  ARGS="--seed 7"\nfi\nTP=2', "seed"),
    ],
)
def test_unknown_setting_is_listed(name, old, new, setting, converted):
    text = theirs(name)[0]
    assert old in text
    config, rows = converted(name, text.replace(old, new))
    assert rows[setting].verdict == "UNKNOWN"
    assert "new" not in json.dumps(config) and 'stag"' not in json.dumps(config)


def test_script_is_parsed_like_the_shell():
    script = """
    LAYERS="${LAYERS:-12}" # a default
    export HIDDEN=768
    OPTIONS=" \\
        --num_layers $LAYERS --hidden-size=${HIDDEN} \\
        --fp16 --split '99,1,0' "
    # --lr 1
    torchrun pretrain_gpt.py ${OPTIONS[@]} --lr-warmup-fraction .01 --data-path 0.5 a 0.5 b | tee
    """
    assert megatron.arguments(script) == {
        "num-layers": 12,
        "hidden-size": 768,
        "fp16": True,
        "split": "99,1,0",
        "lr-warmup-fraction": 0.01,
        "data-path": [0.5, "a", 0.5, "b"],
    }


def test_files_of_gpt_neox_are_merged(tmp_path):
    text = json.loads(of_neox(**LLAMA, activation="silu", mlp_type="llama"))
    for number, names in enumerate((list(text)[:5], list(text)[5:])):
        (tmp_path / f"{number}.yml").write_text(json.dumps({name: text[name] for name in names}))
    config, _ = convert([str(tmp_path / "0.yml"), str(tmp_path / "1.yml")])
    assert RunConfig.from_dict(config).model.inner_size == 11008


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yml", "{a: 1\nb: 2}", "line 2"),
        ("a.yml", "- 1", "write a block of settings in YAML"),
        ("a.yml", "name: ci", "has no setting of nanotron, GPT-NeoX, Megatron-LM or Hugging"),
        ("a.sh", "echo hello", "has no setting of nanotron, GPT-NeoX, Megatron-LM or Hugging"),
        ("a.py", "def f(:", "a.py: is not Python"),
        ("a.json", '{"zero_optimization": {"stage": 3}}', "is a DeepSpeed config, which"),
        (
            "a.json",
            '{"train_batch_size": 8, "parallel3d": {}}',
            "is a config of parallel3d; run it",
        ),
        ("a.json", '{"max_steps": 9, "deepspeed": "z3.json"}', "z3.json: no such file; name it"),
        (
            "a.json",
            '{"max_steps": 9, "gradient_accumulation_steps": 2, '
            '"deepspeed": {"gradient_accumulation_steps": 4}}',
            "gradient_accumulation_steps = 2: the DeepSpeed file has 4",
        ),
        ("a.sh", "--num-layers 2 --lr 1", "parallel3d.model.hidden_size: is required"),
        ("a.yml", "", "a.yml: has no settings; write a block of settings in YAML"),
        ("a.yml", "a: 1\n\x1c", "a.yml: unacceptable character"),
        ("a.yml", "data_stages: []\nparallelism: 3", "nanotron"),
    ],
)
def test_unusable_file_exits_with_2(name, text, message, tmp_path, called):
    (tmp_path / name).write_text(text)
    code, printed, errors = called(command.main, "convert", "config", tmp_path / name, "--json")
    assert (code, printed) == (2, "") and message in errors and "Traceback" not in errors


TRAINERS = {
    "model_name_or_path": "owner/model",
    "dataset_name": "owner/stories",
    "dataset_config_name": "en",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "learning_rate": 0.0003,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "max_steps": 200,
    "warmup_ratio": 0.05,
    "lr_scheduler_type": "linear",
    "bf16": True,
    "block_size": 512,
    "output_dir": "out",
}


def as_call(arguments):
    named = {name: arguments[name] for name in arguments.keys() - {"model_name_or_path"}}
    keywords = ", ".join(f"{name}={value!r}" for name, value in named.items())
    return (
        "BATCH = 4\nargs = transformers.TrainingArguments("
        f"{keywords.replace('batch_size=4', 'batch_size=BATCH')})\n"
        'model = AutoModelForCausalLM.from_pretrained("owner/model", dtype="auto")\n'
    )


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.json", json.dumps),
        ("a.yaml", lambda x: "".join(f"{name}: {json.dumps(x[name])}\n" for name in x)),
        ("a.py", as_call),
        (
            "a.sh",
            lambda x: (
                "torchrun --nproc_per_node 8 run_clm.py "
                + " ".join(f"--{name} {json.dumps(x[name])}" for name in x)
            ),
        ),
    ],
)
def test_trainers_arguments_are_read_as_people_write_them(name, write, converted):
    config, rows = converted(name, write(TRAINERS))
    assert {rows[name].verdict for name in TRAINERS} == {"taken"}
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["bf16"] == {"enabled": True}
    assert config["optimizer"]["params"] == {
        "lr": 0.0003,
        "weight_decay": 0.1,
        "betas": [0.9, 0.95],
    }
    block = config["parallel3d"]
    assert block["model"] == {"from_pretrained": "owner/model"}
    assert block["data"] == {
        "source": "hub",
        "name": "owner/stories",
        "subset": "en",
        "sequence_length": 512,
        "tokenizer": "owner/model",
    }
    block["model"] = {"family": "gpt", "hidden_size": 8, "num_attention_heads": 1}
    block["model"] |= {"num_hidden_layers": 1, "max_position_embeddings": 512, "vocab_size": 99}
    complete = RunConfig.from_dict(config).resolve(1).completed()
    # transformers' get_linear_schedule_with_warmup, whose first step has the rate 0
    for step, scale in ((5, 0.5), (10, 1), (105, 0.5), (199, 1 / 190)):
        assert rate(complete, step - 1) / 0.0003 == pytest.approx(scale)


def test_deepspeed_file_of_a_trainer_is_completed(tmp_path):
    (tmp_path / "z3.json").write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, '
        '"gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}'
    )
    arguments = TRAINERS | {"deepspeed": "z3.json", "max_grad_norm": 1.0}
    (tmp_path / "a.json").write_text(json.dumps(arguments))
    config, rows = convert([str(tmp_path / "a.json")])
    verdicts = {row.setting: row.verdict for row in rows}
    assert verdicts["max_grad_norm"] == "REFUSED", "transformers refuses it, too"
    assert config["gradient_clipping"] == 0.5
    assert config["optimizer"]["params"]["lr"] == 0.0003
    assert config["zero_optimization"] == {"stage": 3} and config["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    "order", [("a.json", "z3.json"), ("z3.json", "a.json"), ("a.py", "z3.json")]
)
@pytest.mark.parametrize("enabled", ["auto", True, False])
def test_deepspeed_file_is_named_beside_the_arguments(tmp_path, order, enabled):
    """Also where both have a "bf16": a switch of the Trainer, and a block of DeepSpeed."""
    deepspeeds = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": enabled}}
    (tmp_path / "z3.json").write_text(json.dumps(deepspeeds))
    arguments = TRAINERS | {"deepspeed": "z3.json"}
    (tmp_path / "a.json").write_text(json.dumps(arguments))
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    (tmp_path / "a.py").write_text(f"TrainingArguments({call})")
    config, rows = convert([str(tmp_path / name) for name in order])
    refused = [row.setting for row in rows if row.verdict == "REFUSED"]
    assert refused == (["bf16"] if enabled is False else [])
    assert config["zero_optimization"] == {"stage": 3}
    assert config["bf16"] == {"enabled": enabled is not False}


def test_arguments_without_a_model_are_told_which_one_is_missing(tmp_path):
    (tmp_path / "a.json").write_text('{"max_steps": 3, "per_device_train_batch_size": 4}')
    _, rows = convert([str(tmp_path / "a.json")])
    (refused,) = [row for row in rows if row.verdict == "REFUSED"]
    assert refused.setting == "the model" and "add model_name_or_path" in refused.why


def test_yaml_as_config_is_sent_to_the_converter(tmp_path):
    (tmp_path / "a.yaml").write_text("max_steps: 3\n")
    with pytest.raises(ConfigError, match=r"convert config .*a\.yaml --out ds\.json"):
        RunConfig.from_json(str(tmp_path / "a.yaml"))


def test_existing_config_is_not_overwritten(tmp_path, called):
    (tmp_path / "small.yaml").write_text(theirs("small.yaml")[0])
    words = "convert", "config", tmp_path / "small.yaml", "--out", tmp_path / "ds.json"
    code, printed, _ = called(command.main, *words)
    assert code == 0 and "taken         parallelism.pp = 2 -> parallel3d.mesh.pp" in printed
    assert RunConfig.from_json(str(tmp_path / "ds.json")).mesh.pp == 2
    code, _, errors = called(command.main, *words)
    assert code == 2 and "ds.json: exists; remove it, or name another file" in errors


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.sh", None, "No such file or directory; name a file that exists"),
        ("binary.yml", b"\x80\xff\x00" * 9, "byte 0x80 at offset 0 is not UTF-8"),
        ("list.yml", b"- 1", "has no settings; write a block of settings in YAML"),
    ],
)
def test_unreadable_file_is_named(name, content, message, tmp_path, called):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, printed, errors = called(command.main, "convert", "config", tmp_path / name)
    assert (code, printed) == (2, "") and "Traceback" not in errors
    assert str(tmp_path / name) in errors and message in errors


@pytest.mark.parametrize(
    ("flags", "shards", "rows"),
    [
        ("--data-parallel-shard-degree 8 --data-parallel-replicate-degree 4", 8, "taken"),
        ("--dp_shard_size 4", 4, "taken"),
        ("--data-parallel-shard-degree -1", None, "dropped"),
        ("--num-replicas 2 --dp-replicate-size 2", None, "taken"),
        ("--num-distributed-optimizer-instances 1", None, "dropped"),
        ("--mics-shard-size 16 --zero-hpz-partition-size 8", 16, "taken"),
    ],
)
def test_hybrid_sharding_under_its_other_names(flags, shards, rows, converted):
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-4 "
    config, by_setting = converted("train.sh", f"{model} --train-iters 9 {flags}")
    assert config["parallel3d"].get("mesh", {}).get("dp_shards") == shards
    assert by_setting[flags.split()[0].removeprefix("--").replace("_", "-")].verdict == rows
    if "replicas" in flags:  # dp is not known here
        assert by_setting["copies of shards"].verdict == "UNKNOWN"
        assert "parallel3d.mesh.dp_shards" in by_setting["copies of shards"].why
    if "hpz" in flags:
        assert "set parallel3d.mesh.dp_shards" in by_setting["zero-hpz-partition-size"].why
