"""Published models imported and proved: every architecture holds, what differs is found."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.data.tokenizer import save_tokenizer, train_tokenizer
from parallel3d.huggingface import conversion
from parallel3d.huggingface.conversion import import_folder
from parallel3d.models.llama import pretrained as llama
from tests.huggingface.published import MODELS, save

pytestmark = pytest.mark.gloo

CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama2": "LlamaForCausalLM",
    "llama3": "LlamaForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "smollm2": "LlamaForCausalLM",
    "pythia": "GPTNeoXForCausalLM",
    "neox": "GPTNeoXForCausalLM",
}


# Those whose tensors or positions no test of training or export has.
DEFAULT = (
    "gpt2 untied",
    "llama3",
    "ministral, layers alternate",
    "qwen2, windows",
    "mixtral",
    "olmoe",
    "glm4_moe, part of a head",
)


@pytest.mark.parametrize(
    "name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_every_architecture_is_proved(name, tmp_path):
    """The logits, too: the config that was derived, and how positions rotate."""
    folder = save(name, tmp_path / "model")
    out = tmp_path / "out"
    proof = import_folder(folder, out, shard_bytes=20_000)
    assert proof.ok and proof.architecture == CLASSES[name.partition(",")[0].split()[0]], proof
    assert len(proof.checked) == 3 and proof.left_out == ("tokenizer: there is none",)
    theirs = load_file(folder / "model.safetensors")
    ours = {}
    for path in out.glob("*.safetensors"):
        ours |= load_file(path)
    assert ours.keys() == theirs.keys() and proof.tensors == len(theirs)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert not (tmp_path / "out.partial").exists()


def test_multi_token_prediction_layer_is_skipped(tmp_path):
    """GLM-4.5's files have one behind the last layer, which transformers does not read."""
    folder = save("glm4_moe, norms", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    further = {"model.layers.3.self_attn.k_norm.weight": torch.ones(16)}
    save_file(tensors | further, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has the tensor model\.layers\.3\.self_attn"):
        import_folder(folder, tmp_path / "out")
    further["model.layers.3.eh_proj.weight"] = torch.ones(32, 64)
    save_file(tensors | further, folder / "model.safetensors", {"format": "pt"})
    assert import_folder(folder, tmp_path / "out").ok
    assert load_file(tmp_path / "out/model.safetensors").keys() == tensors.keys()


def test_types_are_kept_and_superfluous_tensors_dropped(tmp_path):
    folder = save("gpt2", tmp_path / "model", torch.float16)
    tensors = load_file(folder / "model.safetensors")
    extra = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    extra["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(train_tokenizer(["words and words"], 300), folder)
    proof = import_folder(folder, tmp_path / "out")
    assert proof.ok and proof.left_out == ()
    imported = load_file(tmp_path / "out/model.safetensors")
    assert imported.keys() == tensors.keys()
    assert all(torch.equal(imported[n], value) for n, value in tensors.items())
    assert (tmp_path / "out/tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["pythia", "neox one after the other"])
def test_output_projection_is_accepted_by_either_name(name, tmp_path):
    """transformers reads GPT-NeoX's as embed_out and as lm_head; tied, as a copy or not at all."""
    folder = save(name, tmp_path / "model")
    other = tmp_path / "other"
    tensors = load_file(folder / "model.safetensors")
    tied = "embed_out.weight" not in tensors
    head = tensors["gpt_neox.embed_in.weight"] + 0 if tied else tensors.pop("embed_out.weight")
    shutil.copytree(folder, other)
    save_file(tensors | {"lm_head.weight": head}, other / "model.safetensors", {"format": "pt"})
    proof = import_folder(other, tmp_path / "out")
    assert proof.ok and len(proof.checked) == 3, proof
    imported = load_file(tmp_path / "out/model.safetensors")
    expected = load_file(folder / "model.safetensors")
    assert imported.keys() == expected.keys() and proof.tensors == len(expected)
    assert all(torch.equal(imported[n], value) for n, value in expected.items())
    if tied:
        wrong = tensors | {"lm_head.weight": head * 2}
        save_file(wrong, other / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=r"lm_head\.weight differs from gpt_neox\.embed_in"):
            import_folder(other, tmp_path / "wrong")
    both = tensors | {"lm_head.weight": head, "embed_out.weight": head + 0}
    save_file(both, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"\w+\.weight is also in model\.safetensors, as \w+\.weight; remove"
    ):
        import_folder(other, tmp_path / "both")


def test_logits_detect_a_misread_config_json(tmp_path, monkeypatch):
    right = llama._rope
    monkeypatch.setattr(llama, "_rope", lambda fields: (7e5, *right(fields)[1:]))
    proof = import_folder(save("llama3", tmp_path / "model"), tmp_path / "out")
    assert [text[:18] for text in proof.differs] == ["logits: differ by "]


def test_changed_values_are_detected(tmp_path, monkeypatch):
    right = conversion.PublishedWeights.read_whole

    def wrong(self, name):
        value = right(self, name)
        if name == "blocks.1.norm1.weight":
            value[3] += 2**-10
        return value

    monkeypatch.setattr(conversion.PublishedWeights, "read_whole", wrong)
    proof = import_folder(save("llama2", tmp_path / "model"), tmp_path / "out")
    difference = "model.layers.1.input_layernorm.weight is torch."
    assert any(difference in what for what in proof.differs), proof.differs


def test_import_refuses_what_a_run_would(tmp_path):
    folder = save("llama2", tmp_path / "model")
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"generation_config\.json: must be one object"):
        import_folder(folder, tmp_path / "new")


def test_names_of_a_wrapper_are_said_to_be_its(tmp_path):
    folder = save("llama2", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    wrapped = {f"_orig_mod.{name}": value for name, value in tensors.items()}
    save_file(wrapped, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"inside the wrapper that writes '_orig_mod\.'"):
        import_folder(folder, tmp_path / "new")


def test_unsupported_models_are_refused(tmp_path):
    folder = save("llama2", tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(ConfigError, match="out: exists and is not empty"):
        import_folder(folder, tmp_path / "out")
    with pytest.raises(ConfigError, match="nothing: is not a folder"):
        import_folder(tmp_path / "nothing", tmp_path / "new")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="header is not that of a safetensors file"):
        import_folder(folder, tmp_path / "new")
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModel": "x.Y"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json: auto_map = .*: names custom code"):
        import_folder(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()
