"""The commands of docs/after-training.md on tasks and conversations, run as they stand there."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from launch import generate, prepare, report
from parallel3d.config import RunConfig
from parallel3d.train.ending import DONE
from parallel3d.verify.local_ranks import run_locally
from tests.data.chats import MARKED, save_tokenizer_with, turns, write_lines
from tests.tasks.test_scores import HERE
from tests.train.running import train_on_rank
from tests.train.test_evaluate import evaluate_on_rank

pytestmark = pytest.mark.gloo

PAGE = (Path(__file__).parents[2] / "docs/after-training.md").read_text()
CHAPTERS = dict(re.findall(r"(?s)\n## ([^\n]+)\n(.*?)(?=\n## |\Z)", PAGE))
TASKS = CHAPTERS["Scores on tasks"]
CHAT = CHAPTERS["Chat data"]
STEPS = 2


def blocks(text):
    """The indented blocks of a chapter."""
    texts = re.findall(r"(?m)(?:^    .*\n|^\n(?=    ))+", text)
    return ["\n".join(line[4:] for line in block.splitlines()).strip() for block in texts]


def commands(text):
    lines = [line for block in blocks(text) for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("python launch/")]


def setting(text, name):
    """The value of a setting that a chapter shows."""
    (block,) = [block for block in blocks(text) if block.startswith(f'"{name}":')]
    return json.loads(f"{{{block}}}")[name]


def train_and_score(rank, folder, raw, words):
    """Train in a folder, then score the run under the name that the page has there."""
    os.chdir(folder)
    ended = train_on_rank(rank, raw)
    Path("runs/mine").symlink_to("chat")
    return ended, evaluate_on_rank(rank, [words])


@pytest.fixture
def place(tmp_path, monkeypatch):
    """What the page takes for granted: conversations, a tokenizer, and a config of a model."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer_with(MARKED, tmp_path / "my-model")
    Path("chats").mkdir()
    conversations = [turns(f"What is {n} + {n}?", str(2 * n)) for n in range(60)]
    write_lines(Path("chats/a.jsonl"), conversations)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    block = {
        "model": {"family": "gpt", "max_position_embeddings": 64, **sizes},
        "data": setting(CHAT, "data") | {"sequence_length": 64, "cache": "cache"},
        "train": {"steps": STEPS} | setting(TASKS, "train"),
    }
    tasks = block["train"]["evaluate_tasks"]
    assert tasks.pop("tasks") == ["mine.yaml", "arc_easy"], "its data would come from the hub"
    block["train"]["evaluate_tasks"] = {"every": 2, "tasks": ["mine.yaml"]}
    raw = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "parallel3d": block,
    }
    Path("chat.json").write_text(json.dumps(raw))
    (file,) = [block for block in blocks(TASKS) if block.startswith("# mine.yaml")]
    task, _, question = file.partition("\n\n")
    assert json.loads(question)["answer"] == 1
    Path("mine.yaml").write_text(task)
    Path("questions.jsonl").write_text(question + "\n" + (HERE / "questions.jsonl").read_text())
    return tmp_path


def test_commands_of_the_page(place, called):
    score, *_ = commands(TASKS)
    show, train, talk = commands(CHAT)
    code, printed, _ = called(prepare.main, *show)
    assert code == DONE and re.search(r"assistant *\n *⟦\d+<\|end\|>", printed)
    assert train[:3] == ["launch/train.py", "--config", "chat.json"]
    config = RunConfig.from_json("chat.json", train[3:])
    raw = config.to_public_dict()
    ((ended, ((code, printed),)),) = run_locally(
        train_and_score, 1, place, raw, [*score[1:], "--json"]
    )
    assert ended.code == DONE, ended.error
    lines = [json.loads(line) for line in Path("runs/chat/metrics.jsonl").read_text().splitlines()]
    scored = {line["step"]: line["scores"]["mine"] for line in lines if "scores" in line}
    assert list(scored) == [STEPS]
    assert code == DONE
    assert json.loads(printed)["tasks"]["mine"] == pytest.approx(scored[STEPS], rel=1e-6)
    assert sum("step 2  mine  acc " in line for line in ended.printed) == 1
    code, printed, _ = called(generate.main, *talk, "--max-new-tokens", "3")
    assert code == DONE and "What is" not in printed
    weights = Path("runs/chat/weights")
    assert (weights / "chat_template.jinja").read_text() == MARKED
    assert "<|end|>" in (weights / "tokenizer_config.json").read_text()
    assert called(report.main, "report.py", "runs/chat")[0] == DONE
    assert Path("runs/chat/report/scores.png").exists()
