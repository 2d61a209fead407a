"""A rank that cannot read its samples says so, whichever it is, and its peers end with it."""

import os
import time

import pytest

from tests.data.ids import writers
from tests.launch.launching import torchrun
from tests.launch.test_restart import begin, finish, place, wait_for  # noqa: F401

pytestmark = [pytest.mark.drill, pytest.mark.slow]


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_file_truncated_during_a_run_is_named(place, read_ahead):  # noqa: F811
    documents = [[*ids, writers.END] for ids in writers.some_documents(2000, size=270)]
    path = writers.megatron(place.root / "ids.bin", documents)
    name = f"cut-short-{read_ahead}"
    settings = {
        "data.source": "megatron",
        "data.paths": f'["{path}"]',
        "data.tokenizer": "none",
        "data.end_of_text_id": writers.END,
        "data.read_ahead": read_ahead,
        "run.name": name,
    }
    arguments = [part for key, value in settings.items() for part in (f"--parallel3d.{key}", value)]
    process, log = begin(place, torchrun(2), *arguments, steps=4000)
    wait_for(lambda: len(place.lines(name)) >= 2, process, log)
    # Samples come from anywhere: soon one of the ranks meets the end, and the other does not.
    os.truncate(path, path.stat().st_size - 3000)
    began = time.monotonic()
    assert finish(process, log) != 0
    output = log.read_text()
    assert "ids.bin has " in output and "it shrank since it was prepared" in output
    assert any(f"rank {rank}: {path} has" in output for rank in (0, 1))
    assert "Traceback" not in output.partition("torch/distributed/elastic")[0]
    assert time.monotonic() - began < 25
