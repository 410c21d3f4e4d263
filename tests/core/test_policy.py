"""Retention: what stays, why, and that deciding again changes nothing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt.core.policy import Best, EveryPeriod, EverySteps, Last, StepInfo, kept


@st.composite
def runs(draw):
    steps = sorted(draw(st.sets(st.integers(0, 200), max_size=12)))
    at, infos = 0, []
    for step in steps:
        at += draw(st.integers(0, 5)) * 10**9
        metrics = draw(st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats() | st.just(1.0)))
        infos.append(StepInfo(step, at, metrics, draw(st.integers(0, 9)) == 0))
    return infos


POLICIES = st.one_of(
    st.builds(Last, st.integers(-1, 4)),
    st.builds(EverySteps, st.integers(0, 50)),
    st.builds(EveryPeriod, st.floats(0, 10)),
    st.builds(Best, st.sampled_from(["loss", "accuracy", "none"]), st.integers(-1, 3), st.sampled_from(["min", "max"])),
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
        (Best("loss", -1), [40]),
        (Best("none"), [40]),
    ],
)
def test_each_policy_keeps_what_it_says(policy, steps):
    assert list(kept(STEPS, [policy])) == steps


def test_reasons_are_named():
    infos = [*STEPS, StepInfo(41, 41, pinned=True)]
    assert kept(infos, [Last(1), Best("loss"), EverySteps(41)]) == {
        0: ("a multiple of 41 steps",),
        30: ("one of the best 1 by loss",),
        41: ("pinned", "newest", "one of the last 1", "a multiple of 41 steps"),
    }


def test_no_checkpoints_need_no_decision():
    assert kept([], [Last(3)]) == {}
