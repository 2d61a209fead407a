"""What stands beside a published model's weights survives training, and is what an export has."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
)

from parallel3d.checkpoint.disk import copy_folder
from parallel3d.config import RunConfig
from parallel3d.data.sources import no_progress
from parallel3d.huggingface.beside import published_tokenizer
from parallel3d.huggingface.conversion import export, import_folder, read_back
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import WeightFiles, write_rest
from parallel3d.models.common import Pretrained
from tests.checkpoint.folders import seal
from tests.huggingface.checkpoints import STEP, VOCAB, checkpoint_of, run_config, tokenizer_in
from tests.huggingface.published import GROUPED

pytestmark = pytest.mark.gloo

IDS = {"eos_token_id": [1, 299], "bos_token_id": 0, "pad_token_id": 2}
# Each with what its config.json and its generation_config.json say (None: there is no such file).
PUBLISHED = {
    "several ends": (IDS, {**IDS, "do_sample": True, "temperature": 0.6, "top_p": 0.9}),
    "no padding": ({"eos_token_id": 7, "bos_token_id": 5, "pad_token_id": None}, None),
    "sampling off": (IDS, {**IDS, "do_sample": False, "temperature": 0.6, "top_k": 20}),
    "other ids to generate": (IDS, {"eos_token_id": [1, 2, 299], "pad_token_id": 0}),
    "sampling in config.json": ({**IDS, "do_sample": True, "temperature": 0.6}, None),
    "neither": ({}, None),
    "keys of a newer version": (IDS, {**IDS, "suppress_tokens": [3], "use_cache": False}),
}
DEFAULT = ("several ends", "sampling in config.json")


def some_are_slow(names, default):
    """Every name, of which those that are not in `default` run with -m slow."""
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(name, marks=marks[name in default]) for name in names]


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def published(folder, fields, generation, kind=LlamaConfig, **sizes):
    """A model of transformers with a tokenizer that has a chat template."""
    torch.manual_seed(0)
    tokenizer_in(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    settings = kind(**GROUPED | {"vocab_size": VOCAB} | sizes)
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    for key in IDS:
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def trained_on(root, folder, tokenizer):
    """A checkpoint of a run that started at a folder, which is gone since."""
    config = RunConfig.from_dict(
        run_config(RunConfig.from_dict(of_model(folder, tokenizer)).model, tokenizer)
        | of_model(folder, tokenizer)
    )
    run = checkpoint_of(config.model, root, tokenizer)
    state = run / f"checkpoints/step-{STEP}/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"config": config.to_dict()}))
    seal(state.parent, STEP)
    return CheckpointSource(run)


def of_model(folder, tokenizer):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "parallel3d": {
            "model": {"from_pretrained": str(folder)},
            "data": {
                "source": "text",
                "paths": ["a.txt"],
                "tokenizer": str(tokenizer),
                "sequence_length": 16,
            },
            "train": {"steps": STEP},
        },
    }


@pytest.mark.parametrize("name", some_are_slow(PUBLISHED, DEFAULT))
def test_export_has_what_the_publisher_wrote(name, tmp_path):
    fields, generation = PUBLISHED[name]
    folder = published(tmp_path / "published", fields, generation)
    before = AutoConfig.from_pretrained(folder)
    generates = AutoModelForCausalLM.from_pretrained(folder).generation_config.to_dict()
    source = trained_on(tmp_path, folder, folder)
    shutil.rmtree(folder)
    about = source.about()
    out = tmp_path / "out"
    layout = WeightFiles(source.config.model)
    proof = export(source, about, layout, out, no_progress)
    assert proof.ok and any("generation settings of" in what for what in proof.checked), proof
    after = AutoConfig.from_pretrained(out)
    for key in IDS:
        assert getattr(after, key) == getattr(before, key), key
    again = AutoModelForCausalLM.from_pretrained(out).generation_config.to_dict()
    of_file = {"transformers_version", "_from_model_config"}
    assert {k: v for k, v in again.items() if k not in of_file} == {
        k: v for k, v in generates.items() if k not in of_file
    }
    if generation is not None:
        assert json.loads((out / "generation_config.json").read_text()) == generation
    assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
    card = (out / "README.md").read_text()
    assert f"began from the weights of {folder}, whose license holds" in card
    assert "base_model" not in card, "a folder's name means nothing to the hub"


def test_card_names_the_model_of_the_hub(tmp_path):
    folder = published(tmp_path / "published", *PUBLISHED[DEFAULT[0]])
    about = trained_on(tmp_path, folder, folder).about()
    model = about.config.model
    origin = Pretrained(folder="somebody/small", revision="0" * 40)
    block = about.config.parallel3d.model_copy(
        update={"model": model.model_copy(update={"from_pretrained": origin})}
    )
    config = about.config.model_copy(update={"parallel3d": block})
    (tmp_path / "out").mkdir()
    write_rest(tmp_path / "out", replace(about, config=config), WeightFiles(model))
    head = (tmp_path / "out/README.md").read_text().split("---")[1]
    assert "\nbase_model: somebody/small\n" in head


@pytest.mark.parametrize(
    ("requested", "written"),
    [
        (None, "MistralForCausalLM"),
        pytest.param("LlamaForCausalLM", "LlamaForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_export_keeps_the_class_where_two_have_the_same_layers(requested, written, tmp_path):
    """Mistral 7B v0.3 has no windows, and the layers of a Llama."""
    fields, generation = PUBLISHED["several ends"]
    folder = tmp_path / "published"
    published(folder, fields, generation, MistralConfig, sliding_window=None)
    source = trained_on(tmp_path, folder, folder)
    out = tmp_path / "out"
    about = source.about(None, requested)
    proof = export(source, about, WeightFiles(source.config.model), out, no_progress)
    assert proof.ok and proof.architecture == written
    assert type(AutoModelForCausalLM.from_pretrained(out)).__name__ == written


def test_run_from_scratch_has_the_ids_of_its_tokenizer(tmp_path):
    folder = tokenizer_in(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = tokenizer.get_vocab()
    by_id = {number: token for token, number in vocabulary.items()}
    tokenizer.add_special_tokens({"bos_token": by_id[40], "pad_token": by_id[41]})
    tokenizer.save_pretrained(folder)
    model = RunConfig.from_dict(
        of_model(published(tmp_path / "published", IDS, None), folder)
    ).model.model_copy(update={"from_pretrained": None})
    source = CheckpointSource(checkpoint_of(model, tmp_path, folder))
    proof = export(source, source.about(), WeightFiles(model), tmp_path / "out", no_progress)
    assert proof.ok, proof
    end = tokenizer.eos_token_id
    expected = {"bos_token_id": 40, "eos_token_id": end, "pad_token_id": 41}
    for file in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / file).read_text())
        assert {key: written[key] for key in expected} == expected, file


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """An export of a published model, and what it is compared with."""
    root = tmp_path_factory.mktemp("sound")
    folder = published(root / "published", *PUBLISHED["several ends"])
    source = trained_on(root, folder, folder)
    about = source.about()
    layout = WeightFiles(source.config.model)
    export(source, about, layout, root / "out", no_progress)
    return root / "out", source, about, layout


def change(key, value):
    def changed(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return changed


DAMAGE = {
    "an end": ("config.json", change("eos_token_id", 1), "eos_token_id is 1, not [1, 299]"),
    "padding": ("config.json", change("pad_token_id", 1), "pad_token_id is 1, not 2"),
    "sampling": ("generation_config.json", change("temperature", 1.0), "temperature is 1.0"),
    "a new key": ("generation_config.json", change("top_k", 3), "top_k is 3, not None"),
    "a template": ("chat_template.jinja", lambda path: path.write_text("x"), "chat_template.jinja"),
    "no template": ("chat_template.jinja", lambda path: path.unlink(), "chat_template.jinja"),
}


@pytest.mark.parametrize("name", some_are_slow(DAMAGE, ("sampling", "a template")))
def test_export_differs_if_a_field_is_lost(name, sound, tmp_path):
    out, source, about, layout = sound
    file, damage, words = DAMAGE[name]
    shutil.copytree(out, tmp_path / "out")
    damage(tmp_path / "out" / file)
    proof = read_back(tmp_path / "out", source, about, layout, {}, no_progress)
    assert any(words in text for text in proof.differs), proof.differs


def test_further_chat_templates_are_carried_over(tmp_path):
    """Into a checkpoint, which verifies them, into an export, and by an import."""
    model = published(tmp_path / "model", *PUBLISHED["several ends"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": f"tools: {TEMPLATE}"}
    tokenizer.save_pretrained(model)
    further = "additional_chat_templates/tool_use.jinja"
    assert (model / further).is_file()
    copied = tmp_path / "copied"
    entries = copy_folder(model, copied)
    assert further in entries and (copied / further).read_bytes() == (model / further).read_bytes()
    out = tmp_path / "imported"
    assert import_folder(model, out).ok
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template

    source = trained_on(tmp_path / "run", model, model)
    layout = WeightFiles(source.config.model)
    exported = tmp_path / "exported"
    assert export(source, source.about(), layout, exported, no_progress).ok
    assert AutoTokenizer.from_pretrained(exported).chat_template == tokenizer.chat_template
    (exported / further).write_text("another")
    proof = read_back(exported, source, source.about(), layout, {}, no_progress)
    assert any(further in difference for difference in proof.differs)


def test_tokenizer_of_a_hub_model_is_found_in_the_hubs_cache(tmp_path, monkeypatch):
    """For a run on token ids, whose corpus has no tokenizer of its own."""
    cached = published(tmp_path / "abc", *PUBLISHED["neither"])
    asked = []

    def look(name, file, revision):
        asked.append((name, revision))
        return str(cached / file) if name == "owner/model" else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", look)
    source = trained_on(tmp_path / "run", cached, cached)
    folders = {}
    for name in ("owner/model", "owner/other"):
        origin = Pretrained(folder=name, revision="abc")
        model = source.config.model.model_copy(update={"from_pretrained": origin})
        block = source.config.parallel3d.model_copy(update={"model": model})
        folders[name] = published_tokenizer(source.config.model_copy(update={"parallel3d": block}))
    assert folders == {"owner/model": cached, "owner/other": None}
    assert asked == [("owner/model", "abc"), ("owner/other", "abc")]
