"""DeepSpeed's folders: its universal format has the same bits, and a missing shard is named."""

import sys
from shutil import copytree
from unittest.mock import patch

import pytest

from parallel3d.checkpoint.manifest import read_manifest
from parallel3d.verify.local_ranks import run_locally
from tests.foreign import sources
from tests.foreign.continuing import assert_no_checkpoint, convert_checkpoint

pytestmark = pytest.mark.gloo

UNIVERSAL = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The config, and the folder of two ranks at ZeRO 1 in bf16, after 3 steps."""
    root = tmp_path_factory.mktemp("deepspeed")
    config = sources.write_config(root)
    windows = sources.samples(config)
    extra = {"bf16": {"enabled": True}}
    run_locally(sources.by_deepspeed, 2, root / "theirs", windows, 1, extra, UNIVERSAL)
    return config, root / "theirs"


def tensors_of(run):
    """The digest of the file with all weights and moments."""
    manifest = read_manifest(run / "checkpoints" / f"step-{sources.SAVED}")
    return manifest.files["shard-00000-of-00001.safetensors"]


def test_universal_format_has_the_same_bits(tmp_path, saved):
    from deepspeed.checkpoint.ds_to_universal import main, parse_arguments

    config, folder = saved
    plain = copytree(folder, tmp_path / "theirs") / f"global_step{sources.SAVED}"
    universal = tmp_path / "theirs" / "universal"
    words = ["--input_folder", str(plain), "--output_folder", str(universal)]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    with patch.object(sys, "argv", ["ds_to_universal", *words, *workers]):
        main(parse_arguments())
    for source, name in ((folder, "plain"), (universal, "universal")):
        assert convert_checkpoint(source, tmp_path / "runs" / name, config) == 0
    runs = tmp_path / "runs"
    assert tensors_of(runs / "plain") == tensors_of(runs / "universal")


def test_masters_are_those_of_bf16_runs(tmp_path, saved):
    """A run in bf16 keeps its masters in fp32 beside the weights, which are rounded."""
    import torch

    from parallel3d.huggingface.source import CheckpointSource

    config, folder = saved
    run = tmp_path / "runs" / "new"
    assert convert_checkpoint(folder, run, config) == 0
    state = torch.load(
        folder / f"global_step{sources.SAVED}" / "mp_rank_00_model_states.pt", weights_only=True
    )
    weight = state["module"]["model.embed_tokens.weight"]
    master = CheckpointSource(run).read("embedding.token.weight")
    assert weight.dtype == torch.bfloat16 and torch.equal(master.bfloat16(), weight)
    assert not torch.equal(master, weight.float())


@pytest.mark.parametrize(
    "name", ["zero_pp_rank_1_mp_rank_00_optim_states", "mp_rank_00_model_states"]
)
def test_missing_shard_is_named(tmp_path, capsys, saved, name):
    config, folder = saved
    copy = copytree(folder, tmp_path / "theirs")
    (lost,) = copy.glob(f"*/*{name}.pt")
    lost.unlink()
    run = tmp_path / "runs" / "new"
    assert convert_checkpoint(copy, run, config) == 2
    message = capsys.readouterr().err
    assert f"{name}.pt" in message and "copy" in message, message
    assert_no_checkpoint(run)


def test_latest_without_its_folder_is_named(tmp_path, capsys, saved):
    config, folder = saved
    copy = copytree(folder, tmp_path / "theirs")
    (copy / "latest").write_text("global_step9")
    assert convert_checkpoint(copy, tmp_path / "runs" / "new", config) == 2
    assert "global_step9, which is missing" in capsys.readouterr().err


@pytest.mark.slow  # eight conversions
def test_folder_is_copied_or_saved_again_as_the_messages_say(tmp_path, capsys, saved):
    """As older releases of DeepSpeed, and incomplete copies, leave it."""
    import torch

    config, folder = saved
    theirs = copytree(folder, tmp_path / "theirs")
    numbers = iter(range(100))

    def refusal():
        run = tmp_path / "runs" / str(next(numbers))
        code = convert_checkpoint(theirs, run, config)
        return capsys.readouterr().err if code else ""

    assert not refusal()
    (theirs / "latest").write_text("global_step9")
    assert "which is missing; copy it, too" in refusal()
    step = theirs / f"global_step{sources.SAVED}"
    copytree(step, theirs / "global_step9")
    assert not refusal()
    step = theirs / "global_step9"
    (model,) = step.glob("mp_rank_00_model_states.pt")
    optimizers = sorted(step.glob("*_optim_states.pt"))

    def without(files, block, key):
        """Save the files without a key, as an older release would; return how to save it again."""
        whole = {path: path.read_bytes() for path in files}
        for path in files:
            state = torch.load(path, weights_only=False)
            del (state[block] if block else state)[key]
            torch.save(state, path)
        return lambda: [path.write_bytes(data) for path, data in whole.items()]

    for files, block, key in (
        ([model], "", "param_shapes"),
        (optimizers, "optimizer_state_dict", "param_slice_mappings"),
    ):
        save_again = without(files, block, key)
        assert f"has no {key}; save the checkpoint with DeepSpeed 0.7 or later" in refusal()
        save_again()
        assert not refusal()
