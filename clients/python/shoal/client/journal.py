"""What a hop was fed, bit for bit, so that another server can be brought to the same state.

Keeps for each row the hidden states that the hop received, as they stood on the wire. What goes beyond `memory_bytes`
lies in an unnamed temporary file. Not thread-safe: one session's tasks use it, on one loop.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import torch

_UNKNOWN = -1


@dataclass(slots=True)
class _Piece:
    """Consecutive tokens of one row `[tokens, hidden]`: in memory, or at `offset` of the file (negative: unknown)."""

    tokens: int
    tensor: torch.Tensor | None
    offset: int = 0


class _Row:
    """The pieces of one row."""

    __slots__ = ("pieces", "tokens")

    def __init__(self, pieces: Sequence[_Piece] = ()) -> None:
        self.pieces = [replace(piece) for piece in pieces]
        self.tokens = sum(piece.tokens for piece in self.pieces)

    def append(self, part: torch.Tensor) -> None:
        """Add tokens `[tokens, hidden]`."""
        self.pieces.append(_Piece(len(part), part))
        self.tokens += len(part)

    def truncate(self, keep: int) -> None:
        """Forget all but the first tokens."""
        surplus = self.tokens - keep
        if surplus < 0 or keep < 0:
            raise ValueError(f"a row of {self.tokens} tokens cannot keep {keep}")
        self.tokens = keep
        while surplus:
            last = self.pieces[-1]
            dropped = min(surplus, last.tokens)
            last.tokens -= dropped
            surplus -= dropped
            if last.tensor is not None:
                last.tensor = last.tensor[: last.tokens]
            if not last.tokens:
                self.pieces.pop()


JournalState = list[_Row]


class Journal:
    """Inputs of one hop, row by row."""

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype, memory_bytes: int) -> None:
        self._rows = [_Row() for _ in range(rows)]
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._memory_bytes = memory_bytes
        self._added_bytes = 0
        self._file: BinaryIO | None = None
        self._file_end = 0

    @property
    def positions(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(row.tokens for row in self._rows)

    @property
    def spilled_bytes(self) -> int:
        """Bytes written to disk so far."""
        return self._file_end

    def append(self, hidden: torch.Tensor, lengths: Sequence[int]) -> None:
        """Take a step's input `[tokens, hidden]`, rows one after the other with these lengths. Not copied."""
        parts = (hidden,) if len(self._rows) == 1 else torch.split(hidden, list(lengths))
        for row, part in zip(self._rows, parts, strict=True):
            if len(part):
                row.append(part)
        self._added_bytes += hidden.nbytes
        if self._added_bytes > self._memory_bytes:
            self._spill()

    def skip(self, lengths: Sequence[int]) -> None:
        """Count tokens that the hop did not have to be fed; they cannot be read."""
        for row, tokens in zip(self._rows, lengths, strict=True):
            if tokens:
                row.pieces.append(_Piece(tokens, None, _UNKNOWN))
                row.tokens += tokens

    def truncate(self, positions: Sequence[int]) -> None:
        """Forget all but the first `positions` tokens of each row.

        Raises:
            ValueError: if a row holds fewer.
        """
        for row, keep in zip(self._rows, positions, strict=True):
            row.truncate(keep)

    def reorder(self, sources: Sequence[int]) -> None:
        """Make each row a copy of the row of `sources`."""
        self._rows = [_Row(self._rows[source].pieces) for source in sources]

    def state(self) -> JournalState:
        """Return what `restore` needs to come back to this moment."""
        return [_Row(row.pieces) for row in self._rows]

    def restore(self, state: JournalState) -> None:
        """Come back to the moment of `state`."""
        self._rows = state

    def packed(self, before: Sequence[int], after: Sequence[int]) -> torch.Tensor:
        """Return tokens `[before, after)` of each row as one step's input `[tokens, hidden]`, row after row."""
        parts = [
            part
            for row, start, end in zip(self._rows, before, after, strict=True)
            for part in self._slice(row, start, end)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, self._hidden_size, dtype=self._dtype)

    def close(self) -> None:
        """Forget everything and give the disk back."""
        self._rows = [_Row() for _ in self._rows]
        self._added_bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _token_bytes(self) -> int:
        return self._hidden_size * self._dtype.itemsize

    def _slice(self, row: _Row, start: int, end: int) -> Iterator[torch.Tensor]:
        found = []
        at = row.tokens
        # From the end: what is asked for is the newest, or all.
        for piece in reversed(row.pieces):
            at -= piece.tokens
            if at >= end:
                continue
            if at + piece.tokens <= start:
                break
            found.append(self._read(piece)[max(0, start - at) : min(piece.tokens, end - at)])
        return reversed(found)

    def _spill(self) -> None:
        """Write all that is in memory to the file: what was fed long ago is read again only after a failure."""
        held = [piece for row in self._rows for piece in row.pieces if piece.tensor is not None]
        self._added_bytes = sum(piece.tokens for piece in held) * self._token_bytes
        if self._added_bytes <= self._memory_bytes:
            return  # much of it was forgotten since
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="shoal-journal-")  # noqa: SIM115 - closed by `close`
        for piece in held:
            assert piece.tensor is not None
            data = piece.tensor.contiguous().view(torch.uint8).numpy().tobytes()
            piece.offset, piece.tensor = self._file_end, None
            self._file.seek(piece.offset)
            self._file.write(data)
            self._file_end += len(data)
        self._added_bytes = 0

    def _read(self, piece: _Piece) -> torch.Tensor:
        if piece.tensor is not None:
            return piece.tensor
        if piece.offset == _UNKNOWN or self._file is None:
            raise ValueError("tokens that were never fed are not in the journal")
        self._file.seek(piece.offset)
        data = bytearray(self._file.read(piece.tokens * self._token_bytes))
        return torch.frombuffer(data, dtype=self._dtype).view(piece.tokens, self._hidden_size)
