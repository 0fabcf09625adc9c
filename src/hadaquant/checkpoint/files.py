"""Safetensors files read and written in pieces, so that no file and no tensor need fit in memory.

A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the tensors'
bytes. The header is known as soon as the shapes are, so a writer can put it down first and fill the
rest in any order. Reads are plain reads of a byte range: a memory map would count as resident memory,
and a dtype that torch does not know can still be copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hadaquant.errors import CheckpointError

#: Safetensors' names of torch's dtypes.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: Bytes of a tensor that is copied as it is, at a time.
COPY_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a header says of one tensor: safetensors' dtype name, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> TensorSpec:
        """The spec of a tensor, which may be on the meta device.

        Raises:
            CheckpointError: safetensors has no name for its dtype.
        """
        if tensor.dtype not in _NAMES:
            raise CheckpointError(
                path=name, rule=f"safetensors cannot hold dtype {tensor.dtype}", fix="convert the tensor first"
            )
        return cls(dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape), nbytes=tensor.numel() * tensor.element_size())

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """torch's dtype, or None if torch has none."""
        return DTYPES.get(self.dtype)

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating-point numbers that torch can convert to float32."""
        return self.torch_dtype is not None and self.torch_dtype.is_floating_point


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor(TensorSpec):
    """One tensor in a file: its spec, and where its bytes are."""

    name: str
    path: Path
    start: int = field(repr=False)

    def read(self, first: int = 0, last: int | None = None) -> Tensor:
        """The tensor, or its rows ``first:last`` along the first dimension.

        Raises:
            CheckpointError: torch has no such dtype, or the file ends early.
        """
        if self.torch_dtype is None:
            raise CheckpointError(
                path=self.path, rule=f"{self.name!r} has dtype {self.dtype}, unknown to torch", fix="upgrade torch"
            )
        shape = self.shape
        row_bytes = self.nbytes
        if shape:
            last = shape[0] if last is None else last
            row_bytes = self.nbytes // shape[0] if shape[0] else 0
            shape = (last - first, *shape[1:])
        data = torch.empty(row_bytes * (shape[0] if shape else 1), dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(self.start + first * row_bytes)
            if file.readinto(data.numpy().data) != data.numel():
                raise CheckpointError(path=self.path, rule=f"ends within {self.name!r}", fix="the file is damaged")
        return data.view(self.torch_dtype).view(shape)

    def pieces(self) -> Iterator[bytes]:
        """All its bytes, in pieces, whatever the dtype."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            left = self.nbytes
            while left:
                piece = file.read(min(left, COPY_BYTES))
                if not piece:
                    raise CheckpointError(path=self.path, rule=f"ends within {self.name!r}", fix="the file is damaged")
                left -= len(piece)
                yield piece


@dataclass(frozen=True)
class SafetensorsFile:
    """A file's header: its tensors by name, and its metadata."""

    path: Path
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read a file's header.

        Raises:
            CheckpointError: missing, or not a valid safetensors file.
        """
        try:
            with safe_open(path, framework="pt"):  # checks the header against the file
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except FileNotFoundError as error:
            raise CheckpointError(path=path, rule="no such file", fix="check the path") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                path=path, rule=f"not a readable safetensors file ({error})", fix="download or write it again"
            ) from error
        metadata = header.pop("__metadata__", {})
        tensors = {
            name: StoredTensor(
                name=name,
                path=path,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
                start=8 + length + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
        return cls(path, tensors, metadata)


class SafetensorsWriter:
    """Writes one file: the header at once, then each tensor's rows in any order.

    ``with SafetensorsWriter(path, specs, metadata) as writer: writer.write(name, rows, first)``. On a
    clean exit the file is complete; what becomes of it on an error is the caller's business.

    Raises:
        CheckpointError: the file exists, or (on exit) a tensor has not been written in full.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        self.path, self.specs = path, specs
        # widest elements first, so that every tensor is aligned to its element
        order = sorted(specs, key=lambda name: (-_itemsize(specs[name]), name))
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        self._start: dict[str, int] = {}
        self._left = {name: spec.nbytes for name, spec in specs.items()}
        end = 0
        for name in order:
            spec = specs[name]
            header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (end, end + spec.nbytes)}
            self._start[name] = end
            end += spec.nbytes
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        try:
            self._file = path.open("xb")
        except FileExistsError as error:
            raise CheckpointError(path=path, rule="exists", fix="choose another name") from error
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + end)

    def write(self, name: str, rows: Tensor, first: int = 0) -> None:
        """Put rows of a tensor, from row ``first`` on, into their place."""
        spec = self.specs[name]
        row_bytes = spec.nbytes // spec.shape[0] if spec.shape and spec.shape[0] else 0
        data = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._put(name, first * row_bytes, data.data)

    def copy(self, name: str, source: StoredTensor) -> None:
        """Put another file's tensor into its place, bit for bit."""
        offset = 0
        for piece in source.pieces():
            self._put(name, offset, memoryview(piece))
            offset += len(piece)

    def _put(self, name: str, offset: int, data: memoryview) -> None:
        self._file.seek(self._data + self._start[name] + offset)
        self._file.write(data)
        self._left[name] -= len(data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                unfinished = [name for name, left in self._left.items() if left]
                if unfinished:
                    raise CheckpointError(path=self.path, rule=f"not written in full: {unfinished}", fix="write each")


def _itemsize(spec: TensorSpec) -> int:
    count = math.prod(spec.shape)
    return spec.nbytes // count if count else 1
