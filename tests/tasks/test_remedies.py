"""Each remedy about a task is applied as it is written, and the task is loaded."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from parallel3d.extras.tasks.score import _tokenizer_of
from tests.remedies import refused

pytestmark = pytest.mark.gloo

HERE = Path(__file__).parent


def load_tasks(names):
    """Load tasks by lm_eval, whose import takes a second: not in each worker."""
    from parallel3d.extras.tasks import library

    return library.load_tasks(names)


@pytest.fixture
def task(tmp_path):
    """A copy of a task, and a function that writes it with changes; None takes a key away."""
    shutil.copy(HERE / "questions.jsonl", tmp_path)
    content = yaml.safe_load((HERE / "questions.yaml").read_text())
    path = tmp_path / "mine.yaml"

    def write(**changes):
        changed = content | changes
        path.write_text(yaml.safe_dump({k: v for k, v in changed.items() if v is not None}))
        return [str(path)]

    return write


def test_fields_of_a_task_are_named_as_the_message_asks(task):
    with refused("did you mean output_type?"):
        load_tasks(task(output_type=None, output_typ="multiple_choice"))
    with refused("remove it"):
        load_tasks(task(zzzzz=1))
    with refused("name the task"):
        load_tasks(task(task=None))
    assert load_tasks(task())["tasks"]


def test_task_is_one_that_a_mesh_can_score(task):
    with refused("use a task of loglikelihood, loglikelihood_rolling, multiple_choice"):
        load_tasks(task(output_type="generate_until"))
    assert load_tasks(task(output_type="multiple_choice"))["tasks"]


def test_file_is_a_task_file(task, tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [")
    with refused("use a task file of lm_eval"):
        load_tasks([str(tmp_path / "bad.yaml")])
    with refused("name a task of lm_eval whose data this machine has, or a YAML file"):
        load_tasks(task(dataset_kwargs={"data_files": {"test": "gone.jsonl"}}))
    assert load_tasks(task())["tasks"]


def test_tokenizer_of_ids_is_named_for_tasks(tmp_path):
    def config_of(name):
        return SimpleNamespace(data=SimpleNamespace(tokenizer=str(name)))

    with refused("name its folder with --data.tokenizer"):
        _tokenizer_of(tmp_path / "step-1", config_of("none"))
    (tmp_path / "own").mkdir()
    assert _tokenizer_of(tmp_path / "step-1", config_of(tmp_path / "own")) == tmp_path / "own"


def test_samples_are_as_long_as_a_continuation_or_it_is_shorter():
    from parallel3d.extras.tasks.library import MeshLM

    def scored(longest, continuation):
        scorer = SimpleNamespace(longest=longest, lead=list)
        model = SimpleNamespace(_scorer=scorer)
        MeshLM._loglikelihood_tokens(model, [("", [1], continuation)])

    with refused("raise it, up to the model's max_position_embeddings, or use a task with shorter"):
        scored(4, [1] * 5)
    for longest, continuation in (5, [1] * 5), (4, [1] * 4):
        with pytest.raises(
            AttributeError, match="log_likelihood"
        ):  # it is accepted, and then scored
            scored(longest, continuation)
