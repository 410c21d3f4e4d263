"""Worlds larger than any machine here: what the real planning, agreement, commit and load planning come to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.bench.scale.models import MODELS, Grid, Model, arrays_of
from tests.bench.scale.report import CHUNK_NBYTES, growth, judge
from tests.bench.scale.simulate import Figures, simulate
from tests.bench.scale.traffic import Talk
from tests.helpers.world import on_ranks
from treeckpt._core.format import index
from treeckpt._io.comm.comm import Comm, thread_comms
from treeckpt._io.comm.rounds import Round

MODEL = msgspec.structs.replace(MODELS["llama 8B"], layers=8)
EXPERTS = msgspec.structs.replace(MODELS["mixtral 8x22B"], layers=2)

NARROW = Model("narrow", layers=1, width=4096, feed_forward=4096, keys=256, vocabulary=2048)


@pytest.fixture(scope="module")
def worlds() -> list[Figures]:
    return [simulate(MODEL, Grid(n // 8, 8), Grid(n // 8, 4, 2)) for n in (64, 256, 1024)]


def test_an_index_grows_far_slower_than_the_world(worlds: list[Figures]) -> None:
    assert growth(worlds, lambda row: row.world)["index bytes"] < 0.8
    assert worlds[-1].index_nbytes < 5 << 20


def test_a_message_of_a_rank_is_as_long_in_any_world(worlds: list[Figures]) -> None:
    assert max(row.hello_nbytes for row in worlds) < 200
    assert max(row.done_nbytes for row in worlds) < 1000
    assert all(row.joined_nbytes == row.told_nbytes == 0 for row in worlds), (
        "ranks that bring the same tell digests only"
    )
    assert all(row.messages == 2 * row.world for row in worlds)


def test_loads_read_what_they_need_and_saves_are_balanced(worlds: list[Figures]) -> None:
    assert max(row.amplification for row in worlds) <= 1.05
    assert max(row.write_balance for row in worlds) <= 1.2


def test_replicas_even_out_what_a_layout_leaves_uneven() -> None:
    """Of 128 rows cut among 256 ranks half have none, and nobody else can write them; unless others hold them too."""
    alone, shared = (simulate(NARROW, Grid(256, 2, copies=n), Grid(8)) for n in (1, 16))
    assert alone.write_least > 1.01 and alone.write_balance <= 1.01 * alone.write_least
    assert shared.write_least == 1.0 and shared.write_balance <= 1.1


def test_stages_of_a_pipeline_tell_their_parts_once_each() -> None:
    row = simulate(MODEL, Grid(16, 4, 4), Grid(32, 8))
    assert row.classes == 4 and row.messages == 2 * row.world + 4
    assert row.amplification <= 1.05


def test_experts_are_laid_out_over_their_own_mesh() -> None:
    row = simulate(EXPERTS, Grid(16, 2, ep=8), Grid(8, 2, ep=4))
    assert row.leaves == len(arrays_of(EXPERTS, 1)) and row.amplification <= 1.05


def test_uneven_ranges_of_everything_take_few_bytes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_PLAIN_NBYTES", 0)  # this world is a small one, to be quick
    row = simulate(MODEL, Grid(64), Grid(8, 8), flat=True)
    assert row.classes == 64 and row.chunks > 64
    assert row.index_nbytes / row.chunks <= CHUNK_NBYTES, "of all that is in it: names, specs and files too"
    assert not judge([row])


def _counted(world: int, tiers: tuple[int, ...], messages: list[bytes], word: bytes) -> dict[int, tuple[int, int]]:
    """Messages and bytes at each board, of a round and a branch of it as threads have them; but of the state."""
    comms = thread_comms(world, group_sizes=tiers)
    boards = comms[0].stores
    counts = {rank: [0, 0] for rank in boards}

    def count(rank: int, keys: Sequence[str], messages: Sequence[bytes | None]) -> None:
        found = [message for key, message in zip(keys, messages, strict=True) if key != "state" and message is not None]
        with lock:
            counts[rank][0] += len(found)
            counts[rank][1] += sum(map(len, found))

    lock = threading.Lock()
    for rank, board in boards.items():
        post, wait = board.post, board.wait
        board.post = lambda key, data, post=post, rank=rank: (count(rank, [key], [data]), post(key, data))[1]

        def waited(keys: Any, timeout: float, wait: Any = wait, rank: int = rank) -> Any:
            found = wait(keys, timeout)
            count(rank, keys, found)
            return found

        board.wait = waited

    def act(comm: Comm) -> None:
        main = Round(comm, "save")
        main.join()
        for conversation in (main, main.branch("done")):
            heard = conversation.gather(messages[comm.rank])
            conversation.broadcast(word if heard is not None else None, last=True)

    assert all(outcome.error is None for outcome in on_ranks(comms, act))
    return {rank: (found, nbytes) for rank, (found, nbytes) in counts.items()}


@pytest.mark.parametrize("tiers", [(), (4,), (2, 8)], ids=str)
def test_the_simulated_traffic_is_that_of_real_rounds(tiers: tuple[int, ...]) -> None:
    world, word = 21, b"w" * 300
    messages = [b"m" * (40 + rank % 3) for rank in range(world)]
    talk = Talk(world, tiers)
    for _ in range(2):
        assert talk.gather(messages) == dict(enumerate(messages))
        talk.broadcast(word, last=True)
    found = _counted(world, tiers, messages, word)
    assert found.keys() == talk.servers.keys()
    for rank, load in talk.servers.items():
        assert found[rank][0] == load.messages
        assert found[rank][1] == pytest.approx(load.nbytes, rel=0.02)


def test_leaders_keep_the_traffic_at_rank_0_from_growing_with_the_world() -> None:
    """Pipeline stages bring different trees, and all need what comes of it."""
    row = simulate(EXPERTS, Grid(256, 4, 2), Grid(8, 2))
    assert row.world == 2048 and row.joined_nbytes > 2000
    assert row.alone.clients == row.world - 1 and row.alone.nbytes > row.world * row.joined_nbytes
    assert row.root.clients < 100 and row.leader.clients < 100
    assert row.root.nbytes < row.alone.nbytes / 4 and row.leader.nbytes < row.alone.nbytes / 10
