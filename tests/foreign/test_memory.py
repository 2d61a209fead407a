"""A conversion holds a parameter or two, not the model."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import save

from tests.foreign.continuing import convert_checkpoint
from tests.foreign.plain import SEEN, Run, adamw
from tests.foreign.sources import SIZES, write_config

pytestmark = pytest.mark.gloo

LARGE = SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24}


def peak_of(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024


def growth_in_a_child(*args):
    """Convert in a forked process; return its peak of memory beyond what it had before."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            before = peak_of("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
            code = convert_checkpoint(*args)
            os.write(write_end, f"{code} {peak_of('VmHWM') - before}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end) as pipe:
        code, growth = map(int, pipe.read().split())
    os.waitpid(child, 0)
    assert code == 0
    return growth


@pytest.fixture(scope="module")
def trained():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LARGE, tie_word_embeddings=False))
    optimizer = adamw(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return model, optimizer


def save_as(program, folder, model, optimizer):
    """Save a run as a distributed checkpoint of torch, or the files of the Trainer's folder."""
    state = optimizer.state_dict()
    if program == "torch":
        save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder, no_dist=True)
        return
    model.save_pretrained(folder)
    torch.save(state, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 1}')


@pytest.mark.parametrize("program", [pytest.param("torch", marks=pytest.mark.slow), "Trainer"])
def test_memory_is_that_of_a_parameter(tmp_path, trained, program):
    # A small one first, so that what it imports is loaded before memory is measured.
    small = tmp_path / "small"
    run = Run()
    small.mkdir()
    save_as(program, small / "theirs", run.model, run.optimizer)
    config = write_config(small, warmup=0)
    assert convert_checkpoint(small / "theirs", small / "new", config, *SEEN) == 0
    model, optimizer = trained
    folder = tmp_path / "theirs"
    save_as(program, folder, model, optimizer)
    config = write_config(tmp_path, sizes=LARGE, warmup=0)
    growth = growth_in_a_child(folder, tmp_path / "new", config, *SEEN)
    bytes_of_model = 3 * sum(4 * weight.numel() for weight in model.parameters())
    largest = max(4 * weight.numel() for weight in model.parameters())
    assert bytes_of_model > 300 * largest
    # Buffers and what the interpreter itself allocates do not grow with the model.
    assert growth < 40 * 2**20 + 4 * largest < bytes_of_model / 3, (growth, bytes_of_model)
