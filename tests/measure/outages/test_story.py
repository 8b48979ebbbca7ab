"""What is told of a training in which processes died, from made-up lines of its workers; and the picture of it."""

import pytest

from p3.measure.outages.story import Line, Story


def lines(*rows):
    """Of (at, step, ranks)."""
    return [Line(at, rank, step, len(ranks)) for at, step, ranks in rows for rank in ranks]


ALL = (0, 1)


def test_nothing_dies():
    story = Story("undisturbed", 2, lines(*((10.0 + step, step, ALL) for step in range(6))), [])
    assert story.begin == 10.0 and story.seconds == 5.0 and story.step_s == 1.0
    assert story.rate == pytest.approx(11 / 5) and story.pauses() == []


def test_who_is_missing_does_no_steps_and_the_others_hardly_wait():
    rows = [(0.0, 0, ALL), (1.0, 1, ALL), (2.5, 2, (0,)), (3.5, 3, (0,)), (4.5, 4, ALL), (5.5, 5, ALL)]
    story = Story("continue", 2, lines(*rows), [(1.2, "worker 1")])
    assert story.pauses() == [pytest.approx(0.5)] and story.restarts == 0
    assert len(story.completions()) == 10


def test_what_is_done_again_counts_once_when_it_was_done_last():
    rows = [(0.0, 0, ALL), (1.0, 1, ALL), (2.0, 2, ALL), (3.0, 3, ALL), (13.0, 1, ALL), (14.0, 2, ALL), (15.0, 3, ALL)]
    story = Story("restarts", 2, lines(*rows), [(3.5, "worker 0")])
    assert story.completions() == [0.0, 0.0, 13.0, 13.0, 14.0, 14.0, 15.0, 15.0]
    assert story.pauses() == [pytest.approx(9.0)]
    assert story.rate == pytest.approx(7 / 15) and story.restarts == 1


def test_a_step_spans_the_time_since_the_one_before_unless_its_worker_was_away():
    rows = [(0.0, 0, ALL), (1.0, 1, ALL), (2.0, 2, ALL), (3.0, 3, (0,)), (4.5, 4, (0,)), (20.0, 5, ALL), (21.0, 6, ALL)]
    spans = Story("continue", 2, lines(*rows), [(2.5, "worker 1")]).spans()
    assert spans == [(-1.0, 0.0)] * 2 + [(0.0, 1.0)] * 2 + [(1.0, 2.0)] * 2 + [
        (2.0, 3.0), (3.0, 4.5), (17.0, 20.0), (17.0, 20.0), (20.0, 21.0), (20.0, 21.0)
    ]  # fmt: skip


def test_pauses_are_told_by_who_died():
    rows = [(0.0, 0, ALL), (1.0, 1, ALL), (2.5, 2, (0,)), (3.5, 3, ALL), (5.0, 4, ALL), (6.0, 5, ALL), (7.0, 6, ALL)]
    story = Story("continue", 2, lines(*rows), [(1.2, "worker 1"), (3.6, "server 0"), (5.5, "scheduler 0")])
    assert story.pauses() == pytest.approx([0.5, 0.5, 0.0])
    assert [story.pauses(role) for role in ("server", "scheduler")] == [pytest.approx([0.5]), pytest.approx([0.0])]


def test_processes_that_start_do_not_count():
    rows = [(0.0, 0, (0,)), (7.0, 0, (1,)), (8.0, 1, ALL), (9.0, 2, ALL)]
    assert Story("torchft", 2, lines(*rows), []).begin == 7.0


def test_a_picture_is_the_same_each_time(tmp_path):
    plot = pytest.importorskip("p3.measure.outages.plot")
    calm = Story("undisturbed", 2, lines(*((float(step), step, ALL) for step in range(20))), [])
    rows = [(float(step), step, ALL if step < 8 else (0,)) for step in range(20)]
    stories = [calm, Story("continue", 2, lines(*rows), [(7.5, "worker 1"), (9.5, "server 0")])]
    for name in ("a.svg", "b.svg"):
        plot.save(stories, "a title", str(tmp_path / name))
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (tmp_path / "b.svg").read_bytes()
    assert b"a title" in drawn and b"P3 goes on, others join: 69%" in drawn
    signs = [b"a %s is killed" % role in drawn for role in (b"worker", b"server", b"scheduler")]
    assert signs == [True, True, False]
