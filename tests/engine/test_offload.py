"""Offload of optimizer and parameters, to the host and to NVMe, trains the same and cleans up."""

import fcntl
import os
from itertools import product
from pathlib import Path

import pytest

from parallel3d.config.deepspeed import ZeroConfig
from parallel3d.engine import operators, swap
from parallel3d.engine.quirks import nvme
from parallel3d.mesh.mesh import Mesh
from tests.engine import offloading
from tests.engine.offloading import changes
from tests.ranks import RankFailed, run_ranks
from tests.verify import parity
from tests.verify.parity import NO_THRESHOLDS, Case, compare

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("operators")]

SMALL = {"steps": 3, "batch": 16}
PIPELINE = Case(mesh=(2, 2, 1), **SMALL)
OFFLOADS = [
    "cpu", "nvme", "param-cpu", "param-nvme", "cpu+param-cpu", "cpu+param-nvme",
    "nvme+param-cpu", "nvme+param-nvme",
]  # fmt: skip


def measure(case, settings, take_away=offloading.nothing):
    return compare(case, run_ranks(offloading.train, case.world_size, case, settings, take_away))


@pytest.mark.parametrize(
    ("offload", "mesh", "reduction", "tied"),
    [
        ("nvme", (2, 1, 1), "per_step", True),
        ("param-nvme", (2, 1, 1), "per_microbatch", False),
        ("param-cpu", (1, 2, 1), "per_microbatch", True),
    ],
    ids=str,
)
def test_parity(offload, mesh, reduction, tied, tmp_path):
    case = Case(mesh=mesh, reduction=reduction, tied=tied, **SMALL)
    errors = measure(case, changes(offload, tmp_path))
    print(f"{offload:16} {case!s:68} {errors}")
    assert errors.within(1e-5), errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "mesh", "reduction", "precision"),
    list(
        product(
            OFFLOADS, [(1, 1, 1), (2, 2, 1), (2, 2, 2)],
            ["per_step", "per_microbatch"], ["bf16"],
        )
    ),
    ids=str,
)  # fmt: skip
def test_parity_in_full(offload, mesh, reduction, precision, tmp_path):
    case = Case(mesh=mesh, reduction=reduction, precision=precision, **SMALL)
    errors = measure(case, changes(offload, tmp_path))
    print(f"{offload:16} {case!s:68} {errors}")
    assert errors.within(1e-5) if precision == "fp32" else errors.loss < 1e-3, errors


@pytest.mark.parametrize("stage", [0, 2])
def test_the_optimizer_on_the_host_at_the_other_stages(stage):
    case = Case(mesh=(2, 2, 1), zero_stage=stage, offload="cpu", reduction="auto", **SMALL)
    errors = compare(case, run_ranks(parity.train_on_rank, 4, case))
    assert errors.within(1e-5), errors


@pytest.mark.parametrize(
    ("pipelined", "buffers"),
    [(["pipeline_read"], 8), (["pipeline_write"], 8), (["pipeline_read", "pipeline_write"], 12)],
    ids=["read", "write", "both"],
)
def test_parity_of_overlapped_reads_and_writes(pipelined, buffers, tmp_path):
    settings = changes("nvme", tmp_path, zero_options=NO_THRESHOLDS | {"sub_group_size": 8000})
    settings["optimizer_options"] |= dict.fromkeys(pipelined, True) | {"buffer_count": buffers}
    errors = measure(Case(**SMALL), settings)
    assert errors.within(1e-5), errors


def unaligned_gradients():
    nvme.align_gradients = lambda: None


def test_without_alignment_gradients_are_not_read_back(tmp_path):
    """DeepSpeed steps by what its buffer held before, without a word."""
    errors = measure(Case(**SMALL), changes("nvme", tmp_path), unaligned_gradients)
    print(errors)
    assert errors.weight > 1e-3, errors


def point_into_the_buffer():
    nvme.copy_out_of_buffers = lambda: None


def test_without_the_copy_recomputed_layers_see_other_weights(tmp_path):
    """Of a rank that is alone in its group, with activation checkpointing of whole layers."""
    case, settings = Case(checkpointing="full", **SMALL), changes("param-nvme", tmp_path)
    assert measure(case, settings).within(1e-5)
    errors = measure(case, settings, point_into_the_buffer)
    print(errors)
    assert errors.grad_norm > 1e-2, errors


def one_folder_for_all():
    swap.make_folder = lambda nvme_path, mesh, setting: Path(nvme_path)


def train_first_of_two(rank, case, settings, take_away):
    """A second model is built while the first one trains."""
    take_away()
    with offloading.use(settings):
        first = parity.Trainer(case)
        parity.Trainer(case)
        losses, norms = first.run()
    return losses, norms, first.weights()


def test_two_engines_do_not_share_files(tmp_path):
    case, settings = Case(mesh=(1, 2, 1), **SMALL), changes("param-nvme", tmp_path)
    results = run_ranks(train_first_of_two, 2, case, settings, offloading.nothing)
    assert compare(case, results).within(1e-5)
    with pytest.raises(RankFailed):  # the second one's start removes the first one's files
        run_ranks(train_first_of_two, 2, case, settings, one_folder_for_all, expect_hang=True)


def files_and_memory(rank, case, settings):
    with offloading.use(settings):
        trainer = parity.Trainer(case)
        trainer.run()
        folders = [str(folder) for folder in trainer.engine._folders]
        files = [path for f in folders for path in Path(f).rglob("*.swp")]
        sizes = {path.name: path.stat().st_size for path in files}
        elements = sum(h.parameter.ds_tensor.ds_numel for h in trainer.engine.held)
        held = trainer.engine.memory_bytes()
        trainer.engine.close()
    return folders, sizes, elements, held, os.listdir(Path(folders[0]).parent)


def test_what_lies_on_disk_does_not_lie_in_memory_and_is_removed(tmp_path):
    case = Case(mesh=(2, 2, 1), tied=False, **SMALL)
    seen = set()
    for rank, (folders, sizes, elements, held, _) in enumerate(
        run_ranks(files_and_memory, 4, case, changes("nvme+param-nvme", tmp_path))
    ):
        kinds = {"parameters": "_param", "optimizer": "_", "gradients": "_gradient"}
        on_disk = {k: sum(n for f, n in sizes.items() if part in f) for k, part in kinds.items()}
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


def test_parameters_kept_in_host_memory_up_to_max_in_cpu(tmp_path):
    settings = changes("param-nvme", tmp_path)
    settings["param_options"] |= {"max_in_cpu": 10**6}
    case = Case(mesh=(1, 2, 1), **SMALL)
    for _, _, elements, held, _ in run_ranks(files_and_memory, 2, case, settings):
        assert held["parameters"] >= 4 * elements


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    dead, alive = tmp_path / "parallel3d-dead", tmp_path / "parallel3d-alive"
    others = tmp_path / "somebody-elses"
    for folder in (dead, alive, others):
        folder.mkdir()
        (folder / "lock").write_text("")
        (folder / "a.swp").write_text("data")
    with open(alive / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_ranks(make_and_remove, 2, str(tmp_path))
        assert sorted(os.listdir(tmp_path)) == ["parallel3d-alive", "somebody-elses"]
    run_ranks(make_and_remove, 1, str(tmp_path))
    assert os.listdir(tmp_path) == ["somebody-elses"]


def make_and_remove(rank, path):
    mesh = Mesh(1, int(os.environ["WORLD_SIZE"]), 1)
    folder = swap.make_folder(path, mesh, "nvme_path")
    assert (folder / "lock").exists()
    mesh.barrier()
    swap.remove_folders()
    assert not folder.exists()


def build_on(rank, case, settings, bad_rank=None):
    if rank == bad_rank:

        def no_headers(builder, verbose=False):
            raise RuntimeError("libaio.h: no such file")

        operators.AsyncIOBuilder.load = no_headers
    offloading.trainer(case, settings)


@pytest.mark.parametrize("offload", ["nvme", "param-nvme"])
def test_a_folder_that_is_not_there_is_an_error_of_the_config(offload, tmp_path):
    setting = "offload_param" if "param" in offload else "offload_optimizer"
    says = rf'zero_optimization.{setting}.nvme_path = ".*nowhere": cannot be written on rank 0'
    with pytest.raises(RankFailed, match=says) as caught:
        run_ranks(build_on, 2, Case(mesh=(1, 2, 1)), changes(offload, tmp_path / "nowhere"))
    assert "ConfigError" in str(caught.value)


def test_a_missing_library_is_an_error_on_all_ranks_that_names_the_package(tmp_path):
    case, settings = Case(mesh=(1, 2, 1)), changes("nvme", tmp_path)
    with pytest.raises(RankFailed, match=r"libaio.h: no such file \(on 1 of 2 ranks\)") as caught:
        run_ranks(build_on, 2, case, settings, 1)
    assert "ConfigError" in str(caught.value) and "libaio-dev" in str(caught.value)


def test_a_buffer_that_is_too_small_is_named(tmp_path):
    settings = changes("param-nvme", tmp_path)
    settings["param_options"] |= {"buffer_size": 2048}
    with pytest.raises(RankFailed, match=r"buffer_size = 2048: a parameter's shard has 3072"):
        run_ranks(build_on, 1, Case(), settings)


NVME = {"device": "nvme", "nvme_path": "/nvme"}


@pytest.mark.parametrize(
    ("zero", "says"),
    [
        (
            {"offload_param": NVME, "stage3_param_persistence_threshold": 10**6},
            "keeps parameters unsharded that offload_param puts on NVMe; use at most 262144",
        ),
        (
            {"offload_param": NVME, "offload_optimizer": NVME | {"fast_init": True}},
            "starts from wrong weights",
        ),
        ({"offload_optimizer": NVME | {"pipeline_read": True}}, "use 8 or more"),
        (
            {"offload_optimizer": NVME | {"pipeline_read": True, "pipeline_write": True}},
            "use 12 or more",
        ),
    ],
)
def test_settings_that_deepspeed_gets_wrong_are_refused(zero, says):
    with pytest.raises(ValueError, match=says):
        ZeroConfig(stage=3, **zero)


def test_without_the_refusal_a_fast_start_is_wrong(tmp_path):
    settings = changes("nvme+param-nvme", tmp_path)
    settings["optimizer_options"] |= {"fast_init": True}
    settings["param_options"] |= {"buffer_size": 100_000}
    errors = measure(Case(**SMALL), settings)
    assert errors.weight > 1e-2, errors


@pytest.mark.parametrize("buffers", [4, 7])
def test_without_the_refusal_reading_ahead_runs_out_of_buffers(buffers, tmp_path):
    settings = changes("nvme", tmp_path, zero_options=NO_THRESHOLDS | {"sub_group_size": 8000})
    settings["optimizer_options"] |= {"pipeline_read": True, "buffer_count": buffers}
    with pytest.raises(RankFailed, match="AssertionError"):
        measure(Case(**SMALL), settings)


def test_without_the_refusal_unsharded_parameters_are_not_there(tmp_path):
    settings = changes("param-nvme", tmp_path)
    settings["zero_options"] = NO_THRESHOLDS | {"stage3_param_persistence_threshold": 10**5}
    with pytest.raises(RankFailed, match=r"same dtype|size|shape"):
        measure(Case(mesh=(1, 2, 1), **SMALL), settings, offloading.nothing)


def test_the_ballast_shares_the_stages_buffers(tmp_path):
    case, settings = Case(**SMALL), changes("param-nvme", tmp_path)
    assert run_ranks(swappers, 1, case, settings) == [1]


def swappers(rank, case, settings):
    trainer = offloading.trainer(case, settings)
    return len({id(p.nvme_swapper) for p in trainer.engine._module.parameters()})
