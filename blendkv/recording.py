"""Recording of CUDA graphs, so that one that fails leaves torch as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from blendkv import kernels


class Recorder:
    """Records on a stream and into a pool of memory of its own, one a device."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def record(self, device: torch.device, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Records what `run` launches on a device; returns the graph and what `run` returned."""
        with torch.cuda.device(device):
            if device not in self._streams:
                self._pools[device] = torch.cuda.graph_pool_handle()
                self._streams[device] = torch.cuda.Stream(device)
                with torch.cuda.stream(self._streams[device]):  # cuBLAS takes its workspace outside any recording
                    for dtype in kernels.DTYPES:
                        torch.ones(16, 16, dtype=dtype, device=device) @ torch.ones(16, 16, dtype=dtype, device=device)
            stream, graph = self._streams[device], torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), _no_collection():
                graph.capture_begin(pool=self._pools[device], capture_error_mode="thread_local")
                try:
                    out = run()
                    graph.capture_end()
                except BaseException:
                    self._abandon(device, graph)
                    del self._streams[device], self._pools[device]
                    raise
            torch.cuda.current_stream(device).wait_stream(stream)
        return graph, out

    def _abandon(self, device: torch.device, graph: torch.cuda.CUDAGraph) -> None:
        """Clears up after a recording that failed: torch would go on as if it were under way."""
        try:
            graph.capture_end()
        except RuntimeError:
            torch._C._cuda_endAllocateToPool(device.index, self._pools[device])
        self._pools[device] = torch.cuda.graph_pool_handle()
        whole = torch.cuda.CUDAGraph()  # one that succeeds puts the random generator right
        whole.capture_begin(pool=self._pools[device], capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        whole.capture_end()


@contextmanager
def _no_collection() -> Generator[None]:
    """Keeps Python from collecting garbage: a graph that is destroyed while another is recorded spoils it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
