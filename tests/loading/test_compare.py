"""Contents are compared by checksums where those can tell, and by numbers where they cannot."""

import json

import numpy as np
import pytest

import treeckpt
from tests.helpers.samples import MESH, BFloat16, gpt_state, write_checkpoint
from treeckpt._cli.main import main
from treeckpt._core.sharding.placements import MeshLayout, Replicate, Shard
from treeckpt._core.tree.containers import PerRank
from treeckpt._inspect.diff import comparable, diff
from treeckpt._io.storage.checkpoint import Checkpoint
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._loading.compare import delta_of, measured_pairs, value_changes, verdict_of
from treeckpt.errors import CorruptError


def sides(tmp_path, *trees, **options):
    found = []
    for n, tree in enumerate(trees):
        write_checkpoint(tmp_path / f"{n}", tree, **options)
        found.append(Checkpoint(LocalStore(tmp_path / f"{n}")))
    return found


def verdicts(a, b):
    pairs = comparable(a.index, b.index, diff(a.index, b.index))
    return {x.path: verdict_of(a, x, b, y) for x, y in pairs}


ALONE = {"world": 1, "layouts": lambda path, array: None}
BIG = np.arange(400_000, dtype=np.float32).reshape(1000, 400)


def test_equal_checkpoints_are_known_to_be_equal_without_reading(tmp_path):
    a, b = sides(tmp_path, gpt_state(layers=1), gpt_state(layers=1))
    for side in (a, b):  # headers only
        assert side.index.leaves
        side.store.map = side.store.read = None
    assert set(verdicts(a, b).values()) == {"equal"}
    assert list(value_changes(a, b)) == []


def test_a_block_inside_of_an_array_tells_a_change_and_a_shared_one_does_not(tmp_path):
    other = BIG.copy()
    other[300, 7] += 1
    a, b = sides(tmp_path, {"big": BIG, "a": np.zeros(64), "b": np.ones(64)},
                 {"big": other, "a": np.zeros(64), "b": np.full(64, 2.0)}, **ALONE)  # fmt: skip
    assert verdicts(a, b) == {"big": "changed", "a": "unknown", "b": "unknown"}
    assert [v.path for v in value_changes(a, b)] == ["big", "b"]
    assert [v.path for v in value_changes(a, b, exact=False)] == ["big", "a", "b"]


def test_another_sharding_is_read_to_be_compared(tmp_path):
    def layout(*placements):
        return lambda path, array: MeshLayout(MESH, placements)

    write_checkpoint(tmp_path / "a", {"x": BIG}, layouts=layout(Shard(0), Replicate()))
    write_checkpoint(tmp_path / "b", {"x": BIG + (BIG > 399_000)}, layouts=layout(Shard(1), Shard(0)))
    a, b = Checkpoint(LocalStore(tmp_path / "a")), Checkpoint(LocalStore(tmp_path / "b"))
    assert verdicts(a, b) == {"x": "unknown"}
    [change] = value_changes(a, b)
    assert (change.delta.changed, change.delta.max_abs, change.delta.elements) == (999, 1.0, 400_000)
    assert change.delta.mean_abs == pytest.approx(999 / 400_000)


def test_pairs_are_measured_over_all_their_elements_whatever_their_size(tmp_path):
    random = np.random.default_rng(0)
    first = {
        "large": random.standard_normal((2200, 2100)).astype(np.float32),
        "half": np.full(1000, 30_000, np.float16),
        "none": np.zeros((0, 3), np.float32),
        "huge": np.array([1e300, -1e300]),
        "own": PerRank(random.standard_normal(50)),
        "same": np.arange(9.0),
    }
    second = {name: value if name == "same" else value * 2 for name, value in first.items() if name != "own"}
    second["own"] = PerRank(first["own"].value * 2)
    a, b = sides(tmp_path, first, second)
    found = {x.path: d for x, _, d in measured_pairs(a, b, comparable(a.index, b.index, diff(a.index, b.index)))}
    for path, delta in found.items():
        wanted = {"same": 0.0, "none": 0.0}.get(path, 1.0)
        assert (delta.relative, delta.changed) == (pytest.approx(wanted), delta.elements if wanted else 0), path
        assert delta.cosine is None if path in ("none", "huge") else delta.cosine == pytest.approx(1), path
    assert found["large"].before == pytest.approx(np.linalg.norm(first["large"].astype(float)))
    assert found["half"].before == pytest.approx(30_000 * np.sqrt(1000))
    assert found["huge"].change == pytest.approx(np.sqrt(2) * 1e300)
    assert found["own/~rank*"].elements == 200


def test_a_moved_array_is_compared_under_both_names(tmp_path):
    a, b = sides(tmp_path, {"m": {"w": BIG}}, {"n": {"w": BIG * 2}})
    [change] = value_changes(a, b)
    assert (change.path, change.other, change.delta.changed) == ("m/w", "n/w", BIG.size - 1)


def test_numbers_that_are_not_finite_and_numbers_in_bfloat16(tmp_path):
    one = {"f": np.array([1, np.nan, np.inf, -0.0]), "h": BFloat16(np.array([0x3F80, 0x4000], np.uint16))}
    two = {"f": np.array([1, np.nan, 5, 0.0]), "h": BFloat16(np.array([0x3F80, 0x4080], np.uint16))}
    a, b = sides(tmp_path, one, two)
    found = {v.path: v.delta for v in value_changes(a, b)}
    assert (found["f"].changed, found["f"].not_finite, found["f"].max_abs) == (2, 1, 0.0)
    assert (found["h"].changed, found["h"].max_abs, found["h"].mean_abs) == (1, 2.0, 1.0)


@pytest.mark.parametrize(
    ("dtype", "before", "after", "gaps"),
    [
        ("int64", [2**60, 2**60 + 1, -(2**63)], [2**60 + 1, 2**60 + 1, -(2**63) + 3], [1, 0, 3]),
        ("uint64", [2**64 - 1, 5, 0], [2**64 - 2, 7, 0], [1, 2, 0]),
        ("int64", [-(2**63), 2**63 - 1], [2**63 - 1, -(2**63)], [2**64 - 1, 2**64 - 1]),
    ],
)
def test_differences_of_large_integers_are_exact(tmp_path, dtype, before, after, gaps):
    a, b = sides(tmp_path, {"x": np.array(before, dtype)}, {"x": np.array(after, dtype)}, **ALONE)
    [(x, y)] = comparable(a.index, b.index, diff(a.index, b.index))
    found = delta_of(a, x, b, y)
    assert (found.changed, found.max_abs) == (np.count_nonzero(gaps), float(max(gaps)))
    assert found.mean_abs == pytest.approx(sum(gaps) / len(gaps)) and found.change == pytest.approx(
        np.hypot.reduce(gaps)
    )


def test_a_cap_compares_the_first_elements_and_says_so(tmp_path):
    a, b = sides(tmp_path, {"x": BIG}, {"x": BIG + 1})
    x, y = a.index.entries[0], b.index.entries[0]
    delta = delta_of(a, x, b, y, cap=8 * 1000)
    assert (delta.compared, delta.changed, delta.elements) == (1000, 1000, 400_000)


def test_arrays_of_single_ranks_are_compared_rank_by_rank(tmp_path):
    a, b = sides(tmp_path, {"own": PerRank(np.zeros(5))}, {"own": PerRank(np.ones(5))}, world=3)
    [change] = value_changes(a, b)
    assert (change.delta.elements, change.delta.changed) == (15, 15)


def test_text_and_empty_arrays_have_no_numbers(tmp_path):
    for name, text in (("0", "c"), ("1", "d")):
        treeckpt.save(tmp_path / name, {"t": np.array(["ab", text]), "e": np.zeros((0, 3))})
    a, b = Checkpoint(LocalStore(tmp_path / "0")), Checkpoint(LocalStore(tmp_path / "1"))
    [change] = value_changes(a, b)
    assert (change.path, change.delta.changed, change.delta.max_abs) == ("t", 1, None)


def test_damaged_bytes_are_an_error_not_a_difference(tmp_path):
    a, b = sides(tmp_path, {"x": BIG}, {"x": BIG + 1}, **ALONE)
    shard = tmp_path / "1" / b.index.file_list[0].name
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptError, match=r"x: .*checksum"):
        list(value_changes(a, b))
    shard.write_bytes(data[:-4096])
    with pytest.raises(CorruptError, match="bytes"):
        list(value_changes(a, Checkpoint(LocalStore(tmp_path / "1"))))


def test_the_command_says_by_how_much(tmp_path, capsys):
    sides(tmp_path, {"x": BIG, "n": 1}, {"x": BIG + 0.5, "n": 1})
    assert main(["diff", "--values", str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    assert "400000 of 400000 differ, at most by 0.5, by 0.5 in the mean" in capsys.readouterr().out
    assert main(["diff", "--values", "--json", str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    [value] = json.loads(capsys.readouterr().out)["values"]
    assert value["path"] == "x" and value["delta"]["max_abs"] == 0.5
    assert main(["diff", str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    assert "not compared without --values" in capsys.readouterr().out


def test_the_command_says_that_what_is_alike_is_so_by_its_recorded_checksums(tmp_path, capsys):
    _, b = sides(tmp_path, {"x": BIG, "n": 1}, {"x": BIG, "n": 1})
    shard = tmp_path / "1" / b.index.file_list[0].name
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1  # since it was saved
    shard.write_bytes(data)
    assert main(["diff", "--values", str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 leaves alike (contents too, by their recorded checksums; treeckpt verify compares" in said
    assert main(["verify", str(tmp_path / "1")]) == 1
    with pytest.raises(SystemExit):
        main(["diff", "--help"])
    assert "treeckpt verify" in " ".join(capsys.readouterr().out.split())
    assert main(["diff", str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    assert "2 leaves alike (the contents of arrays are not compared without --values)" in capsys.readouterr().out
