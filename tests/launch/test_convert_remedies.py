"""Each remedy about published models, exports and averages is applied as it is written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch import checkpoint as checkpoint_command
from launch import convert, generate
from parallel3d.data.sources import no_progress
from parallel3d.huggingface.averages import choose, weights_for
from parallel3d.huggingface.conversion import export, import_folder
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import WeightFiles, bytes_of
from tests.checkpoint.folders import make_checkpoint
from tests.huggingface.checkpoints import checkpoint_of, small, tokenizer_in
from tests.huggingface.published import save
from tests.remedies import refused

pytestmark = pytest.mark.gloo


@pytest.fixture
def model(tmp_path):
    return save("llama2", tmp_path / "model")


def change(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def assert_imported(folder, tmp_path):
    out = tmp_path / "imported"
    assert import_folder(folder, out).ok
    shutil.rmtree(out)


def test_target_is_removed_or_another_is_named(model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with refused("remove it, or name another"):
        import_folder(model, tmp_path / "out")
    assert import_folder(model, tmp_path / "other").ok
    shutil.rmtree(tmp_path / "out")
    assert import_folder(model, tmp_path / "out").ok


def test_folder_with_config_json_is_named(model, tmp_path):
    with refused("name one that contains config.json"):
        import_folder(tmp_path / "none", tmp_path / "out")
    assert_imported(model, tmp_path)


def test_damaged_files_are_downloaded_again(model, tmp_path):
    path = model / "model.safetensors"
    data = path.read_bytes()
    whole = load_file(path)
    path.write_bytes(data[:-4])
    with refused("download or write it again"):
        import_folder(model, tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(model, {key: value for key, value in whole.items() if key != name})
    with refused("download the folder again"):
        import_folder(model, tmp_path / "out")
    rewrite(model, whole | {name: whole[name][:8]})
    with refused("download the folder again"):
        import_folder(model, tmp_path / "out")
    path.write_bytes(data)
    assert_imported(model, tmp_path)


@pytest.mark.slow
def test_values_that_are_not_finite_are_left_out(model, tmp_path):
    whole = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    wrong = whole[name].clone()
    wrong[0, 0] = torch.nan
    rewrite(model, whole | {name: wrong})
    with refused("use a copy of the model without them"):
        import_folder(model, tmp_path / "out")
    rewrite(model, whole)
    assert_imported(model, tmp_path)


def test_model_that_is_not_quantised_is_used(model, tmp_path):
    whole = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(model, whole | {name: whole[name].to(torch.int8)})
    with refused("use a model that is not quantised"):
        import_folder(model, tmp_path / "out")
    rewrite(model, whole | {name: whole[name].to(torch.bfloat16)})
    assert_imported(model, tmp_path)


@pytest.mark.slow
def test_second_copy_of_a_tensor_is_removed(tmp_path):
    folder = save("pythia", tmp_path / "model")
    whole = load_file(folder / "model.safetensors")
    head = whole.get("embed_out.weight", whole["gpt_neox.embed_in.weight"]) + 0
    rewrite(folder, whole | {"lm_head.weight": head, "embed_out.weight": head + 0})
    with refused("remove one in a copy of the folder"):
        import_folder(folder, tmp_path / "out")
    for name in ("lm_head.weight", "embed_out.weight"):
        rewrite(folder, {k: v for k, v in whole.items() if k != "embed_out.weight"} | {name: head})
        assert_imported(folder, tmp_path)


def test_weights_that_are_not_tied_say_so(tmp_path):
    folder = save("smollm2", tmp_path / "model")
    whole = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in whole
    rewrite(folder, whole | {"lm_head.weight": 2 * whole["model.embed_tokens.weight"]})
    with refused("set it to false in a copy of the folder"):
        import_folder(folder, tmp_path / "out")
    change(folder, tie_word_embeddings=False)
    assert_imported(folder, tmp_path)


@pytest.mark.parametrize("size", ["big", 0, 1.5])
def test_size_in_config_json_is_written_as_the_message_says(model, tmp_path, size):
    right = json.loads((model / "config.json").read_text())["intermediate_size"]
    change(model, intermediate_size=size)
    with refused("config.json: intermediate_size = "):
        import_folder(model, tmp_path / "out")
    change(model, intermediate_size=right)
    assert_imported(model, tmp_path)


@pytest.mark.slow
def test_model_with_other_tensors_is_replaced(model, tmp_path):
    whole = load_file(model / "model.safetensors")
    rewrite(model, whole | {"model.layers.0.extra.weight": torch.ones(3)})
    with refused("use another model"):
        import_folder(model, tmp_path / "out")
    rewrite(model, whole)
    assert_imported(model, tmp_path)


def test_tokenizer_that_has_moved_is_named(tmp_path):
    run = checkpoint_of(small("gpt"), tmp_path, tokenizer_in(tmp_path / "own"))
    source = CheckpointSource(run)
    shutil.rmtree(source.folder / "tokenizer")
    with refused("name its folder with --tokenizer"):
        source.about()
    about = source.about(tmp_path / "own")
    files = WeightFiles(source.config.model)
    assert export(source, about, files, tmp_path / "out", no_progress).ok


def export_as(source, architecture, folder):
    about = source.about(architecture=architecture)
    return export(source, about, WeightFiles(source.config.model), folder, no_progress)


def test_class_that_the_message_names_is_exported(tmp_path):
    source = CheckpointSource(checkpoint_of(small("gpt"), tmp_path))
    with refused("use GPT2LMHeadModel"):
        export_as(source, "LlamaForCausalLM", tmp_path / "out")
    assert export_as(source, "GPT2LMHeadModel", tmp_path / "out").ok


def test_size_is_written_as_the_message_shows():
    with refused("write 500MB"):
        bytes_of("big")
    assert bytes_of("500MB") == 500_000_000 and bytes_of("5GB") == 5 * 10**9


def test_average_is_left_out(tmp_path):
    run = checkpoint_of(small("gpt"), tmp_path)
    with refused("or leave out --ema"):
        CheckpointSource(run, True)
    assert CheckpointSource(run).config


def test_averaged_checkpoints_are_those_that_exist(tmp_path):
    for step in (2, 4):
        make_checkpoint(tmp_path / "checkpoints", step)
    with refused("use --last 2"):
        choose(tmp_path, 3, ())
    assert len(choose(tmp_path, 2, ())) == 2
    with refused("use those of 2, 4"):
        choose(tmp_path, None, (2, 3))
    folders = choose(tmp_path, None, (2, 4))
    with refused("write as many, the oldest first"):
        weights_for(folders, (1.0,))
    assert weights_for(folders, (1.0, 2.0)) == (1.0, 2.0)


def test_averages_are_of_one_model(called, tmp_path):
    run = checkpoint_of(small("gpt"), tmp_path)
    other = checkpoint_of(small("gpt", num_hidden_layers=1), tmp_path / "other")
    shutil.copytree(other / "checkpoints/step-10", run / "checkpoints/step-9")
    state = run / "checkpoints/step-9"
    manifest = json.loads((state / "manifest.json").read_text())
    assert manifest["step"] == 10
    words = ("average", run, "--steps", "10", "--to", tmp_path / "mean")
    code, _, err = called(checkpoint_command.main, "checkpoint.py", *words)
    assert code == 0, err


# Commands


@pytest.fixture
def exported(called, tmp_path):
    """A folder of transformers with a tokenizer."""
    run = checkpoint_of(small("gpt"), tmp_path, tokenizer_in(tmp_path / "own"))
    code, _, err = called(convert.main, "convert.py", "export", run, "--to", tmp_path / "out")
    assert code == 0, err
    return tmp_path / "out"


def test_generation_is_asked_for_as_the_messages_say(called, exported, tmp_path):
    def text(*words):
        return called(generate.main, "generate.py", *words, "--max-new-tokens", "2")

    prompt = ("--prompt", "def main(")
    assert "name the folder of a run, a checkpoint or a model" in text(tmp_path / "no", *prompt)[2]
    for path in (tmp_path / "run", tmp_path / "run/checkpoints/step-10", exported):
        assert text(path, *prompt)[0] == 0
    code, _, err = text(exported, "--prompt", "words " * 99)
    assert code == 2 and "shorten it" in err
    assert text(exported, "--prompt", "words")[0] == 0
    code, _, err = text(exported, *prompt, "--temperature", "0")
    assert code == 2 and "use 0.8" in err
    assert text(exported, *prompt, "--temperature", "0.8")[0] == 0
    code, _, err = text(exported, *prompt, "--chat")
    assert code == 2 and "or leave it out" in err
    change(exported, bos_token_id=None)
    code, _, err = text(exported, "--prompt", "")
    assert code == 2 and "give a text" in err
    (exported / "tokenizer.json").rename(tmp_path / "moved")
    code, _, err = text(exported, *prompt)
    assert code == 2 and "name a folder with both" in err
    (tmp_path / "moved").rename(exported / "tokenizer.json")
    assert text(exported, *prompt)[0] == 0
