"""The thread that brings a recording's blocks to the journal, so that the model does not wait for the disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from beaconscope.trace.encode import HeadEncoder, encode_tokens
from beaconscope.trace.schema import HeadBlock, TokenBlock
from beaconscope.trace.stream import StreamWriter

_LONGEST_WAY = 1.0
"""Seconds a block may be on its way to the disk before `Writer.put` waits for it."""


@dataclass(frozen=True)
class _Item:
    """A block on its way."""

    stream: int
    block: TokenBlock | HeadBlock
    size: int
    since: float


class Writer:
    """The thread that encodes and appends, fed through a queue that is bounded in bytes and in time."""

    def __init__(
        self, streams: Mapping[int, StreamWriter], encoders: Mapping[int, HeadEncoder], queue_bytes: int
    ) -> None:
        self.written = dict.fromkeys(streams, 0)
        """Positions that each stream has handed to the operating system."""
        self.failure: BaseException | None = None
        """What stopped the thread; it takes no more blocks then."""
        self._streams = streams
        self._encoders = encoders
        self._queue_bytes = queue_bytes
        # A block leaves the queue when it is written. None ends the thread.
        self._queue: deque[_Item | None] = deque()
        self._queued = 0
        self._changed = threading.Condition()
        # A daemon, so that a program that dies of something else is not kept alive by its journal.
        self._thread = threading.Thread(target=self._run, name="beaconscope-journal", daemon=True)
        self._thread.start()

    def put(self, stream: int, block: TokenBlock | HeadBlock, size: int) -> None:
        """Queue a block; wait while too much is queued or for too long."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._has_room(size))
            if self.failure is None:
                self._queue.append(_Item(stream, block, size, time.monotonic()))
                self._queued += size
                self._changed.notify_all()

    def close(self, *, whole: bool) -> None:
        """Wait for the queue to run empty, then close the streams."""
        with self._changed:
            self._queue.append(None)
            self._changed.notify_all()
        self._thread.join()
        for stream in self._streams.values():
            try:
                stream.close(whole=whole and self.failure is None)
            except OSError as error:
                self.failure = self.failure or error

    def _has_room(self, size: int) -> bool:
        oldest = self._queue[0] if self._queue else None
        if oldest is None:
            return True  # for a block larger than the bound too: it has the queue to itself then
        return self._queued + size <= self._queue_bytes and time.monotonic() - oldest.since < _LONGEST_WAY

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                item = self._queue[0]
            if item is None:
                return
            try:
                self._write(item.stream, item.block)
            except BaseException as error:  # raised again in the thread that appends
                with self._changed:
                    self.failure = error
                    self._queue.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._queue.popleft()
                self._queued -= item.size
                self._changed.notify_all()

    def _write(self, stream: int, block: TokenBlock | HeadBlock) -> None:
        if isinstance(block, TokenBlock):
            self._streams[stream].write(encode_tokens(block))
            self.written[stream] = block.first_position + len(block.token_id)
        else:
            for batch in self._encoders[stream].encode(block):
                self._streams[stream].write(batch)
            self.written[stream] = block.first_position + len(block.query)
