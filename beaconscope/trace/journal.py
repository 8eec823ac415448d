"""The journal of a recording: takes blocks while the model generates, and becomes the trace at the end."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from beaconscope.errors import BeaconScopeError
from beaconscope.files import os_reason, remedy
from beaconscope.progress import Progress
from beaconscope.trace.encode import HeadEncoder
from beaconscope.trace.finalize import Refused, scan, write_trace
from beaconscope.trace.folder import JournalFolder, journal_path
from beaconscope.trace.metadata import check_layout, check_types, layout_to_json, plain
from beaconscope.trace.schema import (
    FORMAT_VERSION,
    BeaconChange,
    Eviction,
    HeadBlock,
    TokenBlock,
    TraceLayout,
    token_schema,
)
from beaconscope.trace.stream import StreamWriter
from beaconscope.trace.writer import Writer

_TOKENS = -1
"""Stands for the token stream where the others are named by their layer."""


class Journal:
    """A recording on its way to the disk; make one with `Journal.create`.

    Blocks are handed to a writer thread, which encodes and appends them at once: as a rule what is appended is safe
    from a kill of the process within milliseconds, and where the writer falls behind, `append` waits before the oldest
    block has been on its way for more than a second. Arrays of a block must not be changed after they were handed
    over. A journal is used by one thread.

    As a context manager it closes itself. A journal that was not finalised stays on the disk for
    ``beaconscope recover``.
    """

    def __init__(
        self, output: Path, folder: JournalFolder, layout: TraceLayout, metadata: dict[str, Any], queue_bytes: int
    ) -> None:
        self.output = output
        self._folder = folder
        self._layout = layout
        self._metadata = metadata
        self._next = {_TOKENS: 0} | {layer.layer: 0 for layer in layout.layers}
        self._closed = False
        # A model that computes in float32 is traced in float16 only by wish: then rounding is what was wished for.
        model = metadata.get("model", {})
        exact = "float32" not in str(model.get("dtype", ""))
        encoders = {layer.layer: HeadEncoder(layer, layout, exact=exact) for layer in layout.layers}
        streams = {_TOKENS: StreamWriter(folder.tokens_path, token_schema())}
        for number, encoder in encoders.items():
            streams[number] = StreamWriter(folder.layer_path(number), encoder.schema)
        self._writer = Writer(streams, encoders, queue_bytes)

    @classmethod
    def create(
        cls,
        output: Path,
        layout: TraceLayout,
        metadata: Mapping[str, Any],
        *,
        force: bool = False,
        queue_bytes: int = 64 << 20,
    ) -> Journal:
        """Begin a recording that will become ``output``.

        Parameters
        ----------
        output : Path
            The Parquet file to be. Its folder must exist.
        layout : TraceLayout
        metadata : mapping
            What is known at the start; see `TraceMetadata`. ``prompt_length`` must be there.
        force : bool
            Replace ``output`` (at the end only) and discard the journal of an interrupted recording.
        queue_bytes : int
            `append` waits when more than this is on its way to the disk.

        Raises
        ------
        BeaconScopeError
            Where ``output`` or a journal exists, another recording to ``output`` is running, or the folder cannot be
            written.
        ValueError
            For a layout or metadata that no trace can have.
        """
        output = Path(output)
        check_layout(layout)
        metadata = _first_metadata(layout, metadata, output)
        check_target(output, force=force)
        path = journal_path(output)
        try:
            path.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise BeaconScopeError(f"{path} is no folder; move it away or give another output") from error
        except OSError as error:
            raise BeaconScopeError(
                f"cannot write in {output.parent}: {os_reason(error)}; give another output"
            ) from error
        folder = JournalFolder.lock(path)
        try:
            _check_discards_nothing(folder, output, force=force)
            folder.clear()
            folder.write_metadata(metadata)
            return cls(output, folder, layout, metadata, queue_bytes)
        except OSError as error:
            _remove_if_possible(folder)
            raise BeaconScopeError(f"cannot write in {path}: {os_reason(error)}; give another output") from error
        except BaseException:
            folder.release()
            raise

    @property
    def length(self) -> int:
        """Positions appended so far to the tokens and to every layer."""
        return min(self._next.values())

    def append_tokens(self, block: TokenBlock) -> None:
        """Hand over the next tokens.

        Raises
        ------
        BeaconScopeError
            Where the disk refused this or an earlier block: what is safe, and what to do.
        ValueError
            Where the block does not follow the last one or its arrays do not fit together.
        """
        count = len(block.token_id)
        for name in ("token_bytes", "logprob", "entropy"):
            if len(getattr(block, name)) != count:
                raise ValueError(f"{name} has {len(getattr(block, name))} entries for {count} tokens")
        size = 32 * count + sum(map(len, block.token_bytes))
        self._hand_over(_TOKENS, block, block.first_position, count, size)

    def append(self, block: HeadBlock) -> None:
        """Hand over what a layer recorded for the next positions.

        Raises
        ------
        BeaconScopeError
            As `append_tokens`; also for vectors that the trace's type does not hold.
        ValueError
            Where the block does not follow the layer's last one or does not fit the layout.
        """
        size = _check_block(block, self._layout)
        self._hand_over(block.layer, block, block.first_position, len(block.query), size)

    def finalize(self, metadata: Mapping[str, Any] | None = None, *, progress: Progress | None = None) -> Path:
        """Turn the journal into the Parquet file and remove it.

        Parameters
        ----------
        metadata : mapping, optional
            Laid over what was given at the start. ``whole`` is true unless it says otherwise here, or the tokens and
            layers do not end at the same position: then only what all of them have is kept.
        progress : callable, optional
            Told the rows written and the rows in all.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        BeaconScopeError
            Where nothing was recorded, or the disk refuses. The journal is left for ``beaconscope recover`` then,
            unless it holds nothing.
        ValueError
            Where the journal is closed already.
        """
        self._check_open()
        try:
            self._close(whole=True)
            final = self._metadata | {"whole": True, "cut_reason": None} | plain(dict(metadata or {}))
            check_types(final, self.output)
            # For a recover after a finalisation that failed. Where not even this fits on the disk, the file will not.
            with contextlib.suppress(OSError):
                self._folder.write_metadata(final, final=True)
            found = scan(self._folder, self._layout)
            if found.length == 0 and self._recorded():
                raise BeaconScopeError(
                    f"{self._folder.path} was emptied while the recording ran, so {self.output} is not written; "
                    "record again, and leave it alone"
                )
            if found.length == 0:
                raise BeaconScopeError(f"nothing was recorded, so {self.output} is not written; generate some tokens")
            if found.length < found.longest and final["whole"]:
                final |= {"whole": False, "cut_reason": "the recording stopped between two layers of a step"}
            try:
                write_trace(found, self.output, self._layout, final, progress)
            except Refused as error:
                raise BeaconScopeError(
                    f"{error.what}; all {found.length} tokens are safe in {self._folder.path}: "
                    f"{error.remedy}, then run `beaconscope recover {self.output}`"
                ) from error
            # The trace is in place. A journal that cannot be removed now is by the next `beaconscope recover`.
            _remove_if_possible(self._folder)
        finally:
            self._leave()
        return self.output

    def close(self) -> None:
        """Write what is on its way and leave the journal for ``beaconscope recover``; nothing after `finalize`.

        A journal without a token that every layer has is removed: nothing could be recovered from it.

        Raises
        ------
        BeaconScopeError
            Where the disk refused a block.
        """
        if self._closed:
            return
        try:
            self._close(whole=False)
        finally:
            self._leave()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BeaconScopeError:
            # What ended the recording matters more than what the disk says to it.
            if kind is None:
                raise

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the journal is closed")

    def _close(self, *, whole: bool) -> None:
        self._closed = True
        self._writer.close(whole=whole)
        self._raise_failure()

    def _leave(self) -> None:
        """Give up the journal, and remove it where nothing could be recovered from it."""
        if not self._recorded():
            _remove_if_possible(self._folder)
        self._folder.release()

    def _recorded(self) -> int:
        """Positions of which everything has been handed to the operating system."""
        return min(self._writer.written.values())

    def _hand_over(self, stream: int, block: TokenBlock | HeadBlock, first: int, count: int, size: int) -> None:
        self._check_open()
        if first != self._next[stream]:
            name = "tokens" if stream == _TOKENS else f"layer {stream}"
            raise ValueError(f"a block of {name} begins at position {first}; expected {self._next[stream]}")
        if count:
            self._writer.put(stream, block, size)
            self._next[stream] += count
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure = self._writer.failure
        if failure is None:
            return
        safe = self._recorded()
        rescue = (
            f"{safe} tokens are safe in {self._folder.path}: run `beaconscope recover {self.output}`"
            if safe
            else "nothing is recorded yet"
        )
        if isinstance(failure, BeaconScopeError):
            raise BeaconScopeError(f"{failure}; {rescue}") from failure
        if isinstance(failure, OSError):
            raise BeaconScopeError(
                f"cannot write to {self._folder.path}: {os_reason(failure)}; {remedy(failure)}; {rescue}"
            ) from failure
        if isinstance(failure, MemoryError):
            raise BeaconScopeError(f"no memory is left to write to {self._folder.path}; {rescue}") from failure
        raise failure


def _remove_if_possible(folder: JournalFolder) -> None:
    """Remove a journal that holds nothing; it is only untidy where that fails."""
    try:
        folder.remove()
    except (OSError, BeaconScopeError):
        folder.release()


def check_target(output: Path, *, force: bool) -> None:
    """Refuse an output that cannot be, or must not be replaced.

    Raises
    ------
    BeaconScopeError
        Where it exists and ``force`` is not given, is a folder, or lies in no folder.
    """
    if output.is_dir():
        raise BeaconScopeError(f"{output} is a folder; give the path of a file")
    if not output.parent.is_dir():
        raise BeaconScopeError(f"folder {output.parent} does not exist; create it or give another output")
    if output.exists() and not output.is_file():
        raise BeaconScopeError(f"{output} is a device or a pipe, in whose place no file is put; give another output")
    if output.exists() and not force:
        raise BeaconScopeError(f"{output} exists; give --force to replace it, or another output")


def check_no_journal(output: Path, *, force: bool) -> None:
    """Refuse an output beside which the journal of another recording lies, as `Journal.create` does.

    Raises
    ------
    BeaconScopeError
        Where the recording is still running, or was interrupted and ``force`` is not given.
    """
    path = journal_path(output)
    if path.is_dir():
        folder = JournalFolder.lock(path)
        try:
            _check_discards_nothing(folder, output, force=force)
        finally:
            folder.release()


def _check_discards_nothing(folder: JournalFolder, output: Path, *, force: bool) -> None:
    if folder.holds_recording() and not force:
        raise BeaconScopeError(
            f"{folder.path} holds an interrupted recording; "
            f"run `beaconscope recover {output}`, or give --force to discard it"
        )


def _first_metadata(layout: TraceLayout, metadata: Mapping[str, Any], output: Path) -> dict[str, Any]:
    first: dict[str, Any] = {"created": datetime.now(UTC).isoformat(timespec="seconds")}
    first |= plain(dict(metadata))
    first |= {
        "format_version": FORMAT_VERSION,
        "recording_id": uuid.uuid4().hex,
        "layout": layout_to_json(layout),
        "whole": False,
        "cut_reason": None,
    }
    if not isinstance(first.get("prompt_length"), int):
        raise ValueError("metadata must give prompt_length")
    check_types(first, output)
    return first


def _check_block(block: HeadBlock, layout: TraceLayout) -> int:
    """Hold a block against the layout; its bytes in memory.

    Raises
    ------
    ValueError
        Naming the first array of a wrong shape, or a beacon change or eviction outside the block.
    """
    try:
        layer = layout.of(block.layer)
    except KeyError:
        raise ValueError(f"layer {block.layer} is not in the layout") from None
    count, heads, groups, hits = len(block.query), len(layer.kv_heads), layer.group_size, layout.hits
    shapes: dict[str, tuple[int, ...]] = {
        "query": (count, heads, groups, layer.key_size),
        "key": (count, heads, layer.key_size),
        "beacon": (count, heads, groups),
        "beacon_similarity": (count, heads, groups),
        "mass_sink": (count, heads, groups),
        "mass_local": (count, heads, groups),
        "mass_distant": (count, heads, groups),
        "hit_position": (count, heads, groups, hits),
        "hit_mass": (count, heads, groups, hits),
    }
    if layer.value_size is not None:
        shapes["value"] = (count, heads, layer.value_size)
    size = 0
    for name, shape in shapes.items():
        array = getattr(block, name)
        if np.shape(array) != shape:
            raise ValueError(f"{name} of layer {block.layer} has shape {np.shape(array)}; expected {shape}")
        size += array.nbytes
    events: tuple[BeaconChange | Eviction, ...] = (*block.beacon_changes, *block.evictions)
    for event in events:
        if not block.first_position <= event.position < block.first_position + count:
            raise ValueError(f"an event at position {event.position} is outside its block")
        if event.kv_head not in layer.kv_heads:
            raise ValueError(f"an event names KV head {event.kv_head}, which layer {block.layer} does not record")
    for change in block.beacon_changes:
        size += 64 * len(change.query_head) + (0 if change.vector is None else change.vector.nbytes)
    return size + sum(4 * len(eviction.evicted) for eviction in block.evictions)
