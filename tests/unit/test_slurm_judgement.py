"""Tests that the campaign with Slurm notices what must not happen: steps that are lost, and lines that are printed."""

from __future__ import annotations

from campaigns.slurm.judgement import Note, count_lines, find_lines_of_ours, find_wrong_steps, next_steps, read_attempts


def notes(*lines: tuple[str, str, object]) -> list[Note]:
    return [Note(*line) for line in lines]


FIRST = notes(("1.0", "resumed", 0), ("1.0", "step", 10), ("1.0", "durable", 10), ("1.0", "step", 17))
STOPPED = [*FIRST, *notes(("1.0", "stopped", 17), ("1.0", "durable", 17), ("1.0", "left", 17))]


def test_after_a_stop_the_next_attempt_goes_on_from_that_very_step() -> None:
    assert next_steps(STOPPED, 10) == {17}
    assert find_wrong_steps([*STOPPED, Note("1.1", "resumed", 17)], 10) == []
    assert find_wrong_steps([*STOPPED, Note("1.1", "resumed", 10)], 10) == [
        "attempt 1.1 went on from 10, and not from one of [17]"
    ]


def test_after_a_cut_the_next_attempt_goes_on_from_the_newest_durable_step() -> None:
    assert next_steps(FIRST, 10) == {10}
    assert next_steps([*FIRST, Note("1.0", "step", 20)], 10) == {10, 20}  # its save may have become durable
    assert next_steps([*FIRST, Note("1.0", "stopped", 17)], 10) == {10, 17}
    assert len(find_wrong_steps([*FIRST, Note("1.1", "resumed", 0)], 10)) == 1
    assert len(find_wrong_steps([*FIRST, Note("1.1", "resumed", 20)], 10)) == 1


def test_a_stop_counts_only_for_the_attempt_after_it() -> None:
    again = [*STOPPED, *notes(("1.1", "resumed", 17), ("1.1", "step", 20), ("1.1", "durable", 20), ("1.1", "step", 25))]
    assert next_steps(again, 10) == {20}


def test_nodes_that_keep_their_memory_keep_what_is_complete_in_the_tier() -> None:
    local = [*FIRST, *notes(("1.0", "step", 20), ("1.0", "local", 20), ("1.0", "step", 23))]
    assert next_steps(local, 10, keeps_memory=True) == {20}
    assert next_steps(local, 10) == {10, 20}


def test_what_another_job_saves_while_an_attempt_loads_may_be_loaded_or_not() -> None:
    both = [*FIRST, *notes(("1.0", "step", 20), ("2.0", "loading", "run"), ("1.0", "durable", 20), ("1.0", "step", 21))]
    assert find_wrong_steps([*both, Note("2.0", "resumed", 10)], 10) == []
    assert find_wrong_steps([*both, Note("2.0", "resumed", 20)], 10) == []
    assert len(find_wrong_steps([*both, Note("2.0", "resumed", 0)], 10)) == 1


def test_an_attempt_has_an_end() -> None:
    attempts = read_attempts(
        [
            *STOPPED,
            *notes(("1.1", "resumed", 17), ("1.1", "step", 18)),
            *notes(("2.0", "resumed", 17), ("2.0", "step", 30), ("2.0", "superseded", "another job")),
            *notes(("3.0", "resumed", 17), ("3.0", "step", 60), ("3.0", "left", 60), ("3.0", "finished", "digest")),
        ]
    )
    assert [(attempt.name, attempt.last, attempt.end) for attempt in attempts] == [
        ("1.0", 17, "stopped"),
        ("1.1", 18, "cut"),
        ("2.0", 30, "superseded"),
        ("3.0", 60, "finished"),
    ]


OUTPUT = """
slurmstepd-n1: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-30T15:25:26 ***
W1130 15:25:26.096000 93 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal
[W1130 15:25:05.8 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^
torch.distributed.elastic.multiprocessing.api.SignalException: Process 93 got signal: 15
[rank1]: Traceback (most recent call last):
[rank1]:   File "/shared/train.py", line 8, in <module>
[rank1]: rankless.errors.RankFailedError: rank 0 has died
srun: error: n2: task 1: Exited with exit code 1
waiting for rank 0 while agreeing on the step to stop at for 10 s; timeout after 600 s
/shared/train.py:70: UserWarning: loaded 'step_10' and ignored other checkpoints
  start = checkpointer.resume()
"""


def test_every_line_that_is_not_known_to_be_of_others_counts() -> None:
    lines = find_lines_of_ours(OUTPUT)
    assert [line.split(":")[0].split(" ")[0] for line in lines] == ["[rank1]", "waiting", "/shared/train.py"]
    assert count_lines(lines) == 2  # what a rank says while it waits for a dead one is shown, and does not count
