"""Stragglers are the ranks far from the median rank, and tables of phases hold what each rank or group took."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.saves import small
from treeckpt._core.format.timings import Host, Span, Timings
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import BoxLayout, Mesh, MeshLayout, Replicate
from treeckpt._inspect.profile import LATE_CALL, SpanColumns, profile_of
from treeckpt._inspect.timing_report import (
    RankGrouping,
    Straggler,
    find_stragglers,
    group_phase_matrix,
    phase_matrix,
    rank_groupings,
)

MS = 10**6


def timings_of(*spans):
    return Timings("0" * 16, 1, 64, tuple(Span(*span) for span in spans))


def matrix_of(*spans):
    return phase_matrix(SpanColumns.of(timings_of(*spans)))


def stragglers_of(*spans):
    timings = timings_of(*spans)
    return find_stragglers(profile_of(timings), phase_matrix(SpanColumns.of(timings)))


def slow_writers(*times):
    """The (rank, phase) of the stragglers among ranks that write for these nanoseconds."""
    return [(s.rank, s.phase) for s in stragglers_of(*(("write", rank, 0, ns) for rank, ns in enumerate(times)))]


BOTH = [(3, ""), (3, "write")]
"""Rank 3 in the phase of writing, which is all of its work."""


# the table of ranks and phases ----------------------------------------------------------------------------------------
@st.composite
def overlapping(draw):
    names = st.sampled_from(["save", "write", "hash", "agree"])
    spans = st.tuples(names, st.sampled_from([0, 2, 7]), st.integers(0, 20), st.integers(0, 9))
    return [(name, rank, start, start + n) for name, rank, start, n in draw(st.lists(spans, max_size=10))]


@given(overlapping())
def test_the_matrix_counts_each_nanosecond_of_a_phase_once(spans):
    matrix = matrix_of(*spans)
    ranks = sorted({rank for _, rank, *_ in spans})
    assert matrix.ranks.tolist() == ranks
    firsts = {name: min(s[2] for s in spans if s[0] == name) for name, *_ in spans if name != "save"}
    assert [firsts[name] for name in matrix.phases] == sorted(firsts.values())
    assert set(matrix.phases) == set(firsts)
    for row, rank in enumerate(ranks):
        for column, name in enumerate(matrix.phases):
            mine = [s for s in spans if s[:2] == (name, rank)]
            covered = {n for s in mine for n in range(s[2], s[3])}
            assert matrix.times[row, column] == (len(covered) if mine else -1)
            assert matrix.slowest[row, column] == rank


def test_a_matrix_shows_the_first_512_phases():
    matrix = matrix_of(*((f"p{n}", 0, n, n + 1) for n in range(600)))
    assert matrix.phases == tuple(f"p{n}" for n in range(512)) and matrix.times.shape == (1, 512)


def test_a_group_is_as_slow_as_its_slowest_rank_in_each_phase():
    matrix = matrix_of(
        ("write", 2, 0, 9), ("hash", 2, 9, 10), ("write", 3, 0, 4), ("hash", 3, 9, 16), ("write", 5, 0, 1)
    )
    grouping = RankGrouping("host", ("a", "idle", "b"), np.array([-1, 0, 2, 2, 1, 0, 1]))
    found, labels = group_phase_matrix(matrix, grouping)
    assert labels == ("a", "b") and found.phases == ("write", "hash")
    assert found.ranks.tolist() == [5, 2]
    assert found.times.tolist() == [[1, -1], [9, 7]] and found.slowest.tolist() == [[5, 5], [2, 3]]


def test_an_empty_matrix_has_no_groups():
    [grouping] = rank_groupings(2, (Host("a", encode_runs([0, 1])),), None)
    found, labels = group_phase_matrix(matrix_of(), grouping)
    assert labels == () and found.times.shape == found.slowest.shape == (0, 0)


# groups of ranks ------------------------------------------------------------------------------------------------------
def groupings_of(world, *meshes, hosts=()):
    layouts = tuple(MeshLayout(mesh, (Replicate(),) * len(mesh.shape)) for mesh in meshes)
    index = msgspec.structs.replace(small().index, layouts=(BoxLayout(()), *layouts))
    return [(g.name, g.labels, g.of.tolist()) for g in rank_groupings(world, hosts, index)]


def test_ranks_of_no_host_are_in_no_group():
    hosts = (Host("a", encode_runs([3, 1])), Host("b", encode_runs([0])))
    assert groupings_of(5, hosts=hosts) == [("host", ("a", "b"), [1, 0, -1, 0, -1])]


def test_ranks_of_a_mesh_are_grouped_by_their_place_along_each_dimension():
    mesh = Mesh((2, 3), encode_runs([5, 4, 3, 0, 1, 2]), ("dp", "tp"))
    assert groupings_of(7, mesh) == [
        ("dp", ("dp 0", "dp 1"), [1, 1, 1, 0, 0, 0, -1]),
        ("tp", ("tp 0", "tp 1", "tp 2"), [0, 1, 2, 2, 1, 0, -1]),
    ]


def test_meshes_without_names_group_nothing():
    assert groupings_of(4, Mesh((4,), encode_runs(range(4)))) == []


def test_a_rank_has_its_place_in_the_largest_mesh_and_a_smaller_one_adds_other_ranks():
    large = Mesh((3,), encode_runs([0, 1, 2]), ("dp",))
    small_one = Mesh((2,), encode_runs([3, 0]), ("dp",))
    for meshes in ((large, small_one), (small_one, large)):
        assert groupings_of(4, *meshes) == [("dp", ("dp 0", "dp 1", "dp 2"), [0, 1, 2, 0])]


def test_of_meshes_of_one_size_that_of_more_dimensions_counts_first():
    flat, square = Mesh((4,), encode_runs([3, 2, 1, 0]), ("dp",)), Mesh((2, 2), encode_runs(range(4)), ("dp", "tp"))
    for meshes in ((flat, square), (square, flat)):
        assert groupings_of(4, *meshes) == [
            ("dp", ("dp 0", "dp 1"), [0, 0, 1, 1]),
            ("tp", ("tp 0", "tp 1"), [0, 1, 0, 1]),
        ]


def test_ranks_of_a_mesh_outside_of_the_world_are_left_out():
    assert groupings_of(2, Mesh((3,), encode_runs([2, 1, 0]), ("dp",))) == [
        ("dp", ("dp 0", "dp 1", "dp 2"), [2, 1]),
    ]  # fmt: skip


# stragglers -----------------------------------------------------------------------------------------------------------
def test_a_straggler_says_how_much_it_lost():
    found = stragglers_of(*(("write", rank, 0, ns * MS) for rank, ns in enumerate([10, 11, 9, 40, 10])))
    assert [(s.rank, s.phase, s.ns, s.median_ns) for s in found] == [
        (3, "", 40 * MS, 10 * MS), (3, "write", 40 * MS, 10 * MS),
    ]  # fmt: skip
    assert [s.score for s in found] == pytest.approx([0.6745 * 30] * 2)
    assert (found[0].lost_ns, found[0].times) == (30 * MS, 4)


def test_times_of_a_median_of_nothing_are_infinite():
    assert Straggler(0, "", 5, 0, 1.0).times == float("inf") and Straggler(0, "", 5, 2, 1.0).times == 2.5


def test_where_the_other_ranks_do_not_differ_the_score_is_infinite():
    found = stragglers_of(*(("write", rank, 0, ns * MS) for rank, ns in enumerate([10, 10, 10, 13])))
    assert [s.score for s in found] == [float("inf")] * 2


def test_a_straggler_is_slower_by_more_than_a_fifth():
    assert slow_writers(10 * MS, 10 * MS, 10 * MS, 12 * MS) == []
    assert slow_writers(10 * MS, 10 * MS, 10 * MS, 12 * MS + 1) == BOTH


def test_a_straggler_loses_a_millisecond_or_more():
    assert slow_writers(MS, MS, MS, 2 * MS - 1) == []
    assert slow_writers(MS, MS, MS, 2 * MS) == BOTH


@pytest.mark.parametrize(("late", "found"), [(0, [(3, "hash")]), (380 * MS, [(3, "hash")]), (420 * MS, [])])
def test_a_straggler_loses_a_hundredth_of_the_save_or_more(late, found):
    """Rank 3 hashes for 4 ms more than the others; rank 1 writes until `late`."""
    spans = [("hash", rank, 0, (1 + 4 * (rank == 3)) * MS) for rank in range(5)]
    spans += [("write", rank, 5 * MS, 10 * MS + late * (rank == 1)) for rank in range(5)]
    assert [(s.rank, s.phase) for s in stragglers_of(*spans) if s.phase == "hash"] == found


def test_a_straggler_has_a_score_above_three_and_a_half():
    """With a deviation of 6745 the scores are a ten-thousandth of the distance from the median."""
    base = 4 * MS
    assert slow_writers(base - 6745, base, base, base + 35_000) == []
    spread = [base - 674_500, base, base - 674_500]
    assert slow_writers(*spread, base + 3_500_000, base + 674_500, base + 674_500, base) == []
    assert slow_writers(*spread, base + 3_500_001, base + 674_500, base + 674_500, base) == BOTH


def test_the_median_of_an_even_number_of_ranks_is_a_time_that_a_rank_took():
    found = stragglers_of(*(("write", rank, 0, ns * MS) for rank, ns in enumerate([10, 12, 13, 90])))
    assert {s.median_ns for s in found} == {12 * MS}


def test_of_two_ranks_none_is_a_straggler():
    assert slow_writers(1, 90 * MS) == []
    assert slow_writers(MS, MS, 90 * MS) == [(2, ""), (2, "write")]


def test_ranks_without_a_phase_do_not_count_in_it():
    spans = [("write", rank, 0, 10 * MS) for rank in range(9)]
    assert stragglers_of(*spans, ("stage", 0, 0, 9 * MS), ("stage", 1, 0, MS)) == ()
    found = stragglers_of(*spans, *(("stage", rank, 0, MS) for rank in (0, 1)), ("stage", 7, 0, 9 * MS))
    assert [(s.rank, s.phase) for s in found] == [(7, "stage")]


@pytest.mark.parametrize("phase", ["agree", "gather", "wait", "barrier", "broadcast", "open", "publish"])
def test_what_is_waiting_or_the_coordinators_has_no_stragglers(phase):
    spans = [(phase, rank, 0, (90 if rank == 3 else 1) * MS) for rank in range(5)]
    assert stragglers_of(*spans) == ()


def test_a_rank_that_calls_save_later_than_the_others_is_a_straggler_though_it_works_as_fast():
    starts = [0, 1, 2, 90, 1]
    spans = [("save", rank, start * MS, (start + 10) * MS) for rank, start in enumerate(starts)]
    assert [(s.rank, s.phase, s.ns, s.median_ns) for s in stragglers_of(*spans)] == [(3, LATE_CALL, 90 * MS, MS)]


def test_the_largest_loss_comes_first_and_then_the_lowest_rank():
    spans = [("write", rank, 0, 10 * MS) for rank in range(8)] + [("hash", rank, 0, 10 * MS) for rank in range(8)]
    spans += [("write", 6, 10 * MS, 50 * MS), ("hash", 2, 10 * MS, 50 * MS), ("hash", 6, 60 * MS, 80 * MS)]
    assert [(s.rank, s.phase, s.lost_ns // MS) for s in stragglers_of(*spans)] == [
        (6, "", 60), (2, "", 40), (2, "hash", 40), (6, "write", 40), (6, "hash", 20),
    ]  # fmt: skip
