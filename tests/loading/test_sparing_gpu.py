"""What is left out of chunks on a GPU: placed by kernels, joined beside what it computes."""

import pytest
import torch

from blendkv import BlendedCache, Pool, attach
from blendkv.loading.pipeline import Pipeline
from blendkv.loading.progress import Progress
from blendkv.loading.scheduler import TransferScheduler
from blendkv.loading.sparing import Sparing
from blendkv.stores import TieredStore
from blendkv.testing import tiny_model
from tests.chunks import assert_same
from tests.helpers import make_case, run
from tests.loading.test_pipeline import LAYERS
from tests.loading.test_sparing import LENGTHS, stored
from tests.patience import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rest", [True, False])
def test_answers_are_exactly_those_of_whole_chunks(rest, dtype):
    model = attach(tiny_model("llama", dtype=dtype).cuda())
    case = make_case(model, LENGTHS)
    ids = case.ids.cuda()
    assert case.caches[0].keys[0].is_cuda
    options = {"selector": "boundary", "recompute_ratio": 0.5}
    store = stored(case.caches)
    for _ in range(4):
        tiers = TieredStore(Pool(), store)
        pipeline = Pipeline(tiers, TransferScheduler(4), piece_bytes=1, whole_bytes=0, least_gap=1, rest=rest)
        pieces = {chunk.key: (chunk.ids.tolist(), ()) for chunk in case.caches}
        spare, progress = Sparing(case.ids[0].tolist(), pieces, options, LAYERS), Progress()
        homes = [torch.device("cuda", 0)] * LAYERS
        got = [each.chunk for each in pipeline.fetch(list(pieces), homes, progress=progress, spare=spare)]
        want = run(model, ids, BlendedCache(case.caches, **options), logits_to_keep=1).logits
        assert torch.equal(run(model, ids, BlendedCache(got, **options), logits_to_keep=1).logits, want)
        assert progress.left_out_bytes > 0
        assert progress.asked_bytes == 0
        for chunk, one in zip(got, case.caches, strict=True):  # what was left out is joined to what is there
            assert chunk.keys[3].is_cuda
            assert_same(chunk, one)
            if rest:
                until(lambda key=one.key, pool=tiers.pool: key in pool)
                assert_same(tiers.pool.get(one.key), one)
