"""The head of a chunk file as an object: what is stored, for whom, and how it is cut into segments."""

from __future__ import annotations

from dataclasses import dataclass, field

from blendkv.container import format as f
from blendkv.errors import ChunkFileError


@dataclass(frozen=True)
class LayerShape:
    """One layer of a chunk: `[heads, T, key_dim]` keys and `[heads, T, value_dim]` values."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Arrangement:
    """How a codec cuts a chunk into segments, which lie in the order stream, unit, part, group.

    Attributes:
        group_tokens: tokens of a group; the last one may be shorter.
        unit_layers: layers that are decoded together, a unit.
        parts: segments of a unit, group and stream (keys and values).
        streams: 2 for a base and its refinement.
    """

    group_tokens: int
    unit_layers: int = 1
    parts: int = 2
    streams: int = 1


@dataclass(frozen=True)
class TokenStream:
    """One number a token, which somebody computed ahead (a selector's scores)."""

    name: str
    dtype: str

    def nbytes(self, tokens: int) -> int:
        """Bytes without padding."""
        return tokens * f.DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Header:
    """What a chunk file says about itself.

    Attributes:
        codec: name of the codec, `[a-z0-9-]`.
        level: the codec's own.
        dtype: "fp32", "fp16" or "bf16".
        arrangement: how the codec cut the chunk.
        layers: of the model, layer 0 included even if it is not stored.
        fingerprint: of the model.
        ids: token ids, uint32 little endian.
        profile_hash: 32 hex digits, or "".
        conditioning: ids that stood before the chunk, uint32 little endian.
        tokenizer: digest of the tokenizer.
        namespace: set by the operator of a shared store.
        text: behind the ids, if it is stored.
        layer0: whether layer 0 is stored.
        token_streams: sorted by name.
        key_id: which secret sealed the file, 0 to 16 bytes; None if none did.

    Raises:
        ChunkFileError: for what cannot be written down.
    """

    codec: str
    level: int
    dtype: str
    arrangement: Arrangement
    layers: tuple[LayerShape, ...]
    fingerprint: str
    ids: bytes = field(repr=False)
    profile_hash: str = ""
    conditioning: bytes = field(default=b"", repr=False)
    tokenizer: str = ""
    namespace: str = ""
    text: str | None = field(default=None, repr=False)
    layer0: bool = True
    token_streams: tuple[TokenStream, ...] = ()
    key_id: bytes | None = None

    def __post_init__(self) -> None:
        """Refuses what no file may hold, whether it is about to be written or was just read."""
        _require_name(self.codec, "codec")
        _require(-(1 << 15) <= self.level < 1 << 15, f"level {self.level} is no int16")
        _require_dtype(self.dtype)
        if self.profile_hash:
            _require(
                f.PROFILE.fullmatch(self.profile_hash) is not None and self.profile_hash.strip("0") != "",
                f"profile hash {self.profile_hash!r} is not 32 hex digits",
            )
        _require(len(self.ids) % 4 == 0 and len(self.conditioning) % 4 == 0, "ids are not whole uint32")
        _require_range(self.tokens, f.MAX_TOKENS, "tokens")
        _require(len(self.conditioning) // 4 <= f.MAX_TOKENS, "too many conditioning ids", "limit")
        check_arrangement(self.arrangement)
        _require_range(len(self.layers), f.MAX_LAYERS, "layers")
        for layer in self.layers:
            _require_range(layer.heads, f.MAX_DIM, "heads")
            _require_range(layer.key_dim, f.MAX_DIM, "head dim of keys")
            _require_range(layer.value_dim, f.MAX_DIM, "head dim of values")
        _require(bool(self.stored), "layer 0 is the only layer: it must be stored")
        _require(len(self.token_streams) <= f.MAX_TOKEN_STREAMS, "too many token streams", "limit")
        names = [stream.name for stream in self.token_streams]
        _require(names == sorted(set(names)), f"token streams {names} are not sorted, or named twice")
        for stream in self.token_streams:
            _require_name(stream.name, "token stream")
            _require_dtype(stream.dtype)
        _require(self.key_id is None or len(self.key_id) <= f.MAX_KEY_ID, "a key id has up to 16 bytes", "limit")
        for what in ("fingerprint", "tokenizer", "namespace"):
            _require(len(utf8(getattr(self, what))) <= f.MAX_NAME_BYTES, f"{what} is too long", "limit")

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids) // 4

    @property
    def stored(self) -> range:
        """Layers that are in the file."""
        return range(0 if self.layer0 else 1, len(self.layers))

    @property
    def units(self) -> int:
        """Number of units."""
        return -(-len(self.stored) // self.arrangement.unit_layers)

    @property
    def unit_segments(self) -> int:
        """Segments of a unit in one stream."""
        return self.arrangement.parts * -(-self.tokens // self.arrangement.group_tokens)

    @property
    def segments(self) -> int:
        """Segments of the file."""
        return len(self.token_streams) + self.arrangement.streams * self.units * self.unit_segments

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the keys and values of all layers."""
        return self.tokens * sum(s.heads * (s.key_dim + s.value_dim) for s in self.layers) * f.DTYPES[self.dtype][1]

    def unit_of(self, layer: int) -> int:
        """The unit that a stored layer is in."""
        return (layer - self.stored.start) // self.arrangement.unit_layers

    def layers_of(self, unit: int) -> range:
        """The layers of a unit."""
        start = self.stored.start + unit * self.arrangement.unit_layers
        return range(start, min(start + self.arrangement.unit_layers, self.stored.stop))

    def segments_of(self, unit: int, stream: int) -> range:
        """The numbers of a unit's segments in one stream."""
        start = len(self.token_streams) + (stream * self.units + unit) * self.unit_segments
        return range(start, start + self.unit_segments)


@dataclass(frozen=True)
class Head:
    """A header with its index.

    Attributes:
        header: the header.
        lengths: bytes of each segment, multiples of 16.
        checks: for each segment its checksum, or its tag if the header has a key id.
    """

    header: Header
    lengths: tuple[int, ...]
    checks: tuple[bytes, ...] = field(repr=False)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.lengths)

    def check_sizes(self, max_bytes: int) -> None:
        """Refuses segments that cannot be those of the header, and chunks that would not fit.

        Raises:
            ChunkFileError: with reason "limit" or "header".
        """
        header, decoded = self.header, self.header.decoded_bytes
        for stream, length in zip(header.token_streams, self.lengths, strict=False):
            _require(
                length == f.aligned(stream.nbytes(header.tokens)), f"token stream {stream.name!r} has a wrong length"
            )
        _require(
            decoded <= max_bytes,
            f"the chunk would take {decoded:,} bytes of memory, more than max_bytes={max_bytes:,}; raise it for files "
            "that you trust",
            "limit",
        )
        _require(
            decoded <= f.MAX_RATIO * self.payload_bytes,
            f"{self.payload_bytes:,} bytes of payload would become {decoded:,}, more than {f.MAX_RATIO} times as many; "
            "delete the entry",
            "limit",
        )


def check_arrangement(arrangement: Arrangement) -> None:
    """Refuses an arrangement that the format has no room for.

    Raises:
        ChunkFileError: with reason "limit".
    """
    _require_range(arrangement.group_tokens, f.MAX_TOKENS, "tokens of a group")
    _require_range(arrangement.unit_layers, f.MAX_LAYERS, "layers of a unit")
    _require_range(arrangement.parts, f.MAX_PARTS, "parts")
    _require_range(arrangement.streams, f.MAX_STREAMS, "streams")


def utf8(text: str) -> bytes:
    """UTF-8 of a text.

    Raises:
        ChunkFileError: for a text with half a surrogate pair.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ChunkFileError(f"text that has no UTF-8 cannot be stored: {error}") from None


def _require(holds: bool, message: str, reason: str = "header") -> None:
    if not holds:
        raise ChunkFileError(f"chunk file: {message}", reason=reason)


def _require_range(value: int, largest: int, what: str) -> None:
    if not 1 <= value <= largest:
        raise ChunkFileError(f"chunk file: {value} {what}; the format has room for 1 to {largest}", reason="limit")


def _require_name(name: str, what: str) -> None:
    if not f.NAME.fullmatch(name):
        raise ChunkFileError(f"chunk file: {what} {name!r} is not up to 16 of a-z, 0-9 and '-'", reason="header")


def _require_dtype(name: str) -> None:
    if name not in f.DTYPES:
        raise ChunkFileError(f"chunk file: dtype {name!r}; known are {', '.join(f.DTYPES)}", reason="header")
