"""Conversion of a checkpoint to another format: opens, selects, checks and streams. See `convert`."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec

from .. import _api
from .._arrays.base import LazyArray
from .._core.format.files import step_of
from .._core.tree.paths import Selection, as_path, globs_of
from .._io.comm.comm import Comm, as_comm
from .._io.public_calls import gc_paused
from .._io.storage.foreign_formats import format_of_names
from .._io.storage.local_store import check_path
from .._io.storage.store import Store
from .._io.storage.wrapped_store import CountedStores, OnBytesRead
from .._loading.match import LoadOptions
from ..errors import CheckpointError, MismatchError
from ..rules import Renaming, Rule, Transforms, as_rules
from . import _contents as choosing
from ._contents import Contents, ConvertReport, Finding, open_source, read_contents, tree_of
from ._format_fit import (
    NOTHING,
    FittedContents,
    check_growth,
    check_source,
    fit_dcp,
    fit_safetensors,
    fit_torch,
    fit_treeckpt,
    own_nbytes,
    read_nbytes,
    refuse_losses,
)
from ._output import Output, OutputFile, check_free, run_output
from ._safetensors_write import is_written, lay_out_safetensors
from ._transform import cast_floats, transform, with_state_dicts

DEFAULT_MEMORY = 64 << 20
"""Bytes of buffers, unless told otherwise."""
MIN_BUFFER_NBYTES = 4 << 20
"""Bytes of buffers, at least, where another format than ours is written."""
SAVING_NBYTES = 56 << 20
"""Bytes that a save of ours takes: its own buffers, and what is read into them."""
SHARD_NBYTES = 5_000_000_000
"""Bytes of a file, unless told otherwise: the limit that Hugging Face has."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20,
          "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip
AnyPath = str | os.PathLike[str]


class ConvertOptions(TypedDict, total=False):
    """The options of `convert`, except for the format to write."""

    dtype: Any
    max_shard_size: int | str | None
    memory: int | str
    select: Selection
    exclude: Selection
    subtree: Any
    rename: Renaming
    transforms: Transforms
    hub_names: Any
    lossy: bool
    dry_run: bool
    overwrite: bool
    step: int | None
    comm: Any
    on_read: OnBytesRead | None


class ConvertJob(msgspec.Struct, frozen=True):
    """The options of `convert`, checked."""

    destination: str
    to: str
    directory: bool
    """Whether the format writes a directory to the destination."""
    dtype: Any
    max_shard_size: int | None
    memory: int
    select: tuple[str, ...]
    exclude: tuple[str, ...]
    subtree: str
    rules: tuple[Rule, ...]
    hub_names: Any
    lossy: bool
    dry_run: bool
    overwrite: bool
    step: int | None


def convert(
    source: AnyPath | Store,
    destination: AnyPath,
    *,
    to: str | None = None,
    dtype: Any = None,
    max_shard_size: int | str | None = None,
    memory: int | str = DEFAULT_MEMORY,
    select: Selection = None,
    exclude: Selection = None,
    subtree: Any = "",
    rename: Renaming = None,
    transforms: Transforms = None,
    hub_names: Any = None,
    lossy: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    step: int | None = None,
    comm: Any = None,
    on_read: OnBytesRead | None = None,
) -> ConvertReport:
    """Writes a checkpoint in another format. Call it on every rank: they share the bytes.

    What is read is compared with the checksums beside it: our own, and the CRC-32s in files of torch.save and DCP, but
    not after `torch.serialization.set_crc32_options(False)`. Files of safetensors and Paddle have none.

    >>> tc.convert.convert("run/step_00000100", "new.pt").leaves
    3

    Args:
        source: a checkpoint of any of `SOURCES`; the format is found by looking.
        destination: a local path; for our own format any path that `save` takes. It appears when it is whole, with the
            sidecar files (config.json, a tokenizer) in the directory, or beside the file.
        to: one of `FORMATS`; by default what the destination's suffix says, and our own without one.
        dtype: casts arrays of floating point while they are streamed: "bfloat16", say, or torch's or numpy's own.
        max_shard_size: bytes of a file, at most (a larger array alone), e.g. "5GB": for a directory of several.
        memory: bytes of buffers, at most; saving in our own format needs 56 MiB.
        select, exclude: globs over paths, after the rules, and all below them. What is left out need not be readable
            without running code; as an element of a sequence it becomes None, so that the others stay where they are.
        subtree: a path, as text or keys: what is below it is the tree. All names begin there, in select and rules too.
        rename, transforms, comm: as in `load` and `save`: as if saved so.
        hub_names: a model of transformers, or its config, whose `save_pretrained` gives names and layouts to its state.
        lossy: goes without what the format cannot hold, instead of refusing it.
        dry_run: writes nothing; the report says what would be lost, and what changes its form.
        overwrite: replaces a file, and sidecar files beside it, or a checkpoint of ours; other directories never.
        step: of training, kept in a checkpoint of ours; by default that of the destination's name, or of the source.
        on_read: takes the bytes that were read and those to read (None where ranks share them), from any thread.

    Raises:
        CheckpointNotFound, FormatError, CorruptError: the state of the source, or views in it of far more bytes.
        TreeError: what cannot be read without running code, or what the format cannot hold.
        MismatchError: arguments that do not fit the source, or values that a cast would turn into infinity.
        CheckpointExists: there is something at the destination, or another sidecar file beside it.
    """
    to, directory = _format(text := os.fspath(destination), to)
    budget, limit = _sizes(to, directory, memory, max_shard_size)
    rules, left_out = as_rules(rename, transforms), globs_of(exclude, "exclude") or ()
    tree = (globs_of(select) or (), left_out, as_path(subtree, "subtree"), rules, hub_names)
    options = ConvertJob(text, to, directory, dtype, limit, budget, *tree, lossy, dry_run, overwrite, step)
    return _convert(source, options, as_comm(comm), CountedStores(on_read))


@gc_paused()
def _convert(source: AnyPath | Store, options: ConvertJob, comm: Comm, counted: CountedStores) -> ConvertReport:
    """Opens the source, selects and casts its leaves, checks what the format can hold, and writes."""
    begin = time.perf_counter()
    dry_run = options.dry_run
    # a rule may leave out a part of what an entry of an archive holds: its checksum needs all of it
    alone = comm.size == 1 and not options.rules and options.hub_names is None
    checkpoint = open_source(source, counted, alone=alone)
    with contextlib.closing(checkpoint.store):
        contents = read_contents(checkpoint)
        below = LoadOptions(below=options.subtree).for_structure(contents.structure).below
        chosen = _chosen(choosing.subtree(contents, below), options)
        # a save takes these from rank 0 alone; all ranks lay out the files of other formats
        sidecars = {name: read() for name, read in chosen.sidecars} if options.to != "treeckpt" or not comm.rank else {}
        if alone and not dry_run:
            counted.expect(partial(read_nbytes, chosen, options.to))
        if options.to in ("torch", "dcp"):
            chosen = with_state_dicts(chosen, numbered=options.to == "torch")
        cast = cast_floats(chosen, options.dtype) if options.dtype is not None else chosen
        written_as = WRITTEN[options.to]
        held = written_as.fit(cast)
        contents = held.contents
        if not (dry_run or options.lossy):
            refuse_losses(contents, options.to)
        output = None if written_as.lay_out is None else written_as.lay_out(held, options)
        # with the layout at hand, and before any checksum is computed or file is made
        check_growth(chosen, own_nbytes(contents) if output is None else output.nbytes)
        left = () if written_as.keeps_files else tuple(sidecars)
        if output is not None:
            output, left = _with_sidecars(output, sidecars, Path(options.destination).name)
        if not dry_run:
            lost = {finding.path for finding in contents.findings if finding.lost}
            read = [(path, leaf) for path, leaf in chosen.leaves if path not in lost]
            chosen.sums.check(read, comm, options.destination)
            if comm.size == 1:
                choosing.read_together(read)
        if output is not None:
            names, written = _write(output, options, comm)
        else:
            assert written_as.write is not None, "a format without a layout writes its files itself"
            names, written = written_as.write(held, sidecars, options, comm)
        assert dry_run or chosen.sums.all_read(), "all bytes of a source are read"
    arrays = [leaf for _, leaf in contents.leaves if isinstance(leaf, LazyArray)]
    losses = tuple(finding for finding in contents.findings if finding.lost)
    notes = tuple(finding for finding in contents.findings if not finding.lost)
    return ConvertReport(
        source=chosen.label,
        destination=options.destination,
        source_format=chosen.format,
        format=options.to,
        leaves=len(contents.leaves) - sum(finding.becomes == NOTHING for finding in losses),
        arrays=len(arrays),
        nbytes=sum(leaf.nbytes for leaf in arrays),
        files=names,
        written_nbytes=written,
        notes=(*notes, *_left_behind(chosen, left, options.to)),
        losses=losses,
        dry_run=dry_run,
        seconds=time.perf_counter() - begin,
    )


def _left_behind(source: Contents, sidecars: Iterable[str], to: str) -> list[Finding]:
    """Returns what of a source is no part of what is written: files, and custom metadata.

    Args:
        sidecars: the names of its sidecar files that have no place there.
    """
    notes = [
        Finding(name, "files of one format", "a file beside those read", "no part of it") for name in source.unread
    ]
    notes += [
        Finding(name, "files of the format", "a sidecar file that has no place there", "no part of it")
        for name in sidecars
    ]
    if to != "treeckpt":
        gone = [key for key, value in source.metadata.items() if to != "safetensors" or not is_written(key, value)]
        notes += [Finding(name, "a tree alone", "custom metadata", "no part of it") for name in gone]
    return notes


def _chosen(contents: Contents, options: ConvertJob) -> Contents:
    """Returns the contents after the rules, of which the wanted leaves are kept; names of the hub come last."""
    wanted = LoadOptions(options.select or None, exclude=options.exclude or None)
    if options.rules:
        # before the rules: what they make is in no file
        check_source(contents)
        contents = transform(contents, options.rules)
        contents = choosing.choose(contents, wanted.for_structure(contents.structure))
    else:
        contents = choosing.choose(contents, wanted.for_structure(contents.structure))
        check_source(contents)
    if options.hub_names is None:
        return contents
    from ..integrations.transformers import hub_rules

    specs = {path: leaf.spec if isinstance(leaf, LazyArray) else None for path, leaf in contents.leaves}
    return transform(contents, hub_rules(options.hub_names, specs))


def _with_sidecars(output: Output, sidecars: Mapping[str, bytes], place: str) -> tuple[Output, tuple[str, ...]]:
    """Returns an output with the sidecar files, and the names of those that have names of files of the format.

    Args:
        place: the name of the destination.
    """
    names = [file.name or place for file in output.files]
    kind = format_of_names(names)
    taken = {name.lower() for name in names}
    left = tuple(name for name in sidecars if name.lower() in taken or format_of_names([*names, name]) != kind)
    files = [OutputFile(name, len(data), ((0, data),)) for name, data in sidecars.items() if name not in left]
    return msgspec.structs.replace(output, files=(*output.files, *files)), left


def _write(output: Output, options: ConvertJob, comm: Comm) -> tuple[tuple[str, ...], int]:
    """Writes another format; returns the names of the files, and the bytes that this rank wrote."""
    place, written = local_destination(options.destination), 0
    if options.dry_run:
        check_free(place, output, overwrite=options.overwrite)
    else:
        written = run_output(output, place, comm, memory=options.memory, overwrite=options.overwrite)
    return tuple(file.name or Path(options.destination).name for file in output.files), written


def _save(
    held: FittedContents, sidecars: Mapping[str, bytes], options: ConvertJob, comm: Comm
) -> tuple[tuple[str, ...], int]:
    """Saves a checkpoint of ours; returns the names of its files, and the bytes that this rank wrote."""
    if options.dry_run:
        return (), 0
    contents = held.contents
    step = step_of(options.destination.rstrip("/").rpartition("/")[2]) if options.step is None else options.step
    report = _api.save(
        options.destination,
        tree_of(contents),
        step=contents.step if step is None else step,
        comm=comm,
        custom_metadata=contents.metadata,
        files=sidecars or None,
        overwrite=options.overwrite,
        max_shard_bytes=options.max_shard_size,
    )
    return report.files, report.nbytes


def _format(destination: str, to: str | None) -> tuple[str, bool]:
    """Returns the format to write, and whether it is a directory."""
    path = Path(destination)
    # the format that was registered last is asked first, as where files are read
    ends = ((name, end) for name, one in reversed(WRITTEN.items()) for end in one.suffixes)
    kind = to or next((name for name, end in ends if path.name.endswith(end) and path.name != end), "treeckpt")
    if kind not in WRITTEN:
        raise MismatchError("to", expected=f"one of {', '.join(FORMATS)}", found=f"{kind!r}")
    return kind, kind == "dcp" or (kind == "safetensors" and path.suffix != ".safetensors")


def _sizes(to: str, directory: bool, memory: int | str, max_shard_size: int | str | None) -> tuple[int, int | None]:
    """Returns the bytes of buffers, and of a file."""
    budget = _bytes(memory, "memory")
    least = SAVING_NBYTES if to == "treeckpt" else MIN_BUFFER_NBYTES
    if budget < least:
        raise MismatchError("memory", expected=f"at least {least} bytes, for {to}", found=f"{budget}")
    if max_shard_size is None:
        return budget, None
    if not directory and to != "treeckpt":
        raise MismatchError(
            "max_shard_size",
            expected="a destination that can have several files",
            found=f"one {to} file",
            hint="Leave the suffix away to get a directory" if to == "safetensors" else "Leave it out",
        )
    return budget, _bytes(max_shard_size, "max_shard_size")


def _bytes(size: int | str, name: str) -> int:
    """Parses a number of bytes, with or without a unit: "5GB", "64MiB"."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not (number := int(float(match[1]) * unit)):
        raise MismatchError(name, expected="bytes, as 5000000 or 5GB", found=f"{size!r}")
    return number


def local_destination(destination: str) -> Path:
    """Returns the local path of a destination; refuses a URL."""
    check_path(destination)
    scheme, separator, rest = destination.partition("://")
    if separator and scheme != "file":
        raise CheckpointError(
            destination,
            expected="a local path",
            found=f"{scheme}://",
            hint="Convert to a local path, and copy it there",
        )
    if any("\ud800" <= character <= "\udfff" for character in destination):
        raise CheckpointError(
            "destination", expected="a path that is text", found=f"{destination!r:.200}", hint="Rename it"
        )
    return Path(rest if separator else destination).absolute()


class WrittenFormat(msgspec.Struct, frozen=True):
    """How a format is written."""

    name: str
    fit: Callable[[Contents], FittedContents]
    """Returns the part of the contents that the format holds."""
    lay_out: Callable[[FittedContents, ConvertJob], Output] | None = None
    """Returns the files to write; None where `write` writes them."""
    write: Callable[[FittedContents, Mapping[str, bytes], ConvertJob, Comm], tuple[tuple[str, ...], int]] | None = None
    """Writes everything, or nothing if it is to be dry; returns the names of the files, and the bytes of this rank."""
    keeps_files: bool = False
    """Whether `write` writes the sidecar files too, which it takes by name. They lie beside files that are laid out."""
    suffixes: tuple[str, ...] = ()
    """The ends of the names of destinations that are of this format."""


WRITTEN: dict[str, WrittenFormat] = {}
"""The formats that can be written, by name."""
FORMATS: list[str] = []
"""Formats that can be written; `register` adds its own."""


def add_written(written: WrittenFormat) -> None:
    """Registers a format that can be written."""
    WRITTEN[written.name] = written
    FORMATS[:] = WRITTEN


def _lay_out_torch(held: FittedContents, options: ConvertJob) -> Output:
    from ._torch_write import lay_out_torch

    return lay_out_torch(held)


def _lay_out_dcp(held: FittedContents, options: ConvertJob) -> Output:
    from ._torch_write import lay_out_dcp

    return lay_out_dcp(held, max_shard_size=options.max_shard_size or SHARD_NBYTES)


def _lay_out_safetensors(held: FittedContents, options: ConvertJob) -> Output:
    return lay_out_safetensors(held, directory=options.directory, max_shard_size=options.max_shard_size or SHARD_NBYTES)


add_written(WrittenFormat("treeckpt", fit_treeckpt, write=_save, keeps_files=True))
add_written(WrittenFormat("torch", fit_torch, _lay_out_torch, suffixes=(".pt", ".pth", ".bin", ".ckpt")))
add_written(WrittenFormat("dcp", fit_dcp, _lay_out_dcp))
add_written(WrittenFormat("safetensors", fit_safetensors, _lay_out_safetensors, suffixes=(".safetensors",)))


def to_safetensors(source: AnyPath | Store, destination: AnyPath, **options: Unpack[ConvertOptions]) -> ConvertReport:
    """Writes safetensors: one file where the destination ends so, else a directory as Hugging Face has it.

    See `convert` for the options and errors.

    >>> tc.convert.to_safetensors("run/step_00000100", "hub", subtree="model", dtype="bfloat16").files
    ('model.safetensors',)
    """
    return convert(source, destination, to="safetensors", **options)


def to_torch_file(source: AnyPath | Store, destination: AnyPath, **options: Unpack[ConvertOptions]) -> ConvertReport:
    """Writes a file that `torch.load` takes with `weights_only=True`. See `convert` for the options and errors.

    >>> tc.convert.to_torch_file("run/step_00000100", "new.pt").leaves
    3
    """
    return convert(source, destination, to="torch", **options)


def to_dcp(source: AnyPath | Store, destination: AnyPath, **options: Unpack[ConvertOptions]) -> ConvertReport:
    """Writes a directory that torch.distributed.checkpoint loads. See `convert` for the options and errors.

    >>> tc.convert.to_dcp("run/step_00000100", "dcp").format
    'dcp'
    """
    return convert(source, destination, to="dcp", **options)


def to_treeckpt(source: AnyPath | Store, destination: AnyPath, **options: Unpack[ConvertOptions]) -> ConvertReport:
    """Writes a checkpoint of ours. See `convert` for the options and errors.

    >>> tc.convert.to_treeckpt("run/step_00000100", "run/step_00000200").arrays
    2
    """
    return convert(source, destination, to="treeckpt", **options)
