"""What a hop was fed, bit for bit, so that another server can be brought to the same state.

Keeps for each row the hidden states that the hop received, as they stood on the wire. What goes beyond `memory_bytes`
lies in an unnamed temporary file. Not thread-safe: one session's task uses it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch


@dataclass(slots=True)
class _Piece:
    """Consecutive tokens of one row `[tokens, hidden]`: in memory, or at `offset` of the file."""

    tokens: int
    tensor: torch.Tensor | None
    offset: int = 0


class Journal:
    """Inputs of one hop, row by row."""

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype, memory_bytes: int) -> None:
        self._rows: list[list[_Piece]] = [[] for _ in range(rows)]
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._memory_bytes = memory_bytes
        self._in_memory = 0
        self._file: BinaryIO | None = None
        self._file_end = 0

    @property
    def positions(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(sum(piece.tokens for piece in row) for row in self._rows)

    @property
    def spilled_bytes(self) -> int:
        """Bytes written to disk so far."""
        return self._file_end

    def append(self, hidden: torch.Tensor, lengths: Sequence[int]) -> None:
        """Take a step's input `[tokens, hidden]`, rows one after the other with these lengths. Not copied."""
        for row, part in zip(self._rows, torch.split(hidden, list(lengths)), strict=True):
            if len(part):
                row.append(_Piece(len(part), part))
        self._in_memory += hidden.nbytes
        if self._in_memory > self._memory_bytes:
            self._spill()

    def truncate(self, positions: Sequence[int]) -> None:
        """Forget all but the first `positions` tokens of each row.

        Raises:
            ValueError: if a row holds fewer.
        """
        for row, keep in zip(self._rows, positions, strict=True):
            surplus = sum(piece.tokens for piece in row) - keep
            if surplus < 0 or keep < 0:
                raise ValueError(f"a row of {surplus + keep} tokens cannot keep {keep}")
            while surplus:
                last = row[-1]
                dropped = min(surplus, last.tokens)
                if last.tensor is not None:
                    last.tensor = last.tensor[: last.tokens - dropped]
                    self._in_memory -= dropped * self._token_bytes
                last.tokens -= dropped
                surplus -= dropped
                if not last.tokens:
                    row.pop()

    def packed(self) -> torch.Tensor:
        """Return everything as one step's input `[tokens, hidden]`, rows one after the other."""
        parts = [self._read(piece) for row in self._rows for piece in row]
        return torch.cat(parts) if parts else torch.empty(0, self._hidden_size, dtype=self._dtype)

    def close(self) -> None:
        """Forget everything and give the disk back."""
        self._rows = [[] for _ in self._rows]
        self._in_memory = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _token_bytes(self) -> int:
        return self._hidden_size * self._dtype.itemsize

    def _spill(self) -> None:
        """Write all that is in memory to the file: what was fed long ago is read again only after a failure."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="shoal-journal-")  # noqa: SIM115 - closed by `close`
        for row in self._rows:
            for piece in row:
                if piece.tensor is not None:
                    data = piece.tensor.contiguous().view(torch.uint8).numpy().tobytes()
                    piece.offset, piece.tensor = self._file_end, None
                    self._file.seek(piece.offset)
                    self._file.write(data)
                    self._file_end += len(data)
        self._in_memory = 0

    def _read(self, piece: _Piece) -> torch.Tensor:
        if piece.tensor is not None:
            return piece.tensor
        assert self._file is not None
        self._file.seek(piece.offset)
        data = bytearray(self._file.read(piece.tokens * self._token_bytes))
        return torch.frombuffer(data, dtype=self._dtype).view(piece.tokens, self._hidden_size)
