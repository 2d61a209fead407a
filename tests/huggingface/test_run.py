"""A whole run that starts from a published model, and goes on from its checkpoint without it."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPT2Config

from parallel3d.config import RunConfig
from parallel3d.huggingface.initial_weights import tokenizer_warning
from tests.huggingface.checkpoints import VOCAB, tokenizer_in
from tests.huggingface.published import MODELS, run_config
from tests.train.running import start_all

pytestmark = pytest.mark.gloo

SENTENCEPIECE = b"read by other programs than transformers"


@pytest.fixture
def raw(tmp_path):
    """A run on from a model, on a corpus of one token over and over."""
    folder, tokenizer = (tokenizer_in(tmp_path / name) for name in ("model", "tokenizer"))
    torch.manual_seed(0)
    settings = MODELS["gpt2"][1] | {"vocab_size": VOCAB}
    AutoModelForCausalLM.from_config(GPT2Config(**settings)).save_pretrained(folder)
    (tokenizer / "tokenizer.model").write_bytes(SENTENCEPIECE)
    (tokenizer / "training_args.json").write_text("{}")
    (tmp_path / "a.txt").write_text("a" * 3000)
    data = {
        "source": "text",
        "paths": [str(tmp_path / "a.txt")],
        "tokenizer": str(tokenizer),
        "sequence_length": 16,
        "cache": str(tmp_path / "cache"),
        "held_out_fraction": 0,
    }
    place = {"directory": str(tmp_path / "runs"), "name": "a", "save_weights": False}
    raw = run_config(folder, **{"parallel3d.data": data, "parallel3d.run": place})
    return raw | {"zero_optimization": {"stage": 1}}


def remove(rank, folder):
    shutil.rmtree(folder)


def test_run_starts_from_the_model_and_resumes_without_it(raw, tmp_path):
    folder = tmp_path / "model"
    run = tmp_path / "runs/a"
    model = AutoModelForCausalLM.from_pretrained(folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = torch.full((1, 16), vocabulary["a"])
    wanted = F.cross_entropy(model(tokens).logits[0], tokens[0]).item()
    # As the run writes it: a record in the folder's place.
    resolved = RunConfig.from_dict(raw).to_dict()
    raw["parallel3d"]["train"]["stop_after"] = 1
    (first,), (again,) = start_all([(raw,), (resolved, remove, folder)], (1, 1, 1))
    assert first.code == 3 and again.code == 0, (first, again)
    assert first.says(f"weights of {folder}") == 1 and not first.says("WARNING: data.tokenizer")
    assert again.says("resume  from ") == 1 and not again.says("weights of")
    assert not folder.exists()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert abs(lines[0]["loss"] - wanted) < 1e-4
    origin = json.loads((run / "config.json").read_text())["parallel3d"]["model"]["from_pretrained"]
    assert origin["folder"] == str(folder) and origin["weights"]
    # Files that transformers reads and does not write are the publisher's, in every checkpoint too.
    for own in (run, run / "checkpoints/step-5"):
        assert (own / "tokenizer/tokenizer.model").read_bytes() == SENTENCEPIECE
        assert not (own / "tokenizer/training_args.json").exists()


def test_other_tokenizer_than_that_of_the_model_gives_a_remark(tmp_path):
    model = tokenizer_in(tmp_path / "model")
    same = tokenizer_in(tmp_path / "same")
    other = tokenizer_in(tmp_path / "other", ["in to it"])
    (tmp_path / "none").mkdir()
    assert tokenizer_warning(model, model, "m") == tokenizer_warning(model, same, "m") == ""
    (same / "tokenizer.json").write_text((same / "tokenizer.json").read_text() + "\n")
    assert tokenizer_warning(model, same, "m") == "", "written in another way"
    text = tokenizer_warning(model, other, "m")
    assert text.startswith("WARNING: data.tokenizer differs from the tokenizer of m, ")
    assert "to m, unless" in text
    assert tokenizer_warning(model, tmp_path / "none", "m") == "", (
        "token ids, of which nobody knows"
    )
    text = tokenizer_warning(tmp_path / "none", other, "m")
    assert text.startswith("WARNING: the tokenizer of m cannot be compared")
