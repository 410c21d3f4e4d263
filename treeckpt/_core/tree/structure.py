"""The structure of a tree as plain data, as the index holds it: nodes and paths.

A structure is a node with children, or None for a leaf. A node keeps what a container has beside its children: the
order and types of keys, a deque's maxlen, the class of a namedtuple. Paths are computed from the structure alone.

A path as text is like RFC 6901 without the leading slash: `model/layers.0.weight`, with `~1` for `/` and `~0` for `~`.
Integer keys and positions are written as such; a string key that would read as another key is marked `~s`, other
keys `~b1`, `~f1.5`, `~n`, `~x00ff` and `~(0~,a~)`. So two leaves of one tree never have the same path as text.

Subtrees that repeat, such as a model's in the moments of its optimizer, are stored once in an index: a custom node
without a class stands in the place of a shared subtree, with the number of that as its auxiliary data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat

import msgspec

from ...errors import FormatError, TreeError
from ..sharding.int_runs import Runs, check_runs
from ..sharding.placements import MeshLayout
from .dict_attributes import DictAttributes
from .spec import TableSpec
from .value_codec import TypedValue, Value, check_hash_collisions, decode_value, type_name

MAX_DEPTH = 200
"""Levels of containers of a tree; deeper ones are errors, of which the usual cause is a container that holds itself.

Trees, structures and their JSON are walked by recursive calls, at most two for each level. Of the 1,000 nested calls
that Python allows by default, this leaves 500 to the caller and 100 to treeckpt."""
WALK_CALLS = 2 * MAX_DEPTH + 20
"""Nested calls that walking a tree of `MAX_DEPTH` levels takes."""


class DictNode(msgspec.Struct, frozen=True, tag="dict", array_like=True):
    """A dict, its keys in order."""

    keys: tuple[Value, ...]
    children: tuple[Structure, ...]


class OrderedDictNode(msgspec.Struct, frozen=True, tag="OrderedDict", array_like=True):
    """A collections.OrderedDict."""

    attributes: DictAttributes | None
    keys: tuple[Value, ...]
    children: tuple[Structure, ...]


class DefaultDictNode(msgspec.Struct, frozen=True, tag="defaultdict", array_like=True):
    """A collections.defaultdict; `factory` is the name of a builtin."""

    factory: str | None
    keys: tuple[Value, ...]
    children: tuple[Structure, ...]


class ListNode(msgspec.Struct, frozen=True, tag="list", array_like=True):
    """A list."""

    children: tuple[Structure, ...]


class TupleNode(msgspec.Struct, frozen=True, tag="tuple", array_like=True):
    """A plain tuple."""

    children: tuple[Structure, ...]


class DequeNode(msgspec.Struct, frozen=True, tag="deque", array_like=True):
    """A collections.deque."""

    maxlen: int | None
    children: tuple[Structure, ...]


class NamedTupleNode(msgspec.Struct, frozen=True, tag="namedtuple", array_like=True):
    """A namedtuple of the class `cls`, `module:qualname`."""

    cls: str
    fields: tuple[str, ...]
    children: tuple[Structure, ...]


class StructSequenceNode(msgspec.Struct, frozen=True, tag="structseq", array_like=True):
    """A struct sequence, as time.struct_time."""

    cls: str
    fields: tuple[str, ...]
    children: tuple[Structure, ...]


class DataclassNode(msgspec.Struct, frozen=True, tag="dataclass", array_like=True):
    """A dataclass of the class `cls`, with its fields in order."""

    cls: str
    fields: tuple[str, ...]
    children: tuple[Structure, ...]


class CustomNode(msgspec.Struct, frozen=True, tag="custom", array_like=True):
    """A registered class; `auxiliary` is what its flatten function returned beside the children."""

    cls: str
    auxiliary: Value
    keys: tuple[Value, ...]
    children: tuple[Structure, ...]


class TensorNode(msgspec.Struct, frozen=True, tag="tensor", array_like=True):
    """A tensor that is made of others: of a subclass that wraps tensors, sparse, or nested; see `TensorParts`."""

    cls: str
    """The class, `module:qualname`; for sparse and nested tensors `torch:` and the layout."""
    context: Value
    """What the class keeps beside the tensors."""
    shape: tuple[int, ...]
    """The shape of the whole tensor; -1 for a dimension whose length differs between the members of a nested tensor."""
    strides: tuple[int, ...] | None
    kind: str
    """The kind of the tensor, as of an `ArraySpec`: "tensor", "parameter" or "buffer"."""
    requires_grad: bool
    layout: MeshLayout | None
    """The layout of a distributed tensor whose local tensor is made of others; None for any other."""
    keys: tuple[str, ...]
    children: tuple[Structure, ...]


class PerRankNode(msgspec.Struct, frozen=True, tag="per_rank", array_like=True):
    """One child structure per group of ranks whose subtrees have the same structure."""

    ranks: tuple[Runs, ...]
    children: tuple[Structure, ...]


class TableNode(msgspec.Struct, frozen=True, tag="table", array_like=True):
    """A `KeyedTable`; its children are ids, the first row of each bucket, a dict of slots, and scalars.

    Of one that is saved as deltas there is one more, a list of a dict for each delta, with the keys `DELTA_KEYS`: a
    table of the rows that replace those of the tables before it or are new, and one of ids that are deleted.
    """

    table: TableSpec
    children: tuple[Structure, ...]


class AbsentNode(msgspec.Struct, frozen=True, tag="absent", array_like=True):
    """In one rank's tree, a subtree that another rank gives (`FromRank`); no tree that is saved has one."""

    rank: int
    children: tuple[Structure, ...] = ()


Node = (
    DictNode
    | OrderedDictNode
    | DefaultDictNode
    | ListNode
    | TupleNode
    | DequeNode
    | NamedTupleNode
    | StructSequenceNode
    | DataclassNode
    | CustomNode
    | TensorNode
    | PerRankNode
    | TableNode
    | AbsentNode
)
Structure = Node | None
"""A node, or None for a leaf, `null` in JSON."""

TABLE_KEYS = ("ids", "offsets", "slots", "scalars")
"""The keys of a table's children."""
TABLE_DELTAS = "deltas"
"""The key of one more child, of a table that is saved as deltas."""
DELTA_KEYS = ("rows", "deleted")
"""The keys of a delta."""
USUAL_PATH_LENGTH = 1024
"""Characters of a path that do not count towards `MAX_EXTRA_PATH_CHARS`."""
MAX_EXTRA_PATH_CHARS = 1 << 25
"""Limit of the further characters of all paths together: a name is repeated in all paths below it."""
_MAX_CACHED_KEYS = 16
"""Nodes with more keys are not cached: they are seldom repeated."""
_NUMBER = re.compile(r"-?[0-9]+")


def check_stack(path: str = "") -> None:
    """Checks that the calls which are under way leave room for walking a tree of `MAX_DEPTH` levels.

    Raises:
        TreeError: they do not.
    """

    def nest(left: int) -> int:
        return nest(left - 1) if left else 0

    try:
        nest(WALK_CALLS)
    except RecursionError as error:
        raise TreeError(
            path[:200],
            expected=f"room for {WALK_CALLS} nested calls, which a deep tree takes",
            found="less, below Python's recursion limit",
            hint="Call it from functions that are nested less, or raise sys.setrecursionlimit",
        ) from error


def too_deep(path: str, *, itself: bool = False) -> TreeError:
    """Returns the error for a container at a path below `MAX_DEPTH` others; `itself` if it is one of these."""
    return TreeError(
        path[:200],
        expected=f"a tree at most {MAX_DEPTH} levels deep",
        found="a container that holds itself" if itself else "a deeper one",
        hint="Look for a container that holds itself",
    )


def leaf_count(structure: Structure) -> int:
    """Returns the number of leaves of a structure."""
    if structure is None:
        return 1
    return sum(1 if child is None else leaf_count(child) for child in structure.children)


def key_text(key: object, path: str = "") -> str:
    """Returns one step of a path as text.

    Raises:
        TreeError: a key of a kind that cannot be stored.
    """
    kind = type(key)
    if kind is str:
        text: str = key  # pyright: ignore[reportAssignmentType]
        if text.isidentifier():  # most keys: no mark needed, no number, valid Unicode
            return text
        if not text.isascii():
            check_unicode(text, path)
        if "~" in text or "/" in text:
            return text.replace("~", "~0").replace("/", "~1")
        return f"~s{text}" if not text or (text[0] in "-0123456789" and _NUMBER.fullmatch(text)) else text
    if kind is int:
        try:
            return str(key)
        except ValueError as error:
            raise TreeError(path, expected="keys of at most 4300 digits", found="a longer number") from error
    if kind is bool:
        return "~b1" if key else "~b0"
    if key is None:
        return "~n"
    if kind is float and key == key:  # not nan, which may be in a dict twice
        return f"~f{key!r}"
    if kind is bytes:
        data: bytes = key  # pyright: ignore[reportAssignmentType]
        return f"~x{data.hex()}"
    if kind is tuple:
        parts: tuple[object, ...] = key  # pyright: ignore[reportAssignmentType]
        return "~(" + "~,".join(key_text(part, path) for part in parts) + "~)"
    raise TreeError(
        path,
        expected="dict keys of str, int, bool, float, None, bytes, or tuples of these",
        found=f"a key of {type_name(kind)}: {key!r:.60}",
        hint="Use a string instead",
    )


def child_path(path: str, key: object) -> str:
    """Returns the path of a child; raises as `key_text`."""
    text = key_text(key, path)
    return f"{path}/{text}" if path else text


def check_unicode(text: str, path: str) -> None:
    """Checks that JSON can hold a name.

    Raises:
        TreeError: naming it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TreeError(path, expected="keys that are valid Unicode", found=f"{text!r:.60}") from error


def rank_key(rank: int) -> str:
    """Returns the step of a path that leads to one rank's own subtree."""
    return f"~rank{rank}"


def index_path(path: str, rank: int) -> str:
    """Returns a path of one rank's tree in the form of the index, with `~rank*` for the rank."""
    mark = rank_key(rank)
    return "/".join("~rank*" if step == mark else step for step in path.split("/")) if mark in path else path


def parse_path(text: str) -> tuple[str, ...]:
    """Returns the steps of a path given as text: plain string keys unescaped, other keys with their marks."""
    if not text:
        return ()
    return tuple(
        step if step[:1] == "~" and step[:2] not in ("~0", "~1") else step.replace("~1", "/").replace("~0", "~")
        for step in text.split("/")
    )


def keys_of(node: Node, path: str) -> Sequence[object]:
    """Returns the keys of a node's children: dict keys, field names or positions."""
    if isinstance(node, (DictNode, OrderedDictNode, DefaultDictNode, CustomNode)):
        keys = [decode_value(key, path) if type(key) is TypedValue else key for key in node.keys]
        return check_hash_collisions(keys, path) if any(type(key) is TypedValue for key in node.keys) else keys
    if isinstance(node, (NamedTupleNode, StructSequenceNode, DataclassNode)):
        return node.fields
    if isinstance(node, TableNode):
        return table_keys(len(node.children))
    if isinstance(node, TensorNode):
        return node.keys
    return range(len(node.children))


class KeyTextCache:
    """A cache of the keys of nodes as text: nodes with the same keys repeat by the hundred thousand."""

    def __init__(self) -> None:
        self._known: dict[object, list[str]] = {}

    def of(self, node: Node, path: str) -> list[str]:
        """Returns the text of each key of a node; of a `PerRankNode`, `~rank*` for each child.

        Raises:
            TreeError, FormatError: a key of a kind that cannot be stored.
        """
        if type(node) is not DictNode:
            own = isinstance(node, PerRankNode)
            return ["~rank*" if own else key_text(key, path) for key in keys_of(node, path)]
        # 1, 1.0 and True are one key in a dict but not one text; a str never equals a key of another type
        cached = len(node.keys) <= _MAX_CACHED_KEYS and set(map(type, node.keys)) == {str}
        texts = self._known.get(node.keys) if cached else None
        if texts is None:
            texts = [key_text(key, path) for key in keys_of(node, path)]
            if cached:
                self._known[node.keys] = texts
        return texts


def paths_of(structure: Structure) -> list[tuple[str, Runs | None]]:
    """Returns each leaf's path, in order; under a `PerRank`, with its ranks, and `~rank*` in place of the rank.

    Raises:
        FormatError: a structure that no tree has, is too deep, or has too long paths.
    """
    paths: list[tuple[str, Runs | None]] = []
    texts, nchars = KeyTextCache(), 0
    # without recursion: a file may nest deeper than the stack has room for
    opened: list[Iterator[tuple[str, Structure, Runs | None]]] = [iter([("", structure, None)])]
    while opened:
        for path, node, ranks in opened[-1]:
            if node is None:
                paths.append((path, ranks))
                continue
            children = node.children
            nchars += extra_path_chars(path, len(children))
            if len(opened) > MAX_DEPTH:
                raise FormatError(path[:200], expected=f"at most {MAX_DEPTH} levels", found="a deeper structure")
            if nchars > MAX_EXTRA_PATH_CHARS:
                raise FormatError(path[:200], expected="names of a usual length", found=f"paths of {nchars} characters")
            if type(node) is not DictNode:
                _check_node(node, path)
            steps = texts.of(node, path)
            if len(steps) != len(children):
                raise FormatError(path, expected=f"{len(steps)} children", found=f"{len(children)}")
            below = [f"{path}/{step}" for step in steps] if path else steps
            if isinstance(node, PerRankNode):
                opened.append(zip(below, children, node.ranks, strict=True))
                break
            if children.count(None) != len(children):
                opened.append(zip(below, children, repeat(ranks)))
                break
            paths.extend([(leaf, ranks) for leaf in below])
        else:
            opened.pop()
    return paths


def extra_path_chars(path: str, count: int) -> int:
    """Returns the characters beyond the usual length of the paths to `count` children of this path."""
    return (len(path) - USUAL_PATH_LENGTH) * count if len(path) > USUAL_PATH_LENGTH else 0


def containers_of(structure: Structure) -> Iterator[tuple[Node, str, Runs | None]]:
    """Yields each container of a checked structure before those in it, with its path and ranks as in `paths_of`."""
    texts = KeyTextCache()
    waiting: list[tuple[Structure, str, Runs | None]] = [(structure, "", None)]
    while waiting:
        node, path, ranks = waiting.pop()
        if node is None:
            continue
        yield node, path, ranks
        if node.children.count(None) == len(node.children):
            continue
        groups = node.ranks if isinstance(node, PerRankNode) else [ranks] * len(node.children)
        prefix = path + "/" if path else ""
        below = zip(texts.of(node, path), node.children, groups, strict=True)
        waiting += reversed([(child, prefix + step, group) for step, child, group in below if child is not None])


def empty_container_paths(structure: Structure) -> list[str]:
    """Returns the paths of empty containers, of a structure whose depth was checked."""
    return [path for node, path, _ in containers_of(structure) if not node.children]


def tables_of(structure: Structure) -> dict[tuple[str, Runs | None], TableSpec]:
    """Returns each table, by the path of its ids and its ranks, both as `paths_of` returns them."""
    return {
        (f"{path}/{TABLE_KEYS[0]}" if path else TABLE_KEYS[0], ranks): node.table
        for node, path, ranks in containers_of(structure)
        if isinstance(node, TableNode)
    }


def table_columns(structure: Structure) -> dict[str, int]:
    """Returns the path of each array of tables, and the number of the table, or of its delta, of which it is a column.

    Tables under `PerRank` are left out.
    """
    columns: dict[str, int] = {}
    numbers: dict[tuple[str, ...], int] = {}
    deltas = set[str]()
    for node, path, ranks in containers_of(structure):
        if not isinstance(node, TableNode) or ranks is not None or path in deltas:
            continue
        prefix = f"{path}/" if path else ""
        for leaf, _ in paths_of(node):
            steps = leaf.split("/")
            if steps[0] == TABLE_DELTAS:
                deltas.add(prefix + "/".join(steps[:3]))
            if steps[0] != TABLE_KEYS[3]:  # scalars are values, or arrays that change
                part = (path, *steps[:2]) if steps[0] == TABLE_DELTAS else (path,)
                columns[prefix + leaf] = numbers.setdefault(part, len(numbers) + 1)
    return columns


def table_keys(children: int) -> tuple[str, ...]:
    """Returns the keys of a table with so many children."""
    return TABLE_KEYS if children <= len(TABLE_KEYS) else (*TABLE_KEYS, TABLE_DELTAS)


def deltas_of(table: TableNode) -> Sequence[Structure]:
    """Returns the deltas of a table, the earliest first."""
    deltas = table.children[len(TABLE_KEYS)] if len(table.children) > len(TABLE_KEYS) else None
    return () if deltas is None else deltas.children


def _is_delta(delta: Structure, table: TableNode) -> bool:
    """Whether a node is a delta of a table: two tables of the same buckets, one with its slots, and one without."""
    if not isinstance(delta, DictNode) or delta.keys != DELTA_KEYS:
        return False
    rows, deleted = delta.children
    if not isinstance(rows, TableNode) or not isinstance(deleted, TableNode) or deltas_of(rows) or deltas_of(deleted):
        return False
    same_slots = len(rows.children) > 2 and rows.children[2] == table.children[2]
    return same_slots and rows.table == deleted.table == table.table


def _check_node(node: Node, path: str) -> None:
    if isinstance(node, PerRankNode):
        if len(node.ranks) != len(node.children):
            raise FormatError(path, expected="ranks for each subtree", found=f"{len(node.ranks)}")
        for group in node.ranks:
            check_runs(group, path=path, low=0)
    elif isinstance(node, OrderedDictNode):
        if node.attributes is not None:
            node.attributes.check(path)
    elif isinstance(node, AbsentNode):
        raise FormatError(
            path,
            expected=f"a value from rank {node.rank}, which FromRank names",
            found="nothing at this path on that rank",
            hint="Name a rank that has it",
        )
    elif isinstance(node, DequeNode):
        if node.maxlen is not None and not len(node.children) <= node.maxlen < 1 << 63:
            raise FormatError(path, expected=f"a deque of {len(node.children)} or more", found=f"maxlen {node.maxlen}")
    elif isinstance(node, TableNode):
        kinds = [child if child is None else type(child) for child in node.children]
        whole = kinds[:4] == [None, None, DictNode, DictNode] and kinds[4:] in ([], [ListNode])
        if not whole or not 0 < node.table.buckets < 1 << 32 or not all(map(_is_delta, deltas_of(node), repeat(node))):
            names = ", ".join("a leaf" if kind is None else kind.__name__ for kind in kinds[:8])
            raise FormatError(path, expected="a table's ids, offsets, slots and scalars", found=names or "nothing")


# subtrees that repeat -----------------------------------------------------------------------------------------------
MAX_SHARED = 32
"""The number of places of shared subtrees: it limits how much larger than its file a structure can become."""
MAX_REPEATED_CHILDREN = 3
"""A node of so few children is written again: a mark would be no shorter."""


def extract_shared_subtrees(structure: Structure) -> tuple[Structure, tuple[Structure, ...]]:
    """Returns the structure without its largest repeated subtrees, and these. No subtree lies inside of another one."""
    counts = Counter(map(_key, _nodes(structure)))
    taken: dict[bytes, tuple[int, Structure]] = {}
    places = 0

    def without(node: Structure) -> Structure:
        nonlocal places
        if node is None or isinstance(node, PerRankNode):
            return node
        key = _key(node)
        if counts[key] > 1 and len(node.children) > MAX_REPEATED_CHILDREN and places < MAX_SHARED:
            places += 1
            return CustomNode("", taken.setdefault(key, (len(taken), node))[0], (), ())
        children = tuple([None if child is None else without(child) for child in node.children])
        return node if children == node.children else msgspec.structs.replace(node, children=children)

    bare = without(structure)
    return bare, tuple(node for _, node in taken.values())


def _key(node: Node) -> bytes:
    return msgspec.json.encode(node)  # the keys 1 and True are equal, but not the same


def _nodes(structure: Structure) -> Iterator[Node]:
    waiting = [structure]
    while waiting:
        node = waiting.pop()
        if node is not None and not isinstance(node, PerRankNode):
            yield node
            waiting += node.children


def expand_shared_subtrees(structure: Structure, shared: tuple[Structure, ...], name: str) -> Structure:
    """Returns the structure with the shared subtrees in their places.

    Raises:
        FormatError: there is no subtree of that number, or there are too many places.
    """
    places = 0

    def full(node: Structure) -> Structure:
        nonlocal places
        if node is None:
            return None
        if isinstance(node, CustomNode) and not node.cls:
            places += 1
            number = node.auxiliary
            if type(number) is not int or not 0 <= number < len(shared) or places > MAX_SHARED:
                raise FormatError(name, expected="one of the shared subtrees", found=f"{number!r:.80}")
            return shared[number]
        children = list(node.children)
        for position, child in enumerate(children):
            if child is not None:
                children[position] = full(child)
        made = tuple(children)
        return node if made == node.children else msgspec.structs.replace(node, children=made)

    return full(structure)
