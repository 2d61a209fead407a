"""Offload of optimizer and parameters, to the host and to NVMe, trains the same and cleans up."""

import fcntl
import os
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest

from parallel3d.engine import op_builds, swap
from parallel3d.engine.quirks import nvme
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import RankFailed, run_locally
from tests.cases import Case, Trainer, measure, unpatched
from tests.engine.storage_bytes import memory_bytes
from tests.verify.measuring import errors_of

pytestmark = pytest.mark.gloo
on_nvme = pytest.mark.usefixtures("cpu_adam", "async_io")

SMALL = {"steps": 2, "batch": 8, "microbatches": 2}
ONE_LAYER = {"num_hidden_layers": 1}
SMALLEST = {"steps": 1, "microbatches": 1, "model": ONE_LAYER}
OFFLOADS = [
    "cpu",
    "nvme",
    "param-cpu",
    "param-nvme",
    "cpu+param-cpu",
    "cpu+param-nvme",
    "nvme+param-cpu",
    "nvme+param-nvme",
]


def small(offload, folder, zero=None, **settings):
    """A case of `offload` to `folder`, with other settings of zero_optimization."""
    changes = {f"zero_optimization.{name}": value for name, value in (zero or {}).items()}
    return Case(offload=offload, folder=str(folder), changes=changes, **(SMALL | settings))


@on_nvme
@pytest.mark.parametrize(
    ("offload", "mesh", "reduction", "precision"),
    [
        ("param-cpu", (1, 2, 1), "per_microbatch", "fp32"),
        *(
            pytest.param(*case, "bf16", marks=pytest.mark.slow)
            for case in product(
                OFFLOADS, [(1, 1, 1), (2, 2, 1), (2, 2, 2)], ["per_step", "per_microbatch"]
            )
        ),
    ],
    ids=str,
)
def test_offloaded_training_matches_transformers(offload, mesh, reduction, precision, tmp_path):
    settings = {"reduction": reduction, "precision": precision, "model": ONE_LAYER}
    case = small(offload, tmp_path, mesh=mesh, **settings)
    errors = measure(case)
    print(f"{case!s:84} {errors}")
    if precision == "fp32":
        assert errors.within(1e-5), errors
    else:
        assert errors.loss < 1e-3, errors


@on_nvme
@pytest.mark.parametrize(
    ("pipelined", "buffers"),
    [
        pytest.param(["pipeline_read"], 8, marks=pytest.mark.slow),
        pytest.param(["pipeline_write"], 8, marks=pytest.mark.slow),
        (["pipeline_read", "pipeline_write"], 12),
    ],
    ids=["read", "write", "both"],
)
def test_overlapped_reads_and_writes_match_transformers(pipelined, buffers, tmp_path):
    zero = {f"offload_optimizer.{name}": True for name in pipelined} | {"sub_group_size": 8000}
    zero |= {"offload_optimizer.buffer_count": buffers}
    sizes = {"batch": 4, "microbatches": 1, "model": {"num_hidden_layers": 2}}
    errors = measure(small("nvme", tmp_path, zero, **sizes))
    assert errors.within(1e-5), errors


@contextmanager
def unaligned_gradients():
    swapper = nvme._Swapper
    with (
        patch.object(nvme, "align_gradients", lambda: None),
        patch.object(
            swapper, "_adjust_for_misaligned_lengths", swapper._adjust_for_misaligned_lengths
        ),
    ):
        yield


@on_nvme
@unpatched
def test_unaligned_gradients_are_not_read_back(tmp_path):
    """DeepSpeed steps by what its buffer held before, without a word."""
    errors = measure(small("nvme", tmp_path), unaligned_gradients, run_locally)
    print(errors)
    assert errors.weight > 1e-3, errors


@contextmanager
def point_into_the_buffer():
    with patch.object(nvme, "copy_out_of_buffers", lambda: None):
        yield


@on_nvme
@unpatched
def test_recomputed_layers_see_other_weights_without_the_copy(tmp_path):
    """Of a rank that is alone in its group, with activation checkpointing of whole layers."""
    case = small("param-nvme", tmp_path, checkpointing="full")
    assert measure(case).within(1e-5)
    errors = measure(case, point_into_the_buffer, run_locally)
    print(errors)
    assert errors.grad_norm > 1e-2, errors


def use_folder_itself(nvme_path, mesh, setting):
    return Path(nvme_path)


def train_first_of_two(rank, case, reference, in_one_folder):
    """A second model is built while the first one trains."""
    if in_one_folder:
        swap.make_folder = use_folder_itself
    first = Trainer(case)
    second = Trainer(case)
    deviations = first.compare(reference)
    second.close()
    first.close()
    return deviations


@on_nvme
def test_two_engines_do_not_share_files(tmp_path):
    case = small("param-nvme", tmp_path, mesh=(1, 2, 1), **SMALLEST)
    results = run_locally(train_first_of_two, 2, case, case.reference, False)
    assert errors_of(case.config, results).within(1e-5)


@on_nvme
@unpatched
def test_two_engines_in_one_folder_fail(tmp_path):
    case = small("param-nvme", tmp_path, mesh=(1, 2, 1), **SMALLEST)
    with pytest.raises(RankFailed):  # the second one's start removes the first one's files
        run_locally(train_first_of_two, 2, case, case.reference, True, quiet=True)


def files_and_memory(rank, case):
    """Return the folders, the sizes of their files, elements, bytes in memory, and swappers."""
    trainer = Trainer(case)
    trainer.run()
    folders = [str(folder) for folder in swap._locks]
    files = [path for f in folders for path in Path(f).rglob("*.swp")]
    sizes = {path.name: path.stat().st_size for path in files}
    elements = sum(h.parameter.ds_tensor.ds_numel for h in trainer.engine.held)
    held = memory_bytes(trainer.engine)
    swappers = {id(p.nvme_swapper) for p in trainer.engine._module.parameters()}
    trainer.engine.close()
    return folders, sizes, elements, held, len(swappers)


@on_nvme
def test_offloaded_state_is_not_in_memory_and_files_are_removed(tmp_path):
    """The placeholders share the buffers of the stage."""
    case = small("nvme+param-nvme", tmp_path, mesh=(1, 2, 1), tied=False, **SMALLEST)
    seen = set()
    ranks = run_locally(files_and_memory, 2, case)
    for rank, (folders, sizes, elements, held, swappers) in enumerate(ranks):
        assert swappers == 1
        on_disk = {"parameters": 0, "gradients": 0, "all": sum(sizes.values())}
        for name, size in sizes.items():
            if "_param" in name:
                on_disk["parameters"] += size
            if "_gradient" in name:
                on_disk["gradients"] += size
        print(f"rank {rank}: {elements} elements; on disk {on_disk}; in memory {held}")
        assert len(folders) == 2 and not seen & set(folders)
        seen |= set(folders)
        # Biases and norms are too small to be swapped.
        assert on_disk["parameters"] > 0.8 * 4 * elements
        assert held["parameters"] < 0.2 * 4 * elements
        assert sum("exp_avg" in name for name in sizes) == 2
        assert held["optimizer"] < 0.2 * 12 * elements
        assert held["swap"] > 0
    assert os.listdir(tmp_path) == []


@on_nvme
def test_parameters_stay_in_host_memory_up_to_max_in_cpu(tmp_path):
    in_memory = {"offload_param.max_in_cpu": 10**6}
    case = small("param-nvme", tmp_path, in_memory, mesh=(1, 2, 1), **SMALLEST)
    for _, _, elements, held, _ in run_locally(files_and_memory, 2, case):
        assert held["parameters"] >= 4 * elements


def test_leftovers_of_a_killed_run_are_removed_by_the_next(tmp_path):
    dead = tmp_path / "parallel3d-dead"
    alive = tmp_path / "parallel3d-alive"
    others = tmp_path / "somebody-elses"
    for folder in (dead, alive, others):
        folder.mkdir()
        (folder / "lock").write_text("")
        (folder / "a.swp").write_text("data")
    with open(alive / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_locally(make_and_remove, 2, str(tmp_path))
        assert sorted(os.listdir(tmp_path)) == ["parallel3d-alive", "somebody-elses"]
    run_locally(make_and_remove, 1, str(tmp_path))
    assert os.listdir(tmp_path) == ["somebody-elses"]


def make_and_remove(rank, path):
    mesh = Mesh(dp=int(os.environ["WORLD_SIZE"]))
    folder = swap.make_folder(path, mesh, "nvme_path")
    assert (folder / "lock").exists()
    mesh.barrier()
    swap.remove_folders()
    assert not folder.exists()


def build_on(rank, case, bad_rank=None):
    if rank == bad_rank:

        def no_headers(builder, verbose=False):
            raise RuntimeError("libaio.h: no such file")

        op_builds.AsyncIOBuilder.load = no_headers
    Trainer(case)


@on_nvme
@pytest.mark.parametrize("offload", ["nvme", pytest.param("param-nvme", marks=pytest.mark.slow)])
def test_missing_folder_is_a_config_error(offload, tmp_path):
    setting = "offload_param" if "param" in offload else "offload_optimizer"
    expected = rf'zero_optimization.{setting}.nvme_path = ".*nowhere": rank 0 cannot write there'
    case = small(offload, tmp_path / "nowhere", mesh=(1, 2, 1), model=ONE_LAYER)
    with pytest.raises(RankFailed, match=expected) as caught:
        run_locally(build_on, 2, case)
    assert "ConfigError" in str(caught.value)


@on_nvme
def test_missing_library_is_an_error_that_names_the_package(tmp_path):
    with pytest.raises(RankFailed, match=r"libaio.h: no such file") as caught:
        run_locally(build_on, 2, small("nvme", tmp_path, mesh=(1, 2, 1), model=ONE_LAYER), 1)
    assert "ConfigError" in str(caught.value) and "libaio-dev" in str(caught.value)
