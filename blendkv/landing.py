"""Raw chunk files to a GPU: through page-locked memory, by one copy each, while others are still being read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.codecs import DTYPES
from blendkv.codecs.raw import Raw
from blendkv.expanding import chunk_in

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


class Landing:
    """The way of some files to a device; on CUDA on a stream beside the current one. Safe to share among threads.

    Args:
        device: where they go. On the CPU the same is done without streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._cuda = device, device.type == "cuda"
        if self._cuda:
            self._stream = torch.cuda.current_stream(device)
            if device not in _STREAMS:
                _STREAMS[device] = torch.cuda.Stream(device)
            self._beside = _STREAMS[device]

    def room(self, nbytes: int) -> Tensor:
        """`[nbytes]` uint8 for a file, page-locked for CUDA."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda)

    def filled(self, fill: Callable[[Callable[[int], memoryview]], bool]) -> Tensor | None:
        """A file that is read into `room`.

        Args:
            fill: is given what makes memory for so many bytes, and says whether it was filled.
        """
        rooms: list[Tensor] = []

        def room(nbytes: int) -> memoryview:
            rooms.append(self.room(nbytes))
            return memoryview(rooms[-1].numpy())

        return rooms[-1] if fill(room) else None

    def land(self, file: ChunkFile) -> ChunkCache | None:
        """The chunk of a raw file.

        Args:
            file: open for a tensor that `room` gave.

        Returns:
            None for what is not raw, or has layers that are not alike: that is for `decode_chunks`.

        Raises:
            ChunkFileError: if a segment is not what was written.
        """
        header, codec, dtype = file.header, file.codec, DTYPES[file.header.dtype]
        if file.tensor is None or not isinstance(codec, Raw) or not file.is_plain:
            return None
        file.verify()
        data, shape = file.tensor[int(file.starts[len(header.token_streams)]) :], header.layers[0]
        sizes = (len(header.layers), 2, shape.heads, header.tokens, shape.key_dim)
        if not self._cuda:
            out = torch.empty(sizes, dtype=dtype)
            codec.in_order(data.numpy(), out.view(torch.uint8).numpy())
            return chunk_in(file, out.flatten())
        with torch.cuda.stream(self._stream):
            out = torch.empty(sizes, dtype=dtype, device=self.device)
        with torch.cuda.stream(self._beside):
            here = data.to(self.device, non_blocking=True)
            self._beside.wait_stream(self._stream)  # what was queued there may still use the memory that `out` has now
            codec.in_order(here.view(dtype), out)
            self._beside.record_event().synchronize()  # so each thread has one room, and no more
        return chunk_in(file, out.flatten())
