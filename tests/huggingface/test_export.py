"""Checkpoints exported and read back: every architecture holds, every planted damage is found."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from parallel3d import models
from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.data.sources import no_progress
from parallel3d.huggingface import conversion
from parallel3d.huggingface.conversion import export, read_back
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import DTYPES, INDEX, WeightFiles
from parallel3d.models.llama.spec import RopeScaling
from tests.huggingface.checkpoints import SHARD_BYTES, checkpoint_of, small, tokenizer_in, written
from tests.models.families import weights_of

pytestmark = pytest.mark.gloo

SCALING = RopeScaling(
    factor=4.0, low_freq_factor=0.1, high_freq_factor=1.0, original_max_position_embeddings=16
)
BIASES = {"attention_bias": True, "mlp_bias": True}
# With room for a sample that scaled rotations show in.
GROUPED = {"num_key_value_heads": 2, "max_position_embeddings": 64}
# Numbers that are no class's default: one that config.json lacks shows in the logits.
EPS = 1e-3
MODELS = {
    "GPT2LMHeadModel": small("gpt"),
    "GPT2LMHeadModel, untied": small("gpt", tie_word_embeddings=False, layer_norm_epsilon=EPS),
    "LlamaForCausalLM, grouped, tied": small("llama", tie_word_embeddings=True, **GROUPED),
    "LlamaForCausalLM, biases": small(
        "llama", attention_output_bias=True, rope_theta=50.0, rms_norm_eps=EPS, **BIASES, **GROUPED
    ),
    "LlamaForCausalLM, scaled": small("llama", rope_scaling=SCALING),
    "MistralForCausalLM": small("llama", head_dim=16, **GROUPED),
    "Qwen2ForCausalLM, biases": small("llama", attention_bias=True, **GROUPED),
    "Qwen3ForCausalLM, wide heads": small("llama", qk_norm=True, head_dim=16, **GROUPED),
}


def exported(config, root, dtype="fp32", architecture=None):
    source = CheckpointSource(checkpoint_of(config, root))
    about = source.about(architecture=architecture)
    layout = WeightFiles(config, DTYPES[dtype], SHARD_BYTES)
    return export(source, about, layout, root / "out", no_progress)


# The others' names and settings are those of these, or of the damaged folder below.
DEFAULT = (
    "GPT2LMHeadModel, untied",
    "LlamaForCausalLM, biases",
    "LlamaForCausalLM, scaled",
    "Qwen3ForCausalLM, wide heads",
)


@pytest.mark.parametrize(
    "name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_every_architecture_is_proved(name, tmp_path):
    config = MODELS[name]
    architecture_name = name.partition(",")[0]
    proof = exported(config, tmp_path, architecture=architecture_name)
    assert proof.ok and proof.architecture == architecture_name, proof
    assert [what.partition(" ")[0] for what in proof.checked] == [
        "names,",
        "config.json",
        architecture_name,
        "logits",
    ]
    assert proof.left_out == ("tokenizer: there is none",)
    # And by what the test knows of the weights.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = models.huggingface(config.family).to_huggingface(config, weights_of(config))
    exported_weights = revert_weight_conversion(model, dict(model.named_parameters()))
    assert exported_weights.keys() == expected.keys() and proof.tensors == len(expected)
    assert all(torch.equal(exported_weights[n], value) for n, value in expected.items())
    assert "held-out loss | 2.7500 nats" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_half_precision_is_proved_against_rounded_weights(dtype, tmp_path):
    proof = exported(MODELS["GPT2LMHeadModel"], tmp_path, dtype)
    assert proof.ok and len(proof.checked) == 4, proof
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(
        DTYPES[dtype]
    ).removeprefix("torch.")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder that was written, and what it is compared with."""
    root = tmp_path_factory.mktemp("sound")
    config = MODELS["LlamaForCausalLM, grouped, tied"]
    export_parts = written(checkpoint_of(config, root), root / "out", shard_bytes=SHARD_BYTES)
    assert read_back(*export_parts, no_progress).ok
    return export_parts


def shard_with(folder, name):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit(folder, name, change):
    """Save a shard again, as its library does, with `change` done to its tensors."""
    path = shard_with(folder, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.norm.weight"


def missing(folder):
    edit(folder, NORM, lambda tensors: tensors.pop(NORM))
    return "model.norm.weight is missing"


def extra(folder):
    edit(folder, NORM, lambda tensors: tensors.update(more=torch.zeros(1)))
    return ": more is unexpected"


def transposed(folder):
    edit(folder, O_PROJ, lambda t: t.update({O_PROJ: t[O_PROJ].t().contiguous()}))
    return "self_attn.o_proj.weight is torch.float32 [32, 32] "


def another_type(folder):
    edit(folder, NORM, lambda tensors: tensors.update({NORM: tensors[NORM].half()}))
    return "model.norm.weight is torch.float16 [32] "


def truncated(folder):
    path = shard_with(folder, O_PROJ)
    path.write_bytes(path.read_bytes()[:-4])
    return f"{path.name}: "


def missing_shard(folder):
    shard_with(folder, O_PROJ).unlink()
    return f"{shard_with(folder, O_PROJ).name}: No such file"


def wrong_rope_base(folder):
    path = folder / "config.json"
    text = path.read_text()
    assert '"rope_theta": 10000.0' in text
    path.write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 500000.0'))
    return "config.json: rope_parameters is "


def another_end_of_text(folder):
    path = folder / "generation_config.json"
    path.write_text(path.read_text().replace('"eos_token_id": 1', '"eos_token_id": 2'))
    return "generation_config.json: eos_token_id is 2, not 1"


DAMAGES = [missing, transposed, truncated, wrong_rope_base, another_end_of_text]
OTHERS = [extra, another_type, missing_shard]


@pytest.mark.parametrize(
    "damage",
    [*DAMAGES, *(pytest.param(damage, marks=pytest.mark.slow) for damage in OTHERS)],
    ids=lambda damage: damage.__name__,
)
def test_damage_is_detected_and_named(damage, sound, tmp_path):
    folder, *rest = sound
    shutil.copytree(folder, tmp_path / "out")
    difference = damage(tmp_path / "out")
    proof = read_back(tmp_path / "out", *rest, no_progress)
    assert not proof.ok
    assert any(difference in what for what in proof.differs), proof.differs


def test_logits_detect_a_wrong_mapping_of_names(tmp_path, monkeypatch):
    """What writes and reads back by one mistaken rule agrees with itself."""
    family = models.huggingface("llama")
    right = family.to_huggingface

    def swapped(config, weights):
        converted = right(config, weights)
        return {
            n.replace("gate_", "x_").replace("up_", "gate_").replace("x_", "up_"): value
            for n, value in converted.items()
        }

    monkeypatch.setattr(family, "to_huggingface", swapped)
    proof = exported(MODELS["Qwen2ForCausalLM, biases"], tmp_path)
    (difference,) = proof.differs
    assert difference.startswith("logits: differ by up to ")
    # Nothing has its name, nor any other.
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_tokenizer_is_that_of_the_run(tmp_path):
    run = checkpoint_of(MODELS["GPT2LMHeadModel"], tmp_path, tokenizer_in(tmp_path / "own"))
    source = CheckpointSource(run)
    proof = export(
        source, source.about(), WeightFiles(source.config.model), tmp_path / "out", no_progress
    )
    assert proof.ok and "tokenizer" in proof.checked and proof.left_out == ()
    copy, original = (
        path / "tokenizer.json" for path in (tmp_path / "out", source.folder / "tokenizer")
    )
    assert copy.read_bytes() == original.read_bytes()
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 0

    original.write_text(original.read_text().replace('"main"', '"niam"').replace("words", "swords"))
    with pytest.raises(CheckpointError, match=r"not in .*step-10/tokenizer; name its folder"):
        source.about()
    with pytest.raises(CheckpointError, match=r"not in .*none; name its folder"):
        source.about(tmp_path / "none")
    assert source.about(tmp_path / "out").tokenizer == tmp_path / "out"


def test_model_without_a_class_is_refused(tmp_path):
    config = small("llama", attention_bias=True, qk_norm=True)
    with pytest.raises(ConfigError, match="no class of transformers has exactly these switches"):
        exported(config, tmp_path)
    with pytest.raises(ConfigError, match="cannot be a LlamaForCausalLM; use GPT2LMHeadModel"):
        exported(small("gpt"), tmp_path / "gpt", architecture="LlamaForCausalLM")


def test_damaged_checkpoint_is_not_exported(tmp_path):
    run = checkpoint_of(MODELS["GPT2LMHeadModel"], tmp_path)
    path = run / "checkpoints/step-10/shard-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    source = CheckpointSource(run)
    with pytest.raises(CheckpointError, match=r"00001-of-00002.* do not match the manifest"):
        export(
            source, source.about(), WeightFiles(source.config.model), tmp_path / "out", no_progress
        )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(CheckpointError, match="do not match the manifest"):
        source.check()  # and again


def test_changed_values_in_an_export_are_detected(tmp_path, monkeypatch):
    """The read-back believes neither the writer, nor that what it wrote stayed as it was."""
    right = conversion.write_tensor

    def wrong(folder, layout, name, value):
        if name == "transformer.h.1.ln_1.weight":
            value = value.clone()
            value[3] += 2**-10
        right(folder, layout, name, value)

    monkeypatch.setattr(conversion, "write_tensor", wrong)
    proof = exported(MODELS["GPT2LMHeadModel"], tmp_path)
    difference = "transformer.h.1.ln_1.weight is torch.float32 [32] "
    assert any(difference in what for what in proof.differs), proof.differs
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
