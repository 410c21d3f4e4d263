"""A clean-up takes what it should, in the right order, and nothing that anybody may still need."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.files import (
    PIN_NAME,
    deleted_name,
    lease_name,
    parse_file_name,
    prepared_name,
    step_name,
    verdict_name,
)
from treeckpt._core.format.shard_header import shard_name
from treeckpt._core.format.timings import timings_name
from treeckpt._inspect.deletion import (
    CleanupTimes,
    FileInfo,
    Removal,
    RetainedDirectory,
    StepDirectory,
    plan_cleanup,
    plan_deletion,
)
from treeckpt.policy import (
    All,
    Best,
    EveryPeriod,
    EverySteps,
    Last,
    Steps,
)

GRACE, LEASE, NOW = 3600 * 10**9, 600 * 10**9, 10**18
TIMES = CleanupTimes(NOW, GRACE, LEASE)
OLD, NEW = 2 * GRACE, 10**9
A, B, C = "a" * 16, "b" * 16, "c" * 16


def files_of(save_id, age, *, world=2):
    names = [shard_name(save_id, rank, world, 0) for rank in range(world)] + [timings_name(save_id)]
    return tuple(FileInfo(name, 10, NOW - age) for name in names)


def fact(name, age, nbytes=1):
    return FileInfo(name, nbytes, NOW - age)


def folder_of(step, status, modified_ns, files, **more):
    facts = {"created_ns": 0, "name": step_name(step), "modified_ns": modified_ns, **more}
    return StepDirectory(step=step, status=status, files=files, **facts)


def complete(step, *more, age=OLD, save_id=A):
    files = (fact("index.json", age), *files_of(save_id, age), *more)
    return folder_of(step, "complete", NOW - age, files, save_id=save_id, created_ns=NOW - age)


def partial(step, *files, age=OLD):
    return folder_of(step, "partial", NOW - age, files)


def clean(*folders, busy=()):
    return plan_cleanup(folders, [Last(1)], TIMES, busy=busy)


def test_a_checkpoint_goes_with_its_index_first_and_its_mark_last():
    cleaning = clean(complete(1), complete(2))
    assert cleaning.kept == {2: ("newest", "one of the last 1")}
    [removal] = cleaning.removed
    assert (removal.name, removal.what, removal.save_id, removal.directory) == (step_name(1), "checkpoint", A, True)
    assert removal.files == ("index.json", *sorted(file.name for file in files_of(A, 0)), deleted_name(A))
    assert removal.nbytes == 31
    assert not cleaning.left


def test_foreign_files_stay():
    [removal] = clean(complete(1, fact("notes.txt", OLD), fact("model.safetensors", OLD)), complete(2)).removed
    assert not {"notes.txt", "model.safetensors"} & set(removal.files)


def test_who_reads_or_writes_is_waited_for():
    reader, old_reader = fact(lease_name(C), NEW), fact(lease_name(C), LEASE)
    assert "being read" in clean(complete(1, reader), complete(2)).left[0].why
    assert lease_name(C) in clean(complete(1, old_reader), complete(2)).removed[0].files
    writer = fact(shard_name(B, 1, 2, 0), NEW)
    assert "writing" in clean(complete(1, writer, *files_of(B, OLD)[:1]), complete(2)).left[0].why
    assert clean(complete(1), complete(2), busy=[step_name(1)]).left == (
        RetainedDirectory(step_name(1), "it is being saved"),
    )


def test_what_was_written_moments_ago_may_go_once_it_is_committed():
    assert clean(complete(1, age=NEW), complete(2, age=NEW)).removed[0].name == step_name(1)


def test_the_pinned_stay():
    cleaning = clean(complete(1, fact(PIN_NAME, OLD)), complete(2))
    assert cleaning.kept[1] == ("pinned",) and not cleaning.removed


def test_the_corrupt_stay_and_are_named():
    bad = msgspec.structs.replace(complete(3, *files_of(B, OLD)), status="damaged", problem="a shard is missing")
    cleaning = clean(bad, complete(2))
    assert cleaning.left == (RetainedDirectory(step_name(3), "damaged: a shard is missing"),)
    assert list(cleaning.kept) == [2] and not cleaning.removed


def test_a_crashed_save_goes_after_the_grace_period_by_its_newest_file():
    old, young = partial(3, *files_of(B, OLD)), partial(3, *files_of(B, OLD)[:2], fact(timings_name(B), NEW))
    [removal] = clean(complete(2), old).removed
    assert removal.what == "leftovers" and removal.directory and len(removal.files) == 3
    assert not clean(complete(2), young).removed
    assert "under way" in clean(complete(2), young).left[0].why


def test_a_step_that_lost_only_its_index_goes_with_the_command_that_makes_it_again():
    lost = msgspec.structs.replace(partial(3, *files_of(B, OLD)), path="/run/step_00000003")
    [removal] = clean(complete(2), lost).removed
    assert "without an index, which treeckpt verify /run/step_00000003 --repair makes again" in removal.reason
    for other in (
        partial(3, *files_of(B, OLD)[1:]),
        partial(3, *files_of(B, OLD), recorded(B, False)),
        partial(3, *files_of(B, OLD), fact(deleted_name(B), OLD)),
        complete(2, *files_of(B, OLD)),
    ):
        [removal] = clean(other).removed
        assert "--repair" not in removal.reason


def test_a_file_from_the_future_counts_as_new():
    assert not clean(complete(2), partial(3, *files_of(B, -OLD))).removed


def test_a_crashed_save_beside_a_committed_one_goes_and_the_committed_one_stays():
    temporary = fact(f".index.json.{C}.tmp", OLD)
    [removal] = clean(complete(2, *files_of(B, OLD), temporary)).removed
    assert removal.what == "leftovers" and not removal.directory
    assert {parse_file_name(name).save_id for name in removal.files} == {B, None}
    assert not clean(complete(2, *files_of(B, NEW), fact(f".index.json.{C}.tmp", NEW))).removed


def test_a_deletion_that_was_cut_short_is_finished_at_once():
    half = partial(1, *files_of(A, NEW)[1:], fact(deleted_name(A), NEW), age=NEW)
    [removal] = clean(complete(2), half).removed
    assert removal.files[-1] == deleted_name(A) and removal.directory
    assert "cut short" in removal.reason
    reader = fact(lease_name(C), NEW)
    assert not clean(complete(2), msgspec.structs.replace(half, files=(*half.files, reader))).removed


def test_a_mark_beside_an_index_means_nothing_yet():
    assert list(clean(complete(2, fact(deleted_name(A), NEW))).kept) == [2]
    assert clean(complete(2, fact(deleted_name(A), OLD))).removed[0].files == (deleted_name(A),)


def test_an_empty_directory_goes_after_the_grace_period():
    assert clean(complete(2), partial(3)).removed[0].directory
    assert "begin" in clean(complete(2), partial(3, age=NEW)).left[0].why


def test_an_empty_directory_stays_until_the_grace_period_has_passed():
    """A save that has just begun has made its directory, and written nothing yet."""
    assert clean(complete(2), partial(3, age=GRACE)).removed[0].directory
    [left] = clean(complete(2), partial(3, age=GRACE - 1)).left
    assert left.name == step_name(3)


def test_a_directory_that_was_touched_lately_stays_when_leftovers_in_it_go():
    """Another save may have begun there."""
    old = files_of(A, OLD)
    [removal] = clean(complete(2), partial(3, *old, age=OLD)).removed
    assert removal.directory and set(removal.files) == {file.name for file in old}
    [removal] = clean(complete(2), partial(3, *old, age=NEW)).removed
    assert not removal.directory and set(removal.files) == {file.name for file in old}


def test_a_directory_with_other_files_stays_when_leftovers_in_it_go():
    [removal] = clean(complete(2), partial(3, *files_of(A, OLD), fact("notes.txt", OLD))).removed
    assert not removal.directory and "notes.txt" not in removal.files


def test_a_pinned_directory_without_an_index_stays():
    cleaning = clean(complete(2), partial(3, *files_of(B, OLD), fact(PIN_NAME, OLD)))
    assert not cleaning.removed and "pinned" in cleaning.left[0].why


AGES = st.sampled_from([-OLD, NEW, LEASE, OLD])
NAMES = st.sampled_from(
    [
        *(shard_name(i, r, 2, 0) for i in (A, B) for r in (0, 1)),
        *(timings_name(B), deleted_name(A), deleted_name(B), lease_name(C), PIN_NAME),
        *(f".index.json.{C}.tmp", f"progress-00000.{B}.json", "notes.txt"),
    ]
)


@st.composite
def folders(draw):
    found = []
    for step in sorted(draw(st.sets(st.integers(0, 9), max_size=5))):
        files = {name: fact(name, draw(AGES)) for name in draw(st.sets(NAMES, max_size=6))}
        status = draw(st.sampled_from(["complete", "partial", "damaged"]))
        if status != "partial":
            files["index.json"] = fact("index.json", draw(AGES))
        save_id = A if status == "complete" else None
        found.append(
            folder_of(step, status, NOW - draw(AGES), tuple(files.values()), save_id=save_id, created_ns=NOW - step)
        )
    return found


def apply(found, cleaning):
    """What is there after a clean-up."""
    rest = []
    gone = {removal.name: removal for removal in cleaning.removed}
    for folder in found:
        removal = gone.get(folder.name)
        if removal is not None:
            files = tuple(file for file in folder.files if file.name not in removal.files)
            if removal.directory and not files:
                continue
            if removal.what == "checkpoint":
                folder = msgspec.structs.replace(folder, status="partial", save_id=None)
            folder = msgspec.structs.replace(folder, files=files, modified_ns=NOW)
        rest.append(folder)
    return rest


@given(folders(), st.integers(1, 3))
def test_cleaning_again_changes_nothing(found, count):
    first = plan_cleanup(found, [Last(count)], TIMES)
    rest = apply(found, first)
    again = plan_cleanup(rest, [Last(count)], TIMES)
    assert again.kept == first.kept
    assert not again.removed


@given(folders(), st.integers(1, 3))
def test_nothing_is_taken_that_somebody_may_need(found, count):
    cleaning = plan_cleanup(found, [Last(count)], TIMES)
    by_name = {folder.name: folder for folder in found}
    for removal in cleaning.removed:
        folder = by_name[removal.name]
        files = {file.name: file for file in folder.files}
        assert folder.status != "damaged"
        assert "notes.txt" not in removal.files and PIN_NAME not in removal.files
        if removal.what == "leftovers":
            assert "index.json" not in removal.files
            kept_save = folder.save_id
            assert not any(
                parse_file_name(n).save_id == kept_save and parse_file_name(n).kind == "shard"
                for n in removal.files
                if kept_save
            )
        if any(NOW - f.modified_ns < LEASE for n, f in files.items() if n == lease_name(C)):
            assert removal.what == "leftovers" and lease_name(C) not in removal.files
            assert not {deleted_name(A), deleted_name(B)} & set(removal.files) or folder.status == "complete"
        marked = {i for i in (A, B) if deleted_name(i) in files}
        for save_id in {A, B} - marked - {folder.save_id}:
            group = [f for n, f in files.items() if parse_file_name(n) and parse_file_name(n).save_id == save_id]
            if removal.what == "checkpoint" and [f.name for f in group] == [timings_name(save_id)]:
                continue  # timings alone keep nothing
            if any(NOW - f.modified_ns < GRACE for f in group) and not is_replaced(folder, group):
                assert not {f.name for f in group} & set(removal.files)
    for removal in cleaning.removed:
        assert isinstance(removal, Removal) and removal.reason


def is_replaced(folder, group):
    """Whether a save has told that all is written, and an index was published after that."""
    kinds = {f.name: parse_file_name(f.name).kind for f in group}
    if folder.status != "complete" or "progress" in kinds.values() or "timings" not in kinds.values():
        return False
    [index] = [f for f in folder.files if f.name == "index.json"]
    proof = [f for f in group if kinds[f.name] == "shard"] or [f for f in group if kinds[f.name] == "timings"]
    return all(f.modified_ns <= index.modified_ns for f in proof)


@given(folders(), st.integers(1, 3), st.randoms())
def test_the_order_of_a_listing_does_not_matter(found, count, random):
    shuffled = [msgspec.structs.replace(f, files=tuple(random.sample(f.files, len(f.files)))) for f in found]
    random.shuffle(shuffled)
    assert plan_cleanup(found, [Last(count)], TIMES) == plan_cleanup(shuffled, [Last(count)], TIMES)


def recorded(save_id, alive, age=NEW, rank=0):
    return FileInfo(f"progress-{rank:05d}.{save_id}.json", 1, NOW - age, alive)


def test_a_save_whose_coordinator_has_ended_goes_at_once():
    for status in (
        partial(3, *files_of(B, NEW), recorded(B, False)),
        complete(3, *files_of(B, NEW), recorded(B, False)),
    ):
        [removal] = clean(status).removed
        assert "was killed" in removal.reason
        assert {file.name for file in files_of(B, 0)} < set(removal.files) and recorded(B, False).name in removal.files


def test_a_save_that_is_alive_stays_however_old_its_files_are():
    old = [*files_of(B, OLD), recorded(B, True, OLD)]
    assert "under way" in clean(complete(2), partial(3, *old)).left[0].why
    assert not clean(complete(2, *old)).removed
    assert "writing" in clean(complete(1, *old), complete(2)).left[0].why


def test_a_save_of_which_another_rank_lives_stays():
    both = [*files_of(B, NEW), recorded(B, False), recorded(B, True, rank=1)]
    assert not clean(complete(2, *both)).removed


def test_the_death_of_another_rank_than_the_coordinator_proves_nothing():
    assert not clean(complete(2, *files_of(B, NEW), recorded(B, False, rank=1))).removed
    assert not clean(complete(2, *files_of(B, NEW), recorded(B, None))).removed


def test_what_another_disk_may_have_committed_stays_and_is_named():
    """However old it is, and whoever has died: one disk alone does not know."""
    half = [*files_of(B, OLD), fact(prepared_name(B), OLD), recorded(B, False, OLD), recorded(B, False, OLD, rank=1)]
    for status in (partial(3, *half), complete(3, *half, age=NEW), complete(2, *half), partial(3, half[-3])):
        cleaning = clean(status, complete(4))
        assert not [removal for removal in cleaning.removed if prepared_name(B) in removal.files]
        [left] = cleaning.left
        assert f"another host may have the index of save {B}" in left.why and "force" in left.why
    [removal] = clean(complete(2, fact(prepared_name(A), OLD)), complete(4)).removed
    assert prepared_name(A) in removal.files, "it is that of the checkpoint itself"
    assert clean(complete(4, fact(prepared_name(A), OLD))).removed[0].files == (prepared_name(A),)


def test_a_forced_deletion_takes_what_another_disk_may_have_committed():
    half = [*files_of(B, OLD), fact(prepared_name(B), OLD)]
    assert isinstance(plan_deletion(partial(3, *half), TIMES), RetainedDirectory)
    removal = plan_deletion(partial(3, *half), TIMES, force=True)
    assert isinstance(removal, Removal) and removal.files[-1] == prepared_name(B)
    assert isinstance(plan_deletion(complete(3, *half), TIMES), RetainedDirectory)
    removal = plan_deletion(complete(3, *half), TIMES, force=True)
    assert isinstance(removal, Removal) and prepared_name(B) in removal.files


def test_timings_alone_keep_nothing_and_stay_for_the_grace_period():
    failed = fact(timings_name(B), NEW)
    assert clean(complete(1, failed), complete(2)).removed[0].what == "checkpoint"
    assert not clean(complete(2, failed)).removed
    assert "failed" in clean(complete(2), partial(3, failed)).left[0].why
    assert clean(complete(2, fact(timings_name(B), OLD))).removed[0].files == (timings_name(B),)


def test_a_save_that_failed_leaves_its_timings_only():
    shards, failed = files_of(B, NEW)[:2], FileInfo(timings_name(B), 10, NOW - NEW, alive=False)
    [removal] = clean(complete(2, *shards, failed)).removed
    assert set(removal.files) == {shard.name for shard in shards} and "failed" in removal.reason
    [removal] = clean(complete(2, *shards, failed, age=0)).removed
    assert failed.name in removal.files, "a save was committed there later"


def test_a_save_that_another_one_has_replaced_goes_at_once():
    [removal] = clean(complete(2, *files_of(B, NEW), age=0)).removed
    assert set(removal.files) == {file.name for file in files_of(B, 0)} and "replaced" in removal.reason
    assert not clean(partial(3, *files_of(B, NEW))).removed, "its index may have been lost"
    assert not clean(complete(2, *files_of(B, NEW)[:2], age=0)).removed, "not all may be written yet"


def test_a_reader_whose_process_has_ended_keeps_nothing():
    reader = FileInfo(lease_name(C), 1, NOW - NEW, alive=False)
    assert lease_name(C) in clean(complete(1, reader), complete(2)).removed[0].files
    assert clean(complete(2, reader)).removed[0].files == (lease_name(C),)


def test_the_temporary_file_of_a_process_that_has_ended_goes_at_once():
    temporary = FileInfo(f".index.json.{C}.tmp", 1, NOW - NEW, alive=False)
    assert clean(complete(2, temporary)).removed[0].files == (temporary.name,)


def test_a_verdict_of_damage_goes_with_its_save_and_not_before():
    verdict, other = fact(verdict_name(A), NEW), fact(verdict_name(B), NEW)
    [removal] = clean(complete(1, verdict), complete(2)).removed
    assert verdict_name(A) in removal.files, "a new verdict of an old save does not keep it"
    assert not clean(complete(1, verdict)).removed and not clean(complete(1, verdict)).foreign
    [removal] = clean(complete(1, verdict, other)).removed
    assert (removal.what, removal.files) == ("leftovers", (verdict_name(B),)), "that of a save that was replaced"
    [removal] = clean(partial(1, verdict, *files_of(A, OLD))).removed
    assert verdict_name(A) in removal.files


def test_what_could_not_be_read_stays():
    cleaning = clean(folder_of(1, "unread", 0, (), problem="EIO"), complete(2), complete(3))
    assert [one.name for one in cleaning.removed] == [step_name(2)]
    assert cleaning.left == (RetainedDirectory(step_name(1), "it could not be read: EIO"),)


POLICIES = st.one_of(
    st.builds(Last, st.integers(-1, 4)),
    st.builds(EverySteps, st.integers(0, 9)),
    st.builds(EveryPeriod, st.floats(0, 10)),
    st.builds(Steps, st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    st.just(All()),
    st.builds(Best, st.sampled_from(["loss", "none"]), st.integers(1, 3), st.sampled_from(["min", "max"])),
)
VERDICTS = st.sampled_from(["differs", "intact", "nothing", "unread", "damaged", "partial"])


@st.composite
def judged(draw):
    """Directories of a run, each with what is known of it."""
    found = {}
    for step in draw(st.lists(st.integers(0, 9), unique=True, max_size=8)):
        verdict, pin, loss = draw(VERDICTS), draw(st.integers(0, 9)) == 0, draw(st.floats())
        folder = complete(step, *[fact(PIN_NAME, OLD)] * pin)
        changes = {
            "status": "complete" if verdict in ("differs", "intact", "nothing") else verdict,
            "damaged": verdict == "differs",
            "metrics": {"loss": loss} if draw(st.booleans()) else {},
            "sequence": draw(st.none() | st.integers(0, 99)),
            "abandoned": draw(st.booleans()),
        }
        if verdict == "unread":
            changes |= {"files": (), "save_id": None}
        found[step] = verdict, msgspec.structs.replace(folder, **changes)
    return found


@given(judged(), st.lists(POLICIES, max_size=3))
def test_the_last_step_that_is_not_known_to_be_damaged_is_never_deleted(found, policies):
    plan = plan_cleanup([folder for _, folder in found.values()], policies, TIMES)
    gone = {removal.name for removal in plan.removed if removal.what == "checkpoint"}
    stays = {verdict for verdict, folder in found.values() if folder.name not in gone}
    good = {"intact", "nothing"} & {verdict for verdict, _ in found.values()}
    assert not good or stays & {"intact", "nothing"}
    assert all(folder.name not in gone for verdict, folder in found.values() if verdict not in ("intact", "nothing"))
    known = [folder for verdict, folder in found.values() if verdict in ("intact", "nothing")]
    ages = {(not one.abandoned, one.step if one.sequence is None else one.sequence, one.step): one for one in known}
    assert not ages or ages[max(ages)].name not in gone
