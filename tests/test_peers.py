"""What the README says of others: the same state goes through torch.save, safetensors, DCP and treeckpt."""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import treeckpt as tc

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


class Peer(NamedTuple):
    """How a library saves and loads a dict of tensors."""

    save: Callable[[dict[str, torch.Tensor], Path], Any]
    load: Callable[[dict[str, torch.Tensor], Path], dict[str, torch.Tensor]]


def load_dcp(like: dict[str, Any], path: Path) -> dict[str, Any]:
    into = {name: torch.zeros_like(leaf) for name, leaf in like.items()}
    dcp.load(into, checkpoint_id=path)
    return into


PEERS = {
    "torch.save": Peer(lambda state, path: torch.save(state, path), lambda _, path: torch.load(path)),
    "safetensors": Peer(safetensors.torch.save_file, lambda _, path: safetensors.torch.load_file(path)),
    "DCP": Peer(lambda state, path: dcp.save(state, checkpoint_id=path), load_dcp),
    "treeckpt": Peer(lambda state, path: tc.save(path, state), lambda _, path: tc.load(path)),
}


def flip_a_bit(path: Path, of: torch.Tensor) -> None:
    """Changes one bit of a tensor's bytes, in whatever file they are."""
    needle = of.numpy().tobytes()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        data = bytearray(file.read_bytes())
        if (at := data.find(needle)) >= 0:
            data[at + 1000] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError(f"{sorted(path.rglob('*'))} hold no such bytes")


@pytest.mark.parametrize("name", PEERS)
def test_a_flipped_bit_loads_silently_everywhere_else(tmp_path: Path, name: str) -> None:
    save, load = PEERS[name]
    state = {"w": torch.randn(100, 100), "b": torch.ones(7)}
    save(state, tmp_path / "c")
    assert torch.equal(load(state, tmp_path / "c")["w"], state["w"])
    flip_a_bit(tmp_path / "c", state["w"])
    if name == "treeckpt":
        with pytest.raises(tc.CorruptError, match=r"\bw\b"):
            load(state, tmp_path / "c")
    else:
        assert not torch.equal(load(state, tmp_path / "c")["w"], state["w"])


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_dcp_runs_what_its_metadata_says_and_nothing_here_does(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.planner_data = Touch(tmp_path / "ran")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    tc.convert.convert(tmp_path / "c", tmp_path / "converted", lossy=True)
    assert not (tmp_path / "ran").exists() and torch.equal(tc.load(tmp_path / "converted")["w"], state["w"])
    load_dcp(state, tmp_path / "c")
    assert (tmp_path / "ran").exists()


class Pair(NamedTuple):
    a: int
    b: Any


def test_trees_come_back_as_they_were_here_and_flattened_from_dcp(tmp_path: Path) -> None:
    tied = torch.ones(1000)
    tree = {1: tied, "tie": tied, "pair": Pair(1, (2.5, [])), "order": collections.OrderedDict(z=1, a=2)}
    tc.save(tmp_path / "ours", tree)
    back = tc.load(tmp_path / "ours")
    assert list(back) == list(tree) and back["pair"] == tree["pair"] and type(back["pair"]) is Pair
    assert back[1].data_ptr() == back["tie"].data_ptr() and type(back["order"]) is collections.OrderedDict
    dcp.save(tree, checkpoint_id=tmp_path / "dcp")
    keys = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert "1" in keys and 1 not in keys, "keys are texts"
    size = [sum(file.stat().st_size for file in (tmp_path / name).iterdir()) for name in ("ours", "dcp")]
    assert size[1] > 8000, "tied weights are written twice"
    assert tc.inspect(tmp_path / "ours").nbytes == 4000


def test_a_view_costs_its_own_bytes_here_and_its_storage_elsewhere(tmp_path: Path) -> None:
    row = torch.zeros(1000, 1000)[3]
    buffer = io.BytesIO()
    torch.save({"row": row}, buffer)
    assert len(buffer.getvalue()) > 4_000_000
    tc.save(tmp_path / "c", {"row": row})
    assert tc.inspect(tmp_path / "c").nbytes == 4000


def test_a_save_over_another_one_that_dies_leaves_neither_with_dcp(tmp_path: Path, monkeypatch: Any) -> None:
    old, new = ({"w": torch.full((1000,), float(n)), "b": torch.full((10,), float(n))} for n in (1, 2))

    def die(*arguments: Any) -> None:
        raise KeyboardInterrupt

    for name in ("DCP", "treeckpt"):
        PEERS[name].save(old, tmp_path / name)
    with monkeypatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "finish", die)
        patch.setattr("treeckpt._saving.shard_writer.publish_index", die)
        with pytest.raises((KeyboardInterrupt, dcp.CheckpointException)):
            dcp.save(new, checkpoint_id=tmp_path / "DCP")
        with pytest.raises(KeyboardInterrupt):
            tc.save(tmp_path / "treeckpt", new, overwrite=True)
    assert torch.equal(PEERS["treeckpt"].load(old, tmp_path / "treeckpt")["w"], old["w"])
    assert not torch.equal(load_dcp(old, tmp_path / "DCP")["w"], old["w"])


def test_another_dtype_is_an_error_here_and_a_silent_cast_with_dcp(tmp_path: Path) -> None:
    state, like = {"w": torch.tensor([0.5, 300.0])}, {"w": torch.zeros(2, dtype=torch.int8)}
    for name in ("DCP", "treeckpt"):
        PEERS[name].save(state, tmp_path / name)
    assert load_dcp(like, tmp_path / "DCP")["w"].dtype == torch.int8
    with pytest.raises(tc.MismatchError, match="cast=True"):
        tc.load(tmp_path / "treeckpt", like)
