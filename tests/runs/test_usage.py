"""How a run grows, and what it takes under a policy: simulated saves and clean-ups."""

from pathlib import Path

import msgspec
import pytest

import treeckpt as tc
from treeckpt._core.format.lineage import MAX_KEEP, Lineage
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.discovery import scan
from treeckpt._runs.run_state import SavePattern, save_pattern
from treeckpt._runs.usage import (
    DAY,
    WEEK,
    FileSystem,
    project,
    recorded_policies,
    seconds_until_full,
    usage_figures,
    usage_of_run,
)
from treeckpt.policy import All, Best, EveryPeriod, EverySteps, Last, parse_keep

NOW = 1_700_000_000 * 10**9
SIZE = 1000


def run_of(
    count: int, *, seconds: float = 3600.0, steps: int = 100, keep: str = "", ago: float = 0.0
) -> list[CheckpointInfo]:
    """Checkpoints of SIZE bytes at even intervals, newest first; the newest was saved `ago` seconds before NOW."""
    return [
        CheckpointInfo(
            f"step_{n * steps:08d}",
            "",
            "complete",
            n * steps,
            f"{n:016x}",
            disk_nbytes=SIZE,
            created_ns=NOW - int(((count - n) * seconds + ago) * 1e9),
            metrics={"loss": 10.0 / n},
            lineage=Lineage(n * steps, f"{n - 1:016x}", keep=keep),
            sequence=n * steps,
        )
        for n in range(count, 0, -1)
    ]


def after_a_week(keep: str, **options) -> int:
    infos = run_of(10, **options)
    pattern = save_pattern(infos)
    assert pattern is not None
    return project(infos, pattern, NOW, parse_keep(keep)).in_a_week // SIZE


@pytest.mark.parametrize(
    ("keep", "checkpoints"),
    [
        ("last:3", 3),
        ("last:50", 50),
        ("all", 10 + 168),
        ("last:2 every:1000", 2 + 17),  # steps 1,000, 2,000 ... 17,000 of 17,800
        ("last:1 best:loss:min:2", 2),
        ("period:86400", 1 + 7),  # the first one, and one of each day; the newest is one of them or one more
    ],
)
def test_a_week_under_a_policy_holds_what_its_clean_ups_leave(keep, checkpoints):
    assert after_a_week(keep) in (checkpoints, checkpoints + (keep.startswith("period")))


def test_one_choice_for_a_point_in_time_is_that_of_a_clean_up_after_each_save():
    infos = run_of(10)
    pattern = save_pattern(infos)
    assert pattern == SavePattern(3600.0, 100, SIZE)
    for policies in ([Last(3)], [Last(1), EverySteps(700)], [EveryPeriod(10_000)], [Best("loss", 2, "max"), Last(2)]):
        held = {info.name: info for info in infos}
        for hour in range(1, int(WEEK / 3600) + 1):
            step = 1000 + 100 * hour
            name = f"step_{step:08d}"
            new = {"created_ns": NOW + hour * 3600 * 10**9, "sequence": step, "metrics": {"loss": 1.0}}
            held[name] = CheckpointInfo(name, "", "complete", step, disk_nbytes=SIZE, **new)
            stays = tc.policy.kept(map(_step_info, held.values()), policies)
            held = {name: info for name, info in held.items() if info.step in stays}
        assert project(infos, pattern, NOW, policies).in_a_week == SIZE * len(held)


def _step_info(info):
    return tc.policy.StepInfo(info.step, info.created_ns, info.metrics, sequence=info.sequence)


def test_more_saves_than_are_simulated_go_on_growing_as_before():
    often = {"seconds": 1.0, "steps": 1}
    assert after_a_week("last:3", **often) == 3
    assert after_a_week("all", **often) == 10 + WEEK
    assert after_a_week("every:1000 last:1", **often) == pytest.approx(WEEK / 1000, rel=0.01)


def test_a_step_of_an_abandoned_branch_is_replaced_and_other_directories_stay():
    infos = run_of(10)
    infos[0] = CheckpointInfo(**{**_fields(infos[0]), "abandoned": True})
    torn = CheckpointInfo("step_00000001", "", "partial", 1, disk_nbytes=77)
    pattern = save_pattern(infos)
    assert pattern is not None
    assert project([*infos, torn], pattern, NOW, [All()]).in_a_week == (9 + 168) * SIZE + 77


def _fields(info):
    return {name: getattr(info, name) for name in info.__struct_fields__}


def test_only_live_runs_grow_and_under_their_own_policy():
    ended = usage_of_run(run_of(10, ago=526 * DAY), NOW)
    assert not ended.live and ended.growth_per_day == 0 == ended.written_per_day
    kept = usage_of_run(run_of(3, keep="last:3"), NOW)
    assert [(one.source, one.keep) for one in kept.projections] == [("recorded", "last:3"), ("all", "all")]
    assert kept.growth_per_day == 0 and kept.written_per_day == 24 * SIZE and kept.projections[0].in_a_week == 3 * SIZE
    whole = usage_of_run(run_of(3), NOW, default=[Last(3)])
    assert whole.projections[0].source == "dashboard"
    given = usage_of_run(run_of(3, keep="last:3"), NOW, given=[All()])
    assert [one.source for one in given.projections] == ["given", "recorded", "all"]
    assert given.growth_per_day == pytest.approx(24 * SIZE)
    assert seconds_until_full(10 * SIZE, [ended, kept]) is None
    assert seconds_until_full(240 * SIZE, [ended, kept, given]) == pytest.approx(10 * DAY, rel=0.01)
    assert seconds_until_full(10**9 * SIZE, [given]) == pytest.approx(10**9 / 24 * DAY, rel=0.01)


def test_the_disks_of_hundreds_of_live_runs_fill_by_all_of_them():
    usages = [usage_of_run(run_of(4, seconds=1000.0 + n), NOW, given=[All()]) for n in range(300)]
    disks = [FileSystem(n % 2, 10**9, 10**10) for n in range(300)]
    figures = usage_figures([*usages, None, usages[0]], [*disks, FileSystem(2, 5, 9), FileSystem(2, 5, 9)])
    growth = sum(usage.growth_per_day or 0.0 for usage in usages[::2])
    assert figures[0].disk_live == 150 and figures[0].days == pytest.approx(10**9 / growth, rel=0.01)
    assert figures[0].days == figures[298].days != figures[1].days
    assert (figures[-1].disk_live, figures[-1].days) == (None, None), "another run on it is still being read"


def test_where_too_few_saves_follow_each_other_nothing_is_projected():
    usage = usage_of_run(run_of(2), NOW)
    assert usage.live and usage.pattern is None and usage.projections == ()
    assert usage.growth_per_day is None is usage.written_per_day


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        (3, "last:3"),
        (None, "all"),
        ("last:2 best:loss", "last:2 best:loss:min:1"),
        (Best("val loss"), "best:val%20loss:min:1"),
        ([Last(1 + n) for n in range(20)], ""),
        (Best("\ud800"), ""),
    ],
)
def test_each_save_of_a_manager_records_its_policies(tmp_path, keep, text):
    with tc.Manager(tmp_path, keep=keep, background=False) as manager:
        manager.save(1, {"a": 1}, metrics={"loss": 1.0})
    [info] = scan(tmp_path)
    assert info.lineage is not None and info.lineage.keep == text
    assert recorded_policies([info]) == parse_keep(text)


def test_an_index_that_is_made_again_from_shards_has_the_policies(tmp_path):
    with tc.Manager(tmp_path, keep="last:2 best:loss", background=False) as manager:
        manager.save(1, {"a": 1}, metrics={"loss": 1.0})
    [info] = scan(tmp_path)
    Path(info.path, "index.json").unlink()
    tc.verify(info.path, repair=True)
    assert scan(tmp_path)[0].lineage == info.lineage and info.lineage is not None and info.lineage.keep


def test_policies_of_any_size_in_an_index_are_simulated():
    for keep in ("period:1e300", "period:1e-300", "every:999999999999999999", "last:999999999999999999", "best:x:1"):
        assert usage_of_run(run_of(4, keep=keep), NOW).projections[0].source == "recorded"


def test_policies_that_are_too_long_to_record_or_cannot_be_read_are_not_known(tmp_path):
    with tc.Manager(tmp_path, keep=tc.policy.Steps(tuple(range(MAX_KEEP))), background=False) as manager:
        manager.save(1, {"a": 1})
    [info] = scan(tmp_path)
    assert info.lineage is not None and info.lineage.keep == "" and recorded_policies([info]) == ()
    assert recorded_policies(run_of(1, keep="lats:3")) == () == recorded_policies([])
    assert not Lineage(1, keep="x" * (MAX_KEEP + 1)).is_sound()


def test_files_of_a_checkpoint_that_goes_count_as_long_as_another_shares_them() -> None:
    origin, *others = reversed(run_of(4))
    origin = msgspec.structs.replace(origin, disk_nbytes=100 * SIZE)
    others = [msgspec.structs.replace(info, shared_with={origin.name: 99 * SIZE}) for info in others]
    pattern = SavePattern(3600.0, 100, SIZE)
    week = {keep: project([*reversed(others), origin], pattern, NOW, [keep]).after(WEEK) for keep in (Last(2), All())}
    assert week[Last(2)] == 99 * SIZE + 2 * SIZE, "new saves share them too"
    assert week[All()] == 100 * SIZE + (3 + WEEK / 3600) * SIZE
