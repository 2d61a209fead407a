"""launch/generate.py: the text of a run, of its checkpoint and of a folder of transformers."""

import io
import shutil
import sys
from contextlib import redirect_stdout
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from launch import convert, generate, report
from tests.huggingface.checkpoints import checkpoint_of, small, tokenizer_in

pytestmark = pytest.mark.gloo

DONE = 0
BAD_INPUT = 2
PROMPT = "def main("


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """run/, with a checkpoint alone, and out/, which it was exported to."""
    root = tmp_path_factory.mktemp("generate")
    run = checkpoint_of(small("gpt"), root, tokenizer_in(root / "tokenizer"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["convert.py", "export", str(run), "--to", str(root / "out")])
        assert convert.main() == DONE
    return root


@pytest.fixture
def command(called):
    return partial(called, generate.main, "launch/generate.py")


def greedy(folder, count):
    """The prompt and the likeliest tokens, one after the other, by no decoder."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        if ids[0, -1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def test_greedy_text_is_the_same_from_every_kind_of_weights(place, command, tmp_path):
    wanted = greedy(place / "out", 12)
    assert wanted.startswith(PROMPT) and len(wanted) > len(PROMPT)
    run = tmp_path / "run"
    shutil.copytree(place / "run", run)
    words = ("--prompt", PROMPT, "--max-new-tokens", 12)
    for path, which in (
        (run, "run/checkpoints/step-10"),
        (run / "checkpoints/step-10", "run/checkpoints/step-10"),
        (place / "out", "out"),
    ):
        code, printed, err = command(path, *words, "--greedy")
        assert (code, printed.rstrip("\n")) == (DONE, wanted.rstrip("\n")), path
        assert f"{which}\n" in err
    shutil.copytree(place / "out", run / "weights")
    code, printed, err = command(run, *words, "--top-k", 1, "--seed", 5)
    assert (code, printed.rstrip("\n")) == (DONE, wanted.rstrip("\n"))
    assert err == f"using the weights of {run / 'weights'}\n"


def test_text_depends_only_on_the_seed(place, command):
    words = (place / "out", "--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 1.5)
    texts = [command(*words, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    # So few tokens sum to it that there is no choice.
    narrow = [command(*words, "--top-p", 1e-6, "--seed", seed)[1] for seed in (1, 2)]
    assert narrow[0] == narrow[1] == command(*words[:5], "--greedy")[1]


def test_text_beyond_the_context_is_refused(place, command):
    code, _, err = command(place / "out", "--prompt", PROMPT, "--max-new-tokens", 1000)
    assert code == DONE and "at the end of the model's context of 64" in err
    code, _, err = command(place / "out", "--prompt", PROMPT * 50)
    assert code == BAD_INPUT and "the model's context is 64; shorten it" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{place}/none", "--prompt", ""], "none: does not exist"),
        (["{place}", "--prompt", ""], "no checkpoint there"),
        (["{place}/out"], "--prompt: is missing"),
        (["{place}/out", "--prompt", "a\udcff"], "--prompt = 'a\\udcff': must be UTF-8"),
        (["{place}/out", "--prompt", "", "--temperature", "0"], "--temperature = 0: must be at l"),
        (["{place}/out", "--prompt", "", "--temperature", "1e-300"], "or --greedy for the likel"),
    ],
)
def test_wrong_input_exits_with_2(words, message, place, command):
    code, printed, errors = command(*(word.format(place=place) for word in words))
    assert (code, printed) == (BAD_INPUT, "")
    assert message in errors and "Traceback" not in errors


@pytest.mark.parametrize("words", [("--greedy",), ("--temperature", 1)])
def test_model_with_logits_that_are_not_finite_is_refused(place, command, tmp_path, words):
    """Sampling was a traceback, and greedy text began with the first token for ever."""
    folder = tmp_path / "out"
    shutil.copytree(place / "out", folder)
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    code, printed, err = command(folder, "--prompt", PROMPT, *words)
    assert (code, printed) == (BAD_INPUT, "") and "logits are not finite" in err


def test_report_has_the_text_of_each_checkpoint(place, command):
    texts = report.samples_of(place / "run", PROMPT, 4)
    _, printed, _ = command(place / "run", "--prompt", PROMPT, "--max-new-tokens", 4, "--seed", 0)
    assert texts == {"after step 10": printed} and printed.startswith(PROMPT)


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_chat_answers_each_turn_after_those_before(place, command, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    shutil.copytree(place / "out", folder)
    code, _, err = command(folder, "--chat", "--prompt", "hello")
    assert code == BAD_INPUT and "has no chat template" in err
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    end = tokenizer.eos_token
    prompt = ""
    expected = []
    for turn in ("hello", "and?"):
        prompt += f"user: {turn}{end}assistant: "
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        with redirect_stdout(io.StringIO()) as out:
            ended = model.generate(ids, max_new_tokens=3, do_sample=False, streamer=streamer)
        expected.append(out.getvalue())
        answer = tokenizer.decode(ended[0, ids.shape[1] :], skip_special_tokens=True)
        prompt += f"{answer}{end}"
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand?\n"))
    words = ("--chat", "--greedy", "--max-new-tokens", 3)
    code, printed, _ = command(folder, *words)
    assert code == DONE and printed == "".join(expected)
    code, printed, _ = command(folder, *words, "--prompt", "hello")
    assert code == DONE and printed == expected[0]
    code, _, err = command(folder)
    assert code == BAD_INPUT and "--prompt" in err
