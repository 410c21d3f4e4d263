"""Retention: what stays, why, and that deciding again changes nothing."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt.errors import TreeckptError
from treeckpt.policy import (
    All,
    Best,
    EveryPeriod,
    EverySteps,
    Last,
    StepInfo,
    Steps,
    Total,
    best_among,
    best_of,
    check_policies,
    keep_text,
    kept,
    parse_keep,
    unmeasured,
)


@st.composite
def runs(draw):
    steps = sorted(draw(st.sets(st.integers(0, 200), max_size=12)))
    at, infos = 0, []
    for step in steps:
        at += draw(st.integers(0, 5) | st.integers(-1000, 1000)) * 10**9  # clocks jump
        metrics = draw(st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats() | st.just(1.0)))
        infos.append(StepInfo(step, at, metrics, draw(st.integers(0, 9)) == 0))
    return infos


VALID = [All(), Last(1), EverySteps(1), Steps((0, 7)), EveryPeriod(0), EveryPeriod(3600.5), Best("loss", 2, "max")]
VALID += [Total(2, including=Best("loss")), Total(5, including=Best("val loss:a", 4, "max"))]
INVALID = {
    "a count of 1 or more": [Last(0), Last(True), Best("loss", 0), Total(3, Best("loss", 0))],
    "the name of a metric": [Best(""), Total(3, Best(""))],
    "a number of steps, 1 or more": [EverySteps(0)],
    "steps, each 0 or more": [Steps((-1,)), Steps((True,))],
    "a number of seconds": [EveryPeriod(-1.0), EveryPeriod(math.inf), EveryPeriod(math.nan)],
    "policies that keep something": [Steps(())],
    "a policy Best in Total": [Total(3, including=Last(1)), Total(3, including=None)],
    "a count of 2 or more, as the newest stays too": [Total(1, including=Best("loss")), Total("3", Best("loss"))],
    "a count of 5 or more, as the newest stays too": [Total(4, including=Best("loss", 4))],
    "policies, or a number of checkpoints": [3],
}


@pytest.mark.parametrize("policy", VALID, ids=str)
def test_a_valid_policy_is_accepted_alone_and_beside_one_that_keeps_nothing(policy):
    check_policies([policy])
    check_policies([policy, Steps(())])


@pytest.mark.parametrize(
    "policy",
    [*VALID, Steps(tuple(range(0, 2500, 2))), EveryPeriod(1234567), EveryPeriod(86400.125), EveryPeriod(1e22)],
    ids=lambda policy: f"{policy}"[:40],
)
def test_a_policy_comes_back_whole_from_its_text(policy):
    assert parse_keep(keep_text([policy])) == (policy,)
    assert parse_keep(keep_text([policy, Last(2)])) == (policy, Last(2))


@pytest.mark.parametrize(
    ("expected", "policy"), [(text, policy) for text, found in INVALID.items() for policy in found]
)
def test_an_invalid_policy_is_refused_with_what_it_should_have(expected, policy):
    with pytest.raises(TreeckptError) as caught:
        check_policies([All(), policy] if policy != Steps(()) else [policy])
    assert caught.value.expected == expected


BEST = st.builds(
    Best, st.sampled_from(["loss", "accuracy", "none"]), st.integers(1, 3), st.sampled_from(["min", "max"])
)
POLICIES = st.one_of(
    st.builds(Last, st.integers(-1, 4)),
    st.builds(EverySteps, st.integers(0, 50)),
    st.builds(EveryPeriod, st.floats(0, 10)),
    st.builds(Steps, st.lists(st.integers(0, 200), max_size=3).map(tuple)),
    st.just(All()),
    BEST,
    st.builds(lambda more, best: Total(best.count + more, best), st.integers(1, 3), BEST),
)


@given(runs(), st.lists(POLICIES, max_size=3), st.randoms())
def test_deciding_again_after_deleting_changes_nothing(infos, policies, order):
    stays = kept(infos, policies)
    rest = [info for info in infos if info.step in stays]
    order.shuffle(rest)
    assert kept(rest, policies) == stays


@given(runs(), st.lists(POLICIES, max_size=3), POLICIES)
def test_one_more_policy_never_deletes_more(infos, policies, more):
    assert kept(infos, policies).keys() <= kept(infos, [*policies, more]).keys()


@given(runs(), st.lists(POLICIES, max_size=3))
def test_the_newest_and_the_pinned_always_stay_and_everything_has_a_reason(infos, policies):
    stays = kept(infos, policies)
    assert all(info.step in stays for info in infos if info.pinned)
    assert not infos or "newest" in stays[infos[-1].step]
    assert list(stays) == sorted(stays)
    assert all(stays.values())


STEPS = [
    StepInfo(step, step * 10**9, {"loss": loss})
    for step, loss in [(0, 5.0), (10, 1.0), (20, math.nan), (30, 1.0), (40, 3.0)]
]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (Last(2), [30, 40]),
        (Last(0), [40]),
        (Last(-1), [40]),
        (EverySteps(20), [0, 20, 40]),
        (EveryPeriod(15), [0, 20, 40]),
        (EveryPeriod(25), [0, 30, 40]),
        (Best("loss"), [30, 40]),
        (Best("loss", 2), [10, 30, 40]),
        (Best("loss", 2, "max"), [0, 40]),
        (Best("loss", 9), [0, 10, 30, 40]),
        (Best("none"), [0, 10, 20, 30, 40]),
        (Total(2, Best("loss")), [30, 40]),
        (Total(3, Best("loss", mode="max")), [0, 30, 40]),
        (Total(3, Best("loss", 2)), [10, 30, 40]),
        (Total(4, Best("loss", 2)), [10, 20, 30, 40]),
        (Total(9, Best("loss")), [0, 10, 20, 30, 40]),
        (Total(2, Best("none")), [0, 10, 20, 30, 40]),
    ],
)
def test_each_policy_keeps_what_it_says(policy, steps):
    assert list(kept(STEPS, [policy])) == steps


@given(runs(), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_a_total_has_the_newest_the_best_and_no_more_than_its_count(infos, count, more, left):
    if left:
        infos = [msgspec.structs.replace(info, abandoned=True, sequence=info.step) for info in infos[:-1]] + infos[-1:]
    infos, total = [msgspec.structs.replace(i, pinned=False) for i in infos], Total(count + more, Best("loss", count))
    stays = kept(infos, [total])
    rated = best_of(infos, total.including)
    if rated:
        assert len(stays) == min(count + more, len(infos)) and infos[-1].step in stays
        present = [info.step for info in rated if not info.abandoned]
        assert stays.keys() >= set(present[:count])


def test_a_metric_inside_of_a_total_counts_as_that_of_a_best():
    total = Total(3, including=Best("lost"))
    assert best_among([Last(1), total, Best("a")]) == [Best("lost"), Best("a")]
    assert unmeasured(STEPS, [total]) == ["lost"]
    assert kept(STEPS, [Total(3, Best("loss", mode="max"))]) == {
        0: ("one of 3 in all, as one of the best 1 by loss",),
        30: ("one of 3 in all",),
        40: ("newest", "one of 3 in all"),
    }


@given(runs(), st.lists(POLICIES, max_size=3), st.data())
def test_damaged_ones_stay_and_change_nothing_about_the_others(infos, policies, data):
    bad = data.draw(st.sets(st.sampled_from([info.step for info in infos]))) if infos else set()
    marked = [msgspec.structs.replace(info, damaged=info.step in bad) for info in infos]
    stays = kept(marked, policies)
    sound = [info for info in infos if info.step not in bad]
    assert {step: why for step, why in stays.items() if step not in bad} == kept(sound, policies)
    assert all("counts for no policy" in stays[step][-1] for step in bad)


def test_reasons_are_named():
    infos = [*STEPS, StepInfo(41, 41, pinned=True)]
    assert kept(infos, [Last(1), Best("loss"), EverySteps(41)]) == {
        0: ("a multiple of 41 steps",),
        30: ("one of the best 1 by loss",),
        41: ("pinned", "newest", "one of the last 1", "a multiple of 41 steps"),
    }


def test_a_metric_that_no_checkpoint_has_keeps_all_until_one_has_it():
    infos = [StepInfo(1, 0), StepInfo(2, 0, {"loss": math.nan}), StepInfo(3, 0)]
    reason = "all are kept, as none has the metric 'loss'"
    assert kept(infos, [Last(1), Best("loss")]) == {
        1: (reason,),
        2: (reason,),
        3: ("newest", "one of the last 1", reason),
    }
    assert list(kept([*infos, StepInfo(4, 0, {"loss": 1.0})], [Last(1), Best("loss")])) == [4]


def test_it_is_named_where_something_stays_for_it_alone():
    infos = [StepInfo(1, 0, {"loss": 2.0, "acc": 0.5}), StepInfo(2, 0, {"loss": 1.0}), StepInfo(3, 0)]
    assert unmeasured(infos, [Last(1), Best("los"), Best("loss"), Best("ac", 2)]) == ["los", "ac"]
    assert unmeasured(infos, [Last(3), Best("los")]) == [], "they stay anyhow: it may still come"
    assert unmeasured(infos, [Best("acc")]) == unmeasured([], [Best("los")]) == []


def test_no_checkpoints_need_no_decision():
    assert kept([], [Last(3)]) == {}


@given(runs(), st.integers(1, 5), st.integers(-(10**12), 10**12))
def test_a_period_is_decided_once_whatever_comes_later_and_wherever_the_clock_jumps(infos, more, jump):
    policy = EveryPeriod(7)
    last = infos[-1] if infos else StepInfo(-1, 0)
    later = [StepInfo(last.step + n, last.created_ns + jump + n) for n in range(1, more + 1)]
    assert by_period([*infos, *later], policy)[: len(before := by_period(infos, policy))] == before


def by_period(infos, policy):
    return [s for s, why in kept(infos, [policy]).items() if any("first in" in reason for reason in why)]


def test_after_the_clock_was_set_back_counting_starts_anew():
    infos = [StepInfo(s, at * 10**9) for s, at in [(1, 1000), (2, 1005), (3, 10), (4, 15), (5, 20), (6, 21)]]
    assert list(kept(infos, [EveryPeriod(10)])) == [1, 3, 5, 6]


def test_all_and_named_steps_stay():
    assert list(kept(STEPS, [All()])) == [0, 10, 20, 30, 40]
    assert kept(STEPS, [Steps((10, 11))]) == {10: ("asked for by number",), 40: ("newest",)}


def test_the_best_come_in_order_and_infinity_is_a_number():
    infos = [StepInfo(1, 0, {"a": math.inf}), StepInfo(2, 0, {"a": 3.0}), StepInfo(3, 0, {"a": 3.0}), StepInfo(4, 0)]
    assert [info.step for info in best_of(infos, Best("a"))] == [3, 2, 1]
    assert [info.step for info in best_of(infos, Best("a", mode="max"))] == [1, 3, 2]


@st.composite
def branched(draw):
    """Checkpoints in any order of saving, some of them on abandoned branches."""
    infos = draw(runs())
    order = draw(st.permutations(range(len(infos))))
    left = draw(st.lists(st.booleans(), min_size=len(infos), max_size=len(infos)))
    return [
        StepInfo(i.step, i.created_ns, i.metrics, i.pinned, 1000 + number, gone)
        for i, number, gone in zip(infos, order, left, strict=True)
    ]


@given(branched(), st.lists(POLICIES, max_size=3), st.randoms())
def test_with_branches_deciding_again_changes_nothing_and_the_newest_stays(infos, policies, order):
    stays = kept(infos, policies)
    rest = [info for info in infos if info.step in stays]
    order.shuffle(rest)
    assert kept(rest, policies) == stays
    present = [info for info in infos if not info.abandoned] or infos
    assert not infos or "newest" in stays[max(present, key=lambda info: info.sequence or 0).step]


@given(branched(), st.integers(1, 12))
def test_the_last_are_those_saved_last_and_abandoned_branches_come_behind(infos, count):
    last = {step for step, why in kept(infos, [Last(count)]).items() if f"one of the last {count}" in why}
    assert len(last) == min(count, len(infos))
    dropped = [info for info in infos if info.step not in last]
    assert all(one.age > other.age for one in infos if one.step in last for other in dropped)
    assert not any(info.abandoned for info in infos if info.step in last) or all(info.abandoned for info in dropped)


def test_of_equal_metrics_the_one_saved_later_is_the_best():
    infos = [StepInfo(30, 0, {"loss": 1.0}, sequence=30, abandoned=True), StepInfo(21, 0, {"loss": 1.0}, sequence=31)]
    assert [info.step for info in best_of(infos, Best("loss"))] == [21, 30]


def test_a_period_longer_than_any_clock_keeps_the_first():
    infos = [StepInfo(step, step * 10**9) for step in (1, 2, 3)]
    assert set(kept(infos, parse_keep("period:1e300"))) == {1, 3}


@pytest.mark.parametrize("metric", ["val loss", "a,b", "top+5", "100%", "a%20b", "loss:min", "\u3000x", "точность"])
def test_the_name_of_a_metric_may_have_what_separates_policies(metric):
    policies = (Best(metric, 2, "max"), Last(3))
    assert parse_keep(keep_text(policies)) == policies


def test_the_best_of_the_present_branch_stay_whatever_was_better_on_an_abandoned_one():
    infos = [
        StepInfo(10, 0, {"loss": 3.0}, sequence=1),
        StepInfo(20, 0, {"loss": 1.0}, sequence=2, abandoned=True),
        StepInfo(30, 0, {"loss": 2.0}, sequence=3, abandoned=True),
        StepInfo(11, 0, {"loss": 4.0}, sequence=4),
        StepInfo(12, 0, {"loss": 5.0}, sequence=5),
    ]
    assert set(kept(infos, [Best("loss")])) == {10, 20, 12}
