"""A chunk as the bytes of a chunk file."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blendkv.chunk import ChunkCache, ids_bytes
from blendkv.codecs import Codec, dtype_name, get_codec
from blendkv.container import Header, LayerShape, TokenStream, pack


def encode_chunk(
    chunk: ChunkCache,
    codec: str | Codec = "raw",
    *,
    secret: bytes | None = None,
    key_id: bytes = b"",
    layer0: bool = True,
    token_streams: Mapping[str, Tensor] | None = None,
) -> bytes:
    """A chunk as the bytes of a chunk file.

    Args:
        chunk: its tensors may be on any device. Its text is left out if the head of the file would become larger than
            1 MiB.
        codec: a codec, or the name of one that needs no profile.
        secret: 16 to 64 bytes; seals the file, so that only who has it can read it without an error.
        key_id: up to 16 bytes that name the secret.
        layer0: False leaves layer 0 out, which `rebuild=` computes on reading.
        token_streams: by name, `[T]` one number a token, in fp32, fp16 or bf16; the chunk's own scores are among them.

    Raises:
        ValueError: for a chunk that cannot be stored: NaN or Inf, mixed or other dtypes, sizes beyond the format's
            (`ChunkFileError`).
    """
    codec, name = get_codec(codec), _checked_dtype(chunk)
    streams = dict(sorted({**chunk.scores, **(token_streams or {})}.items()))
    shapes = tuple(
        LayerShape(k.shape[0], k.shape[2], v.shape[2]) for k, v in zip(chunk.keys, chunk.values, strict=True)
    )
    header = Header(
        codec=codec.name,
        level=codec.level,
        dtype=name,
        arrangement=codec.arrangement(shapes, len(chunk)),
        layers=shapes,
        fingerprint=chunk.fingerprint,
        ids=ids_bytes(chunk.ids),
        profile_hash=codec.profile_hash,
        conditioning=ids_bytes(chunk.conditioning),
        tokenizer=chunk.tokenizer,
        namespace=chunk.namespace,
        text=chunk.text,
        layer0=layer0,
        token_streams=tuple(TokenStream(name, dtype_name(scores.dtype)) for name, scores in streams.items()),
        key_id=None if secret is None else key_id,
    )
    segments = [_token_bytes(name, scores, len(chunk)) for name, scores in streams.items()]
    runs: list[list[bytes]] = [[] for _ in range(header.arrangement.streams)]
    for unit in range(header.units):
        layers = header.layers_of(unit)
        keys = [_checked(chunk.keys[layer], f"keys of layer {layer}") for layer in layers]
        values = [_checked(chunk.values[layer], f"values of layer {layer}") for layer in layers]
        encoded = codec.encode_unit(layers.start, keys, values)
        if len(encoded) != len(runs) * header.unit_segments:
            raise ValueError(f"codec {codec.name!r} made {len(encoded)} segments of a unit, not what it arranged")
        for stream, run in enumerate(runs):
            run += encoded[stream * header.unit_segments : (stream + 1) * header.unit_segments]
    for run in runs:
        segments += run
    return pack(header, segments, secret=secret)


def _checked_dtype(chunk: ChunkCache) -> str:
    dtypes = {t.dtype for t in (*chunk.keys, *chunk.values)}
    if len(dtypes) > 1:
        raise ValueError(f"a chunk with tensors of {', '.join(sorted(map(str, dtypes)))}: one dtype for all of them")
    return dtype_name(dtypes.pop())


def _checked(tensor: Tensor, what: str) -> Tensor:
    tensor = tensor.detach().cpu()
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{what} hold NaN or Inf: such a chunk is not stored; look at the model that computed it")
    return tensor


def _token_bytes(name: str, scores: Tensor, tokens: int) -> bytes:
    if scores.shape != (tokens,):
        raise ValueError(
            f"token stream {name!r} of shape {tuple(scores.shape)}: one number for each of {tokens} tokens"
        )
    return scores.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
