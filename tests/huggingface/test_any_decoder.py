"""Folders of any decoder of transformers, imported: names, values and biases are transformers'."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from parallel3d.base.errors import ConfigError
from parallel3d.data.sources import no_progress
from parallel3d.huggingface.conversion import export, import_folder
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import DTYPES, WeightFiles
from parallel3d.models.transformers import huggingface
from parallel3d.models.transformers.spec import Config
from tests.huggingface.checkpoints import SHARD_BYTES, VOCAB, checkpoint_of
from tests.models.architectures import small_config
from tests.models.families import weights_of
from tests.models.test_any_decoder import COMMON

pytestmark = pytest.mark.gloo


def saved(kind, folder, **options):
    """A small model of an architecture, saved by transformers; its biases are not zero."""
    fields = small_config(kind, std=0.2)
    del fields["model_type"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields, pad_token_id=None))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(folder, **options)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "kind",
    [
        "phi3",
        pytest.param("minimax_m2", marks=pytest.mark.slow),
        "gpt_oss",
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("olmo2", marks=pytest.mark.slow),
    ],
)
def test_imported_folder_has_the_tensors_that_transformers_saves(kind, tmp_path):
    theirs = saved(kind, tmp_path / "model")
    proof = import_folder(tmp_path / "model", tmp_path / "out")
    assert proof.ok, proof
    ours = load_file(tmp_path / "out/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_packed_experts_are_read(tmp_path):
    packed = saved("deepseek_v3", tmp_path / "packed", save_original_format=False)
    single = saved("deepseek_v3", tmp_path / "single")
    assert packed.keys() != single.keys()
    proof = import_folder(tmp_path / "packed", tmp_path / "out")
    assert proof.ok, proof
    ours = load_file(tmp_path / "out/model.safetensors")
    assert ours.keys() == single.keys()
    assert all(torch.equal(ours[name], value) for name, value in single.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*COMMON, "gpt2", "gpt_oss", "llama4_text", "mixtral"])
def test_export_is_loaded_by_transformers(kind, tmp_path):
    """Each weight is in its place, logits are those of a model with them, and it generates."""
    config = Config(family="transformers", config=small_config(kind), vocab_size=VOCAB)
    source = CheckpointSource(checkpoint_of(config, tmp_path))
    layout = WeightFiles(config, DTYPES["fp32"], SHARD_BYTES)
    proof = export(source, source.about(), layout, tmp_path / "out", no_progress)
    assert proof.ok, proof
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    expected = huggingface.to_huggingface(config, weights_of(config))
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    plain = huggingface.reference(config).eval()
    plain.load_state_dict(expected, strict=False)
    tokens = torch.arange(7).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens).logits, plain(tokens).logits)
    text = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert text.shape == (1, 11) and torch.equal(text[:, :7], tokens)


def test_type_in_a_published_file_does_not_round_the_reference():
    """Gemma's factor of embeddings is a buffer: in bf16 it would be off by 1e-4."""
    fields = small_config("gemma3_text") | {"torch_dtype": "bfloat16"}
    model = huggingface.reference(Config(family="transformers", config=fields))
    factor = model.get_input_embeddings().embed_scale
    assert float(factor) == pytest.approx(fields["hidden_size"] ** 0.5, rel=1e-7)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_buffer_that_no_checkpoint_has_is_refused(tmp_path):
    saved("apertus", tmp_path / "model")
    with pytest.raises(ConfigError, match="act_fn"):
        import_folder(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
