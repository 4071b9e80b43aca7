"""One chunk file, told to people: what its head says, where its bytes are, and whether they are sound."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from blendkv.container import ContainerReader, Head, Header, read_head
from blendkv.container.format import VERSION
from blendkv.errors import ChunkFileError
from blendkv.stores.checking import ANY_SIZE, contents_keys


@dataclass(frozen=True)
class Unit:
    """Layers that are decoded together, and bytes of their segments, checksums aside.

    Attributes:
        first: layer.
        last: layer.
        bytes: of all of it.
        keys: of it; None where the codec does not keep keys and values apart.
        values: of it.
    """

    first: int
    last: int
    bytes: int
    keys: int | None = None
    values: int | None = None


@dataclass(frozen=True)
class Inspection:
    """What a chunk file is.

    Attributes:
        key: that it lies under, or None.
        size: bytes.
        head: of the file.
        units: where the bytes of keys and values are.
        damaged: numbers of segments whose checksum or tag does not hold; None if they were not checked, for the file is
            sealed and no secret, or another one, was given.
        right_key: whether it lies under the key of its contents; None if that cannot be said: there is no key, or
            the file is sealed, and its key may be made with the secret.
    """

    key: str | None
    size: int
    head: Head
    units: tuple[Unit, ...]
    damaged: tuple[int, ...] | None
    right_key: bool | None

    @property
    def sound(self) -> bool:
        """Whether nothing was found wanting."""
        return not self.damaged and self.right_key is not False

    def to_dict(self, text: bool = False) -> dict[str, Any]:
        """For JSON; with the chunk's text if it is asked for."""
        header = self.head.header
        told = {
            "key": self.key,
            "bytes": self.size,
            "version": VERSION,
            "codec": header.codec,
            "level": header.level,
            "profile": header.profile_hash or None,
            "dtype": header.dtype,
            "tokens": header.tokens,
            "layers": [asdict(shape) for shape in header.layers],
            "layer0": header.layer0,
            "streams": header.arrangement.streams,
            "group_tokens": header.arrangement.group_tokens,
            "fingerprint": header.fingerprint,
            "conditioning": len(header.conditioning) // 4,
            "tokenizer": header.tokenizer,
            "namespace": header.namespace,
            "sealed": header.key_id is not None,
            "key_id": None if header.key_id is None else header.key_id.hex(),
            "token_streams": {stream.name: stream.dtype for stream in header.token_streams},
            "has_text": header.text is not None,
            "decoded_bytes": header.decoded_bytes,
            "units": [asdict(unit) for unit in self.units],
            "damaged": None if self.damaged is None else list(self.damaged),
            "right_key": self.right_key,
        }
        return told | ({"text": header.text} if text else {})


def inspect_bytes(data: bytes, key: str | None = None, secret: bytes | None = None) -> Inspection:
    """Looks at a chunk file.

    Args:
        data: all of it.
        key: that it lies under, if it lies under one.
        secret: of sealed files, and of keys.

    Raises:
        ChunkFileError: if it is no whole chunk file, or its head is damaged.
    """
    head = read_head(data)
    damaged, known = _damaged(data, head.header, secret), contents_keys(head.header, secret)
    right = None if key is None else key in known
    if right is False and head.header.key_id is not None and damaged is None:
        right = None
    return Inspection(key, len(data), head, _units(head), damaged, right)


def _damaged(data: bytes, header: Header, secret: bytes | None) -> tuple[int, ...] | None:
    sealed = header.key_id is not None
    if sealed and secret is None:
        return None
    try:
        reader = ContainerReader(data, secret=secret if sealed else None, max_bytes=ANY_SIZE)
    except ChunkFileError as error:
        if error.reason != "authentication":
            raise
        return None
    found = []
    with reader:
        for number in range(header.segments):
            try:
                reader.segments(range(number, number + 1))
            except ChunkFileError:
                found.append(number)
    return tuple(found)


def _units(head: Head) -> tuple[Unit, ...]:
    """Bytes of each unit, of all streams."""
    header, ends, units = head.header, [0, *accumulate(head.lengths)], []
    parts = header.arrangement.parts
    for number in range(header.units):
        layers, sizes = header.layers_of(number), [0] * parts
        for stream in range(header.arrangement.streams):
            segments = header.segments_of(number, stream)
            step = len(segments) // parts
            for part in range(parts):
                first = segments.start + part * step
                sizes[part] += ends[first + step] - ends[first]
        apart = (sizes[0], sizes[1]) if parts == 2 else (None, None)
        units.append(Unit(layers.start, layers.stop - 1, sum(sizes), *apart))
    return tuple(units)
