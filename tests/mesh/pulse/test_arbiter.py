"""Which rank the arbiter blames, by the test's own clock."""

import pytest

from parallel3d.mesh.pulse.arbiter import GONE, RUNS, STOPPED, TRACED, Arbiter, Limits, Report

pytestmark = pytest.mark.pure

LIMIT = 300.0


class Play:
    """Three ranks on two machines that report every two seconds to an arbiter."""

    def __init__(self):
        self.arbiter = Arbiter(Limits())
        self.now = 1000.0
        self.reports = {}
        for rank, host in enumerate(["a", "a", "b"]):
            self.reports[rank] = Report(host, RUNS, f"{rank}F0 of step 7", 1.0, False, LIMIT)

    def set(self, rank, **values):
        self.reports[rank] = self.reports[rank]._replace(**values)
        self.arbiter.hear(rank, self.reports[rank])

    def run(self, seconds, silent=()):
        """Let time pass while some are silent; return when a rank was blamed, which, and why."""
        for tick in range(round(2 * seconds)):
            if tick % 4 == 0:
                for rank, report in self.reports.items():
                    if rank not in silent:
                        self.arbiter.hear(rank, report)
            self.now += 0.5
            finding = self.arbiter.check(self.now)
            if finding.text:
                assert finding.code == 1
                return tick / 2, finding.blamed, finding.text
        return None


@pytest.fixture
def play():
    play = Play()
    assert play.run(10) is None
    return play


def test_dead_rank_is_named_with_its_activity(play):
    play.set(1, state=GONE)
    line = 'rank 1 on a died at "1F0 of step 7": killed, or crashed'
    assert play.run(1) == (0, 1, line)
    assert play.arbiter.speakers(1) == {0, 2}  # one of each machine


def test_rank_lost_with_its_sentry_is_dead(play):
    play.arbiter.lose(0)
    seconds, blamed, text = play.run(1, silent=[0])
    assert (seconds, blamed) == (0, 0) and "and its sentry with it" in text
    assert play.arbiter.speakers(0) == {1, 2}


@pytest.mark.parametrize("code", [0, 3])
def test_finished_rank_is_not_a_loss(play, code):
    play.set(1, state=GONE, left=code)
    play.arbiter.lose(1)
    play.arbiter.lose_store()  # it was the last that kept it
    assert play.run(100) is None


def test_error_that_only_some_ranks_have_is_reported(play):
    play.set(1, state=GONE, left=2)
    assert play.run(5) is None
    seconds, blamed, text = play.run(10)
    assert (4 <= seconds <= 5, blamed) == (
        True,
        1,
    ) and 'ended with exit code 2 at "1F0 of step 7", and others' in text


def test_rank_that_fails_alone_gives_its_reason(play):
    play.set(2, left=1, reason="ValueError: no")
    line = 'rank 2 on b failed at "2F0 of step 7": ValueError: no'
    assert play.run(1) == (0, 2, line)


def test_requested_stop_of_a_rank_ends_all_ranks_well(play):
    play.set(1, left=3, reason="was asked")
    assert play.arbiter.check(play.now) == ("rank 1 on a was asked", 1, 3)
    play.set(2, state=GONE)  # for which a launcher ends the others
    assert play.arbiter.check(play.now).code == 1


def test_stopped_rank_has_twenty_seconds(play):
    play.set(2, state=STOPPED)
    assert play.run(19) is None
    play.set(2, state=RUNS)
    assert play.run(5) is None
    play.set(2, state=STOPPED)
    seconds, blamed, text = play.run(30)
    assert (19 <= seconds <= 21, blamed) == (True, 2) and "stopped (SIGSTOP) for 20 s" in text


def test_no_rank_is_accused_if_all_are_stopped(play):
    for rank in range(3):
        play.set(rank, state=STOPPED)
    assert play.run(1000) is None
    play.set(0, state=RUNS)  # they wake one by one
    assert play.run(5) is None


def test_traced_rank_is_not_a_fault(play):
    play.set(1, state=TRACED)
    assert play.run(1000) is None


def test_time_in_a_debugger_does_not_count_as_delay(play):
    play.set(0, doing="1F0, waiting", since=2.0, waits=True)
    assert play.run(200) is None
    play.set(1, state=TRACED)
    assert play.run(1000) is None
    play.set(1, state=RUNS)
    seconds, _, text = play.run(400)
    assert 98 <= seconds <= 102 and "rank 0 waited (300 s are allowed)" in text


def test_long_computation_is_not_a_fault(play):
    assert play.run(4000) is None


def test_silent_machine_is_named(play):
    seconds, blamed, text = play.run(30, silent=[2])
    assert (17 <= seconds <= 20, blamed) == (True, 2)
    assert text.startswith("rank 2 on b has been silent for 20 s")


def test_machine_that_slept_accuses_no_rank(play):
    """With all that is on it; its clock may have gone on."""
    play.set(0, waits=True)
    for _ in range(3):
        play.now += 10_000
        assert play.run(15) is None


def test_lost_store_is_named(play):
    play.arbiter.store = "master:29500"
    play.arbiter.lose_store()
    seconds, blamed, text = play.run(30)
    assert (2 <= seconds <= 3, blamed) == (True, None)
    assert text == "the store of the process group at master:29500 is gone: its host process died"


def test_late_rank_is_the_one_that_does_not_wait(play):
    play.set(0, doing="1F0, waiting", since=2.0, waits=True)
    play.run(50)
    play.set(1, since=2.0)
    play.set(2, doing="a gather", since=3.0, waits=True)
    seconds, blamed, text = play.run(400)
    assert blamed == 1 and 249 <= seconds <= 251
    line = 'rank 1 on a is late: at "1F0 of step 7" for 250 s; rank 0 waited (300 s are allowed)'
    assert text == line


def test_first_waiting_rank_is_named_if_all_wait(play):
    play.set(1, since=2.0, waits=True)
    play.run(50)
    for rank in (0, 2):
        play.set(rank, since=3.0, waits=True)
    assert play.run(400)[1] == 1


def test_without_a_limit_nobody_is_late(play):
    """Before the first step is done: somebody compiles, or prepares a corpus."""
    for rank in range(3):
        play.set(rank, limit=0.0, waits=rank > 0, since=2.0)
    assert play.run(3000) is None


@pytest.mark.parametrize("end", [{"state": GONE}, {"left": 1, "reason": "Timed out"}])
def test_rank_ended_by_a_timeout_has_waited_for_another(play, end):
    """NCCL's watchdog aborts a process that waits where nothing of ours sees it; gloo's raises."""
    play.set(0, since=5.0)
    play.set(2, since=2.0)
    play.run(310)
    play.set(0, since=6.0)
    play.set(1, **end)
    _, blamed, text = play.run(1)
    assert blamed == 1
    assert '; rank 2 on b has stood still for 310 s at "2F0 of step 7"' in text


def test_rank_that_misses_a_failed_collective_is_late(play):
    """DeepSpeed's collectives do not say that they wait; a rank knows once one has failed."""
    for rank in range(3):
        play.set(rank, limit=20.0, since=2.0)
    assert play.run(35) is None
    play.set(0, limit=20.0, since=2.0, waits=True)
    assert play.run(2) is None  # rank 2 has noticed as well, but its report is still to come
    play.set(2, limit=20.0, since=2.0, waits=True)
    seconds, blamed, text = play.run(3)
    assert (seconds <= 1, blamed) == (True, 1)
    assert 'rank 1 on a is late: at "1F0 of step 7" for 3' in text and "ranks 0, 2 waited" in text


def stand(play, rank, text, computes=False, **host):
    """Let a rank's device be in an action from now on, and its host in another."""
    play.set(rank, device=text, device_since=play.now, computes=computes, since=play.now, **host)


GATHER = {"doing": "gathering numbers of all ranks", "waits": True}
LAUNCH = {"doing": "1F3 of step 7", "waits": False}  # the queue of kernels is full
IN_COMPUTE = ("2F0 of step 7", True)
AT_RECEIVE = ("1F2 of step 7, waiting for R1F3", False)
AT_REDUCTION = ("reducing the gradients of step 7", False)


@pytest.mark.parametrize("victim", [GATHER, LAUNCH])
def test_device_in_a_compute_is_blamed_not_the_hosts_that_wait(play, victim):
    """Hosts run ahead of their devices: the first to arrive at the step's end was blamed."""
    stand(play, 0, *AT_REDUCTION, **GATHER)
    play.run(1)
    stand(play, 1, *AT_RECEIVE, **victim)
    play.run(1)
    stand(play, 2, *IN_COMPUTE, **GATHER)
    seconds, blamed, text = play.run(400)
    assert (296 <= seconds <= 301, blamed) == (True, 2)
    assert text.startswith('rank 2 on b is late: its device stands at "2F0 of step 7" for 2')
    assert text.endswith("; the devices of ranks 0, 1 wait")


@pytest.mark.parametrize("host", [GATHER, LAUNCH])
def test_link_is_blamed_if_no_device_computes(play, host):
    for rank in range(3):
        stand(play, rank, *AT_RECEIVE, **host)
    _, blamed, text = play.run(400)
    assert blamed is None
    assert text.startswith("the devices of ranks 0, 1, 2 stand at ")
    assert text.endswith("the link between them is to blame")


def test_tensor_parallel_peers_are_named_together(play):
    """They wait for each other inside a compute."""
    stand(play, 0, *AT_RECEIVE, **GATHER)
    for rank in (1, 2):
        stand(play, rank, *IN_COMPUTE, **LAUNCH)
    _, blamed, text = play.run(400)
    assert blamed is None and text.startswith("the devices of ranks 1, 2 stand at ")
    assert text.endswith("one of them, or the link between them is to blame")


def test_late_host_is_blamed_before_the_device_of_its_peer(play):
    stand(play, 0, *AT_RECEIVE, **GATHER)
    stand(play, 1, *IN_COMPUTE, **LAUNCH)
    stand(play, 2, "", doing="the batch of step 8", waits=False)
    _, blamed, text = play.run(400)
    assert blamed == 2 and 'at "the batch of step 8" for ' in text


def test_devices_that_move_are_no_fault(play):
    for moment in range(20):
        for rank in range(3):
            play.set(rank, device=f"1F{moment}", device_since=play.now, **GATHER)
        assert play.run(100) is None
