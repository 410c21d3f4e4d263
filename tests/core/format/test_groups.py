"""Groups of arrays that stay the same: which are kept, and which arrays get a new one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.references import GROUP_NBYTES, STAYED_SAVES, References, kept_groups, with_new_groups
from treeckpt._core.sharding.int_runs import encode_runs


def references(groups: list[int], stayed: list[int]) -> References:
    return References("key", group=encode_runs(groups), stayed=encode_runs(stayed))


@given(st.data())
def test_what_has_stayed_keeps_its_group_and_what_has_changed_leaves_it(data: Any) -> None:
    count = data.draw(st.integers(1, 30))
    groups = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    stayed = data.draw(st.lists(st.integers(0, STAYED_SAVES), min_size=count, max_size=count))
    frozen = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    found, new = kept_groups(count, frozen, references(groups, stayed))
    kept = [n for n in range(count) if groups[n] and stayed[n]]
    assert [n for n in range(count) if found[n]] == kept
    assert all((found[a] == found[b]) == (groups[a] == groups[b]) for a in kept for b in kept)
    assert set(found.tolist()) - {0} == set(range(1, len({groups[n] for n in kept}) + 1)), "without gaps"
    waits = [n for n in range(count) if stayed[n] >= (1 if n in frozen else STAYED_SAVES)]
    assert new == [n for n in waits if n not in kept]


def test_without_a_checkpoint_of_the_same_trees_what_is_frozen_gets_a_group() -> None:
    for before in (None, references([1, 1], [2, 2])):
        groups, new = kept_groups(3, [0, 2], before)
        assert groups.tolist() == [0, 0, 0] and new == [0, 2]


def test_new_groups_come_after_the_others_and_have_a_limit() -> None:
    groups, _ = kept_groups(5, [], references([1, 0, 0, 0, 0], [2, 1, 1, 1, 1]))
    half = GROUP_NBYTES // 2
    assert with_new_groups(groups, {1: half, 2: half, 3: 1, 4: 3 * GROUP_NBYTES}, 1) == (1, 2, 2, 3, 4)
    assert with_new_groups(groups, {1: half, 2: half, 3: 1, 4: 3 * GROUP_NBYTES}, 8) == (1, 2, 2, 2, 2)
