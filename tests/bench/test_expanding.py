"""What `bench kernels` loads, in small, by interpreted kernels."""

import pytest
import torch

from blendkv import kernels
from blendkv.bench.expanding import Loading, loading_rows
from blendkv.codecs import transform

pytest.importorskip("triton")


def test_chunks_are_decoded_and_placed(monkeypatch):
    monkeypatch.setattr(kernels, "unusable", lambda *args: None)
    monkeypatch.setattr(transform, "bf16_is_fast", lambda: False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    setting = Loading(3, 4, 2, 2, 16, torch.device(device))
    setting.check()
    for keys, values in setting.buffers:
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
    chunks = setting.decoded(setting.files(pinned=False))
    for by_layer in (False, True):
        setting.place(chunks, by_layer)
    for layer, (keys, values) in enumerate(setting.buffers):
        assert keys.isfinite().all()
        assert torch.equal(values[0, :, 8:12], chunks[2].values[layer])
    assert 2 < setting.bits < 40  # short sections have their lanes to pay


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_is_needed():
    with pytest.raises(ValueError, match="CUDA"):
        next(loading_rows())
