"""What `train.profile` writes: traces of real ranks on one clock, that tell what really ran."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel3d.config.parallel3d_block import ProfileConfig
from parallel3d.mesh.mesh import Peers
from parallel3d.schedule.draw import spans_from_json
from parallel3d.schedule.schedule import Action, add_sharding
from parallel3d.schedule.schedules import make_schedule
from parallel3d.train import profiler
from parallel3d.train.ending import DONE
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer
from tests.train.test_trainer import on_mesh, raw, run_on_rank  # noqa: F401

pytestmark = pytest.mark.gloo

CASE = Case(mesh=(2, 1, 1), schedule="v_shape", stages_per_rank=2, microbatches=2, steps=3)
SLACK = 300.0  # microseconds between the clocks of Python and torch


def refuse_to_read_events(profile):
    raise AssertionError("a run read the events of a profile, which takes minutes on a GPU")


def profile_on_rank(rank, directory):
    torch.autograd.profiler.profile._ensure_function_events = refuse_to_read_events
    trainer = Trainer(CASE)
    chosen = ProfileConfig(start=1, steps=2)
    recorder = profiler.Profiler(chosen, trainer.mesh, trainer.executor, run=Path(directory))
    for step, batch in enumerate(trainer.batches()):
        with recorder.around(SimpleNamespace(number=step)):
            trainer.executor.run(batch, step)
            trainer.engine.step(trainer.lr)
    recorder.finish()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a profiled training on two ranks, and the events of its timeline."""
    run = tmp_path_factory.mktemp("profiled")
    run_locally(profile_on_rank, 2, str(run))
    return run / "profile", events_in(run / "profile")


def own(events, rank):
    """The (name, start, end) of our own spans of a rank, in their order in the file."""
    lane = [e for e in events if (e["ph"], e["pid"], e["tid"]) == ("X", rank, 0)]
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in lane]


def test_each_rank_has_lane_of_steps_and_actions(written):
    _, events = written
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 (pp 0, dp 0, tp 0)", 1: "rank 1 (pp 1, dp 0, tp 0)"}
    schedule = add_sharding(make_schedule("v_shape", 2, 2, 2), "per_microbatch", True)
    for rank, program in enumerate(schedule.programs):
        spans = own(events, rank)
        actions = [str(action) for action in program]
        assert [name for name, *_ in spans] == ["step 1", *actions, "step 2", *actions]
        for first in (0, 1 + len(program)):
            (_, begin, end), *inside = spans[first : first + 1 + len(program)]
            assert begin - SLACK <= inside[0][1] and inside[-1][2] <= end + SLACK
            assert all(a[2] <= b[1] + 1 for a, b in pairwise(inside))
    assert min(begin for rank in (0, 1) for _, begin, _ in own(events, rank)) == 0


def test_torch_s_trace_has_each_action_with_its_work(written):
    """Autograd works within our backwards alone; matrices are multiplied in each forward."""
    folder, events = written
    for rank in (0, 1):
        trace = json.loads((folder / f"rank-{rank}.json").read_text())["traceEvents"]
        trace = [event for event in trace if event["ph"] == "X"]
        ranges = [e for e in trace if e["cat"] == "user_annotation" and e["name"][0].isdigit()]
        actions = [name for name, *_ in own(events, rank) if not name.startswith("step")]
        assert [event["name"] for event in ranges] == actions
        for kind, mark in (("F", "aten::mm"), ("B", "autograd::engine::evaluate_function")):
            spans = [
                (event["ts"], event["ts"] + event["dur"])
                for event in ranges
                if Action.parse(event["name"]).op == kind
            ]
            at = [event["ts"] for event in trace if event["name"].startswith(mark)]
            assert all(any(a <= middle <= b for middle in at) for a, b in spans), (rank, kind)
            if kind == "B":
                assert all(any(a <= middle <= b for a, b in spans) for middle in at)


def sent_before_used(events, ranks):
    """When each message among these ranks began to be sent, and when it was computed on."""
    sent = {}
    used = []
    for rank in ranks:
        step = ""
        for name, start, _ in own(events, rank):
            if name.startswith("step"):
                step = name
                continue
            action = Action.parse(name)
            if action.is_send:
                sent[step, action.other_end] = start
            elif action.is_compute:
                op = "RECV_F" if action.op == "F" else "RECV_B"
                used.append(((step, Action.parse(f"{action.stage}{op}{action[2]}")), start))
    received = [(sent[key], start) for key, start in used if key in sent]
    assert len(received) == len(sent)
    return received


def test_clocks_of_ranks_agree(written):
    """What a rank computes on starts after the other rank has begun to send it."""
    received = sent_before_used(written[1], (0, 1))
    assert received and all(before < after for before, after in received)


def test_files_of_each_rank_and_of_the_last_step(written):
    directory, events = written
    files = {path.name for path in directory.iterdir()}
    drawn = {"timeline.json", "timeline.svg", "spans.json"}
    assert files == {"rank-0.json", "rank-1.json", *drawn}
    schedule, spans = spans_from_json(json.loads((directory / "spans.json").read_text()))
    made = add_sharding(make_schedule("v_shape", 2, 2, 2), "per_microbatch", True)
    assert schedule == made
    last = own(events, 1)[-len(made.programs[1]) :]
    for (_, start, end), span in zip(last, spans[1], strict=True):
        assert end - start == pytest.approx((span.end - span.start) * 1e6, abs=2)
    picture = (directory / "timeline.svg").read_text()
    # Of 4 stages 2 forwards and backwards each, and a reduction.
    assert "v_shape: step 2, measured" in picture and picture.count("<title>") == 4 * 2 * 2 + 4


def test_another_nodes_clock_is_set_by_the_barriers(monkeypatch):
    """Ranks 0 and 1 share a clock, although they leave barriers apart; rank 2's is 5 s ahead."""

    def gather(text, aside):
        clock, ends, *mine = json.loads(text)
        far = [end + 5 for end in ends]
        far[0] += 60  # one barrier after which the node was slow
        others = [[clock, [end + 0.5 for end in ends]], ["another", far], ["another", []]]
        return [text, *(json.dumps([*other, *mine]) for other in others)]

    mesh = SimpleNamespace(
        barrier=lambda: None,
        coords=(0, 0, 0),
        messages=SimpleNamespace(gather_texts=gather),
        rank=0,
        replicas=Peers(None, 1, 0),
    )
    recorder = profiler.Profiler(ProfileConfig(start=0), mesh, None, run=Path("nowhere"))
    seen = profiler.RecordedStep(0, 100.0, 102.0, [("0F0", 100.5, 101.5)])
    recorder._steps = [seen]
    lanes = recorder._gather()
    assert [lane.ahead for lane in lanes] == pytest.approx([0, 0, 5, 5], abs=1e-4)
    assert lanes[2].spans()[0].start == pytest.approx(95.5, abs=1e-4)


def profile_chosen_ranks(rank, folder, mesh, ranks):
    """Profile one step on a mesh."""
    model = {"num_hidden_layers": 1}
    trainer = Trainer(Case(mesh=mesh, zero_stage=0, microbatches=1, steps=1, model=model))
    chosen = ProfileConfig(start=0, ranks=ranks)
    recorder = profiler.Profiler(chosen, trainer.mesh, trainer.executor, run=Path(folder))
    (batch,) = trainer.batches()
    with recorder.around(SimpleNamespace(number=0)):
        trainer.executor.run(batch, 0)
        trainer.engine.step(trainer.lr)
    return trainer.mesh.replicas.coord, recorder._torch is not None


def events_in(profile):
    return json.loads((profile / "timeline.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ((1, 2, 1), "auto"),
        *(pytest.param((1, 2, 2), r, marks=pytest.mark.slow) for r in ("auto", "all", [3])),
    ],
    ids=str,
)
def test_chosen_ranks_are_profiled(tmp_path, mesh, ranks):
    """By default one of each pipeline and tensor coordinate: those of dp 0."""
    every = range(2 * mesh[2])
    results = run_locally(profile_chosen_ranks, len(every), str(tmp_path), mesh, ranks)
    dp_coords, has_trace = zip(*results, strict=True)
    in_dp_0 = [rank for rank in every if dp_coords[rank] == 0]
    expected = {"auto": in_dp_0, "all": [*every]}.get(str(ranks), [3])
    assert [rank for rank in every if has_trace[rank]] == expected and len(in_dp_0) == mesh[2]
    folder = tmp_path / "profile"
    traces = {path.name for path in folder.glob("rank-*.json")}
    assert traces == {f"rank-{rank}.json" for rank in expected}
    assert {event["pid"] for event in events_in(folder)} == set(expected)


def profiled(raw, steps, start, **run):  # noqa: F811
    config = on_mesh(raw, 2, 1, 1, steps=30, profile={"start": start, "steps": steps})
    config["parallel3d"]["run"] |= run
    return config


@pytest.mark.slow  # by default a stopped run in test_trainer.py, and test_observers.py
def test_trainer_profiles_configured_steps(raw):  # noqa: F811
    config = profiled(raw, steps=1, start=2)
    config["parallel3d"]["train"]["steps"] = 4
    ranks = run_locally(run_on_rank, 2, config)
    directory = ranks[0][1].directory
    assert [ended for ended, _ in ranks] == [DONE] * 2 and len(ranks[0][1].lines) == 4
    events = json.loads((directory / "profile" / "timeline.json").read_text())["traceEvents"]
    for rank in (0, 1):
        assert [n for n, *_ in own(events, rank) if n.startswith("step")] == ["step 2"]
