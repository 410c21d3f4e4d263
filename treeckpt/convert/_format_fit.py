"""The containers, values, dtypes and ties that each format holds, and the changes to all else, found before writing.

Also the limit of what is written: views can repeat the same bytes.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import LazyArray
from .._arrays.describe import describe_tree
from .._arrays.registry import encodable, resolve
from .._core.format.check_index import FREE_VIEW_NBYTES, VIEW_TIMES, check_claims
from .._core.planning.rank_trees import LeafSpec
from .._core.sharding.region import is_c_order
from .._core.text import count_text
from .._core.tree.dict_attributes import DictAttributes, encode_attributes
from .._core.tree.flatten import flatten
from .._core.tree.spec import StridedView
from .._core.tree.structure import (
    TABLE_KEYS,
    CustomNode,
    DataclassNode,
    DefaultDictNode,
    DequeNode,
    DictNode,
    ListNode,
    NamedTupleNode,
    Node,
    OrderedDictNode,
    PerRankNode,
    StructSequenceNode,
    Structure,
    TableNode,
    TensorNode,
    TupleNode,
    child_path,
    keys_of,
)
from .._foreign.pickle_reader import brief
from .._foreign.safetensors_read import METADATA, TAGS, tag_of
from ..errors import FormatError, TreeError
from ..trees._names import flatten_names
from ._contents import Contents, Finding, map_leaves, tree_of

NOTHING = "nothing"
"""What a leaf becomes that is not written."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_WRITTEN = "tensors of torch's dtypes"
_CONTAINERS = frozenset((DictNode, ListNode, TupleNode))
_TREE = "None, numbers, text, bytes, sets of these, and torch's dtypes, sizes and devices"


_PLAIN: dict[type, str] = {
    DictNode: "dict",
    OrderedDictNode: "OrderedDict",
    DefaultDictNode: "defaultdict",
    ListNode: "list",
    TupleNode: "tuple",
    DequeNode: "deque",
    NamedTupleNode: "namedtuple",
    StructSequenceNode: "struct sequence",
    DataclassNode: "dataclass",
    CustomNode: "registered class",
    TensorNode: "tensor made of others",
    PerRankNode: "state of each rank's own",
    TableNode: "keyed table",
}


LAZY_NODES = frozenset(_PLAIN) - {PerRankNode}
"""The kinds of containers that hold lazy leaves."""
_WITH_CLASSES = (NamedTupleNode, StructSequenceNode, DataclassNode, CustomNode, TensorNode)


def _is_known(node: Node) -> bool:
    """Returns whether the class that a node names is in this program, where it is needed to hold leaves."""
    if isinstance(node, TensorNode):  # a part that each rank has of its own has become a dict
        return not any(isinstance(child, DictNode) for child in node.children)
    if not isinstance(node, _WITH_CLASSES):
        return True
    try:
        resolve(node.cls)
    except LookupError:
        return False
    return True


def lower_containers(
    contents: Contents, holds: frozenset[type], holds_attribute: Callable[[Any], bool] = lambda _: True
) -> Contents:
    """Replaces containers that a format does not hold by plain ones.

    Args:
        holds_attribute: whether it holds an attribute of an OrderedDict, where it holds these.
    """
    findings: list[Finding] = []
    plain = ", ".join(name for kind, name in _PLAIN.items() if kind in holds)

    def walk(node: Structure, path: str) -> Structure:
        if node is None:
            return None
        parts: list[Structure] = []
        for key, child in zip(keys_of(node, path), node.children, strict=True):
            parts.append(None if child is None else walk(child, child_path(path, key)))
        children = tuple(parts)
        if type(node) in holds and _is_known(node):
            if isinstance(node, OrderedDictNode) and node.attributes is not None:
                given = node.attributes.decoded(path)
                kept = {name: value for name, value in given.items() if holds_attribute(value)}
                gone = [(name, value) for name, value in given.items() if name not in kept]
                findings.extend(Finding(f"{path}.{n}", "plain attributes", brief(v), "nothing", True) for n, v in gone)
                return OrderedDictNode(encode_attributes(kept, path) if gone else node.attributes, node.keys, children)
            return msgspec.structs.replace(node, children=children)
        made = _lowered(node, children)
        name = f"a {_PLAIN[type(node)]}" + (f" {node.cls}" if isinstance(node, _WITH_CLASSES) else "")
        without = ""
        if isinstance(node, OrderedDictNode) and node.attributes is not None:
            name, without = f"{name} with {_attributes_text(node.attributes)}", " without"
        findings.append(Finding(path, plain, name, f"a {_PLAIN[type(made)]}{without}"))
        return made

    structure = walk(contents.structure, "")
    return msgspec.structs.replace(contents, structure=structure, findings=(*contents.findings, *findings))


def _attributes_text(attributes: DictAttributes) -> str:
    """Returns what an OrderedDict has beside its items."""
    if attributes.metadata is None:
        return "attributes"
    return f"the versions of {count_text(len(attributes.metadata.names), 'module')}, its _metadata"


def _lowered(node: Node, children: tuple[Structure, ...]) -> Node:
    if isinstance(node, (OrderedDictNode, DefaultDictNode, CustomNode, TensorNode)):
        return DictNode(node.keys, children)
    if isinstance(node, (DataclassNode, TableNode)):
        return DictNode(node.fields if isinstance(node, DataclassNode) else TABLE_KEYS, children)
    return TupleNode(children) if isinstance(node, (NamedTupleNode, StructSequenceNode)) else ListNode(children)


class FittedContents(msgspec.Struct, frozen=True):
    """The part of some contents that a format holds."""

    contents: Contents
    ties: dict[str, Tie]
    names: dict[str, str] = {}
    """The name of each leaf in a format with flat names, by its path."""


class _LeafFit:
    """Fits leaves to one format, and collects what it changes.

    Args:
        holds: the leaves that the format holds.
        kinds: whether it holds parameters as such.
    """

    def __init__(self, holds: str, *, kinds: bool = False) -> None:
        self.holds, self.kinds = holds, kinds
        self.lost: list[Finding] = []
        self.changed: dict[tuple[str, str], list[str]] = {}
        """Paths of leaves by the change of their form: reported together."""
        self._tensors: dict[int, LazyArray] = {}

    def lose(self, path: str, found: str, becomes: str) -> None:
        self.lost.append(Finding(path, self.holds, found, becomes, True))

    def note(self, path: str, found: str, becomes: str) -> None:
        self.changed.setdefault((found, becomes), []).append(path)

    def with_findings(self, contents: Contents, *more: Finding) -> Contents:
        """Returns the contents with the findings."""
        notes: list[Finding] = []
        for (found, becomes), paths in self.changed.items():
            others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            notes.append(Finding(paths[0] + others, self.holds, found, becomes))
        findings = (*contents.findings, *self.lost, *notes, *more)
        return msgspec.structs.replace(contents, findings=findings)

    def leaf(self, path: str, leaf: Any) -> Any:
        """Returns a leaf as torch holds it; None if it cannot."""
        if isinstance(leaf, LazyArray):
            return self.array(path, leaf)
        numpy_scalar = isinstance(leaf, (np.bool_, np.integer, np.floating, np.complexfloating))
        # a long double is none: Python has no such number
        if numpy_scalar and type(leaf.item()) in _SCALARS:
            self.note(path, f"a {type(leaf).__name__} of numpy", f"a Python {type(leaf.item()).__name__}")
            return leaf.item()
        if not _is_plain(leaf):
            self.lose(path, f"{type(leaf).__module__}.{type(leaf).__qualname__} {brief(leaf)}", "None")
            return None
        return leaf

    def array(self, path: str, lazy: LazyArray) -> LazyArray | None:
        """Returns an array as a tensor, the same for the same array; None if it cannot be one."""
        spec = lazy.spec
        if not self.kinds and not is_c_order(spec.shape, spec.order):
            self.note(path, "an array whose dimensions lie in another order", "one in C order")
        if spec.kind == "numpy":
            import torch

            if not isinstance(vars(torch).get(spec.dtype), torch.dtype):
                self.lose(path, f"an array of {spec.dtype}", "None")
                return None
            self.note(path, "an array of numpy", "a tensor")
        elif spec.kind == "buffer" or (not self.kinds and (spec.kind != "tensor" or spec.requires_grad)):
            self.note(path, f"a {spec.kind}" + ", requires_grad" * spec.requires_grad, "a plain tensor")
        else:
            return lazy
        if id(lazy) not in self._tensors:
            plain = msgspec.structs.replace(spec, kind="tensor", requires_grad=False)
            self._tensors[id(lazy)] = LazyArray(plain, lazy.read, lazy.storage)
        return self._tensors[id(lazy)]


def _is_plain(value: Any) -> bool:
    """Returns whether torch.load takes a value with weights_only=True."""
    if type(value) in (set, bytearray):
        return type(value) is bytearray or all(type(item) in _SCALARS for item in value)
    if type(value) is collections.Counter:
        return all(type(item) in _SCALARS for pair in value.items() for item in pair)
    if type(value).__module__.partition(".")[0] == "torch":
        return encodable(value)
    return type(value) in _SCALARS


def _is_plain_tree(value: Any) -> bool:
    """Returns whether torch.load takes a value that may be a container with weights_only=True."""
    if type(value) in (dict, collections.OrderedDict):
        return all(_is_plain_tree(part) for pair in value.items() for part in pair)
    return all(map(_is_plain_tree, value)) if type(value) in (list, tuple) else _is_plain(value)


class Tie(msgspec.Struct, frozen=True):
    """A leaf that shows the array of another one, or a part of it."""

    of: str
    view: StridedView | None
    """The part that the leaf shows; None for the whole array in its own shape."""


def _ties_of(contents: Contents) -> dict[str, Tie]:
    """Returns by path the leaves that share an array with another leaf, as a save finds them."""
    arrays = map_leaves(contents, lambda _, leaf: leaf if isinstance(leaf, LazyArray) else None)
    # where a container was replaced by a plain one, the tree's own paths are not those of the leaves
    paths: dict[str, Any] = dict(flatten(tree_of(map_leaves(contents, lambda path, _: path)), rank=0)[1])
    described: Any = describe_tree(tree_of(arrays), rank=0)
    specs: list[LeafSpec] = [spec for spec in described.inventory.leaves if isinstance(spec, LeafSpec)]
    return {paths[spec.path]: Tie(paths[spec.alias_of], spec.view) for spec in specs if spec.alias_of is not None}


def fit_treeckpt(contents: Contents) -> FittedContents:
    """Fits contents to a checkpoint of ours."""
    return FittedContents(lower_containers(contents, LAZY_NODES), {})


def fit_torch(contents: Contents) -> FittedContents:
    """Fits contents to a file of torch.save that opens with weights_only=True."""
    held = frozenset((DictNode, OrderedDictNode, ListNode, TupleNode))
    contents = lower_containers(contents, held, _is_plain_tree)
    fit = _LeafFit(f"{_WRITTEN}, {_TREE}", kinds=True)
    contents = fit.with_findings(map_leaves(contents, fit.leaf))
    return FittedContents(contents, _ties_of(contents))


def fit_dcp(contents: Contents) -> FittedContents:
    """Fits contents to a DCP directory: a dict at the root, keys as text, each tensor by itself.

    Raises:
        TreeError: the root is no dict, or two leaves would have one name.
    """
    if not isinstance(contents.structure, (DictNode, OrderedDictNode)):
        raise TreeError(
            contents.label, expected="a dict at the root of a DCP checkpoint", found="another tree",
            hint="Take a part that is a dict (subtree=...)",
        )  # fmt: skip
    contents = lower_containers(contents, _CONTAINERS)
    fit = _LeafFit(f"{_WRITTEN}, {_TREE}, in dicts with text as keys")
    _check_keys(contents.structure, "", fit)
    contents = map_leaves(contents, fit.leaf)
    ties = [
        Finding(path, "each array by itself", f"a tie of {tie.of}", "a copy")
        for path, tie in _ties_of(contents).items()
    ]
    _names(contents)
    return FittedContents(fit.with_findings(contents, *ties), {})


def _check_keys(node: Structure, path: str, fit: _LeafFit) -> None:
    if node is None:
        return
    for key, child in zip(keys_of(node, path), node.children, strict=True):
        below = child_path(path, key)
        if isinstance(node, DictNode) and type(key) is not str:
            fit.note(below, f"a key of type {type(key).__name__}", "text")
        if isinstance(child, DictNode) and not child.children:
            fit.note(below, "an empty dict", "nothing")
        _check_keys(child, below, fit)


def _names(contents: Contents) -> dict[str, str]:
    """Returns the dotted names of leaves by path.

    Raises:
        TreeError: two leaves have the same.
    """
    numbered = map_leaves(contents, lambda path, _: path)
    return {path: name for name, path in flatten_names(tree_of(numbered)).items()}


def fit_safetensors(contents: Contents) -> FittedContents:
    """Fits contents to safetensors: arrays by name.

    Raises:
        TreeError: two leaves would have one name, or there are no arrays.
    """
    contents = lower_containers(contents, _CONTAINERS)
    fit = _LeafFit(f"tensors of {', '.join(TAGS.values())}")

    def change(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, LazyArray):
            return fit.lose(path, f"a value, {brief(leaf)}", NOTHING)
        if tag_of(leaf.spec) is None:
            without = "" if leaf.spec.shape else " without a dimension"
            return fit.lose(path, f"an array of {leaf.spec.dtype}{without}", NOTHING)
        if path == METADATA:
            return fit.lose(path, "an array of a name that the file has for its own metadata", NOTHING)
        return fit.array(path, leaf)

    contents = map_leaves(contents, change)
    names = _names(contents)
    if any(type(child) in _CONTAINERS for child in getattr(contents.structure, "children", ())):
        fit.note("", "nested containers", "names with dots")
    ties = _ties_of(contents)
    for path, tie in ties.items():
        if tie.view is not None:
            fit.note(path, f"a view of {tie.of}", "a copy")
    whole = {path: tie for path, tie in ties.items() if tie.view is None}
    tied = [
        Finding(path, "each array by itself", f"a tie of {tie.of}", "a name in the file's metadata, no tensor")
        for path, tie in whole.items()
    ]
    kept = {path: names[path] for path, leaf in contents.leaves if leaf is not None}
    return FittedContents(fit.with_findings(contents, *tied), whole, kept)


def fit_arrays(contents: Contents) -> FittedContents:
    """Fits contents to a format from outside: arrays by name, each by itself.

    Raises:
        TreeError: two leaves would have one name.
    """
    contents = lower_containers(contents, _CONTAINERS)
    fit = _LeafFit("arrays by name")

    def change(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, LazyArray):
            return fit.lose(path, f"a value, {brief(leaf)}", NOTHING)
        if leaf.spec.kind != "numpy":
            fit.note(path, f"a {leaf.spec.kind}", "an array of numpy")
        return leaf

    contents = map_leaves(contents, change)
    names = _names(contents)
    if any(type(child) in _CONTAINERS for child in getattr(contents.structure, "children", ())):
        fit.note("", "nested containers", "names with dots")
    kept = {path: names[path] for path, leaf in contents.leaves if leaf is not None}
    return FittedContents(fit.with_findings(contents), {}, kept)


def refuse_losses(contents: Contents, name: str) -> None:
    """Raises for the first leaf that would be lost.

    Raises:
        TreeError: naming it, and how many there are.
    """
    lost = [finding for finding in contents.findings if finding.lost]
    if not lost:
        return
    more = f", and {len(lost) - 1} more leaves like it" if len(lost) > 1 else ""
    raise TreeError(
        f"{lost[0].path}: {contents.label}",
        expected=f"what {name} holds: {lost[0].expected}",
        found=lost[0].found + more,
        hint="Name the part that is wanted, as subtree='model' (--subtree model), or use select= and exclude=; "
        "lossy=True (--lossy) goes without; dry_run=True (--dry-run) lists all",
    )


def _stored_nbytes(arrays: Sequence[tuple[str, LazyArray]]) -> int:
    """Returns the bytes of arrays, those of a storage once."""
    held = sum(leaf.nbytes for _, leaf in arrays if leaf.storage is None)
    reach = 0
    for start, size in sorted((a.storage.address, a.storage.nbytes) for _, a in arrays if a.storage is not None):
        held += max(0, start + size - max(start, reach))
        reach = max(reach, start + size)
    return held


def check_source(source: Contents) -> None:
    """Refuses arrays that take far more bytes than the files of the source; raises as `check_claims`."""
    arrays = [(path, leaf) for path, leaf in source.leaves if isinstance(leaf, LazyArray)]
    if arrays:
        path, _ = max(arrays, key=lambda pair: pair[1].nbytes)
        check_claims(_stored_nbytes(arrays), 0, source.present, f"{path}: {source.label}")


def check_growth(source: Contents, nbytes: int) -> None:
    """Refuses to write far more bytes than the arrays of a source have.

    Args:
        nbytes: to be written.

    Raises:
        FormatError: naming the leaf with the most bytes.
    """
    if nbytes <= FREE_VIEW_NBYTES:
        return
    arrays = [(path, leaf) for path, leaf in source.leaves if isinstance(leaf, LazyArray)]
    values = [leaf.getbuffer() if isinstance(leaf, io.BytesIO) else leaf for _, leaf in source.leaves]
    held = _stored_nbytes(arrays) + sum(
        len(value) for value in values if isinstance(value, (bytes, bytearray, str, memoryview))
    )
    if arrays and nbytes > FREE_VIEW_NBYTES + VIEW_TIMES * held:
        path, largest = max(arrays, key=lambda pair: pair[1].nbytes)
        raise FormatError(
            f"{path}: {source.label}",
            expected=f"at most {FREE_VIEW_NBYTES + VIEW_TIMES * held} bytes to write of arrays that take {held}",
            found=f"{nbytes} bytes, of which {largest.nbytes} are a view that shows the same bytes over and over",
            hint=f"Leave it out (exclude={path!r}, --exclude {path!r}), or save a copy of it in the place of the view",
        )


def read_nbytes(contents: Contents, to: str) -> int:
    """Returns the bytes of the arrays that a conversion reads: all but ours and torch have some ties by themselves."""
    sizes = {path: leaf.nbytes for path, leaf in contents.leaves if isinstance(leaf, LazyArray)}
    shares = to in ("treeckpt", "torch", "safetensors")
    ties = _ties_of(lower_containers(contents, _CONTAINERS)) if shares else {}
    left = [path for path, tie in ties.items() if to != "safetensors" or tie.view is None]
    return sum(sizes.values()) - sum(sizes[path] for path in left)


def own_nbytes(contents: Contents) -> int:
    """Returns the bytes of the arrays, beyond `FREE_VIEW_NBYTES` without ties and views of others."""
    total = sum(leaf.nbytes for _, leaf in contents.leaves if isinstance(leaf, LazyArray))
    # to find ties the whole tree is described: up to the limit of `check_growth` nothing depends on them
    return read_nbytes(contents, "treeckpt") if total > FREE_VIEW_NBYTES else total
