"""The main promises on a GPU, in bf16 and fp32: run with `pytest -m gpu` on a machine that has one."""

import functools
import threading

import pytest
import torch
from transformers.cache_utils import DynamicCache

from blendkv import _compat, attach, prefill, proof
from blendkv.attaching import attachment_of
from blendkv.attention import blending
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache
from blendkv.kernelbuffers import KernelBuffers
from blendkv.loading.arriving import ArrivingChunk
from blendkv.loading.pipeline import Pipeline
from blendkv.norms import FusedNorm
from blendkv.selectors import HKVD
from blendkv.stores import DiskStore, Pool, TieredStore
from blendkv.testing import FAMILIES, REFUSED_FAMILIES, tiny_model
from tests.helpers import make_case, run, tokens
from tests.stores.dicts import DictStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ids_of(length, seed=0):
    return torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(seed)).cuda()


def generate(model, ids, cache=None, **kwargs):
    extra = {} if cache is None else {_compat.CACHE_ARG: cache}
    return model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, **extra, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_proven(family, dtype):
    model = tiny_model(family, dtype=dtype).cuda()
    attach(model)
    checks = list(proof.exactness_checks(attachment_of(model)))
    assert all(check.ok for check in checks), [c for c in checks if not c.ok]


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_refused_families_stay_refused(family):
    with pytest.raises(proof.UnsupportedModelError):
        attach(tiny_model(family, dtype=torch.bfloat16).cuda())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ratio_one_generates_what_full_prefill_does(dtype, attention):
    model = attach(tiny_model("llama", dtype=dtype, attn_implementation=attention).cuda())
    ids = ids_of(100)
    chunks = prefill(model, [ids[0, 10:40], ids[0, 40:90]], progress=False)
    assert chunks[0].keys[0].is_cuda
    plain = generate(model, ids, output_scores=True, return_dict_in_generate=True)
    cache = BlendedCache(chunks, recompute_ratio=1.0)
    ours = generate(model, ids, cache, output_scores=True, return_dict_in_generate=True)
    assert torch.equal(plain.sequences, ours.sequences)
    error = max(proof.rms_ratio(a, b) for a, b in zip(ours.scores, plain.scores, strict=True))
    assert error <= proof.BLEND_BOUND[dtype]


@pytest.mark.parametrize("corrector", [None, "mean-shift", "temperature-0.9"])
def test_error_falls_with_the_ratio_and_equals_the_cpu_in_fp32(corrector):
    ids = ids_of(160, 3)
    on_gpu, on_cpu = attach(tiny_model("qwen3").cuda()), attach(tiny_model("qwen3"))
    errors = []
    for model in (on_gpu, on_cpu):
        here = ids.to(model.device)
        chunks = prefill(model, [here[0, a : a + 40] for a in (0, 40, 80)], progress=False)
        state = attachment_of(model)
        full = proof.run(state, here, torch.arange(160, device=here.device)[None], DynamicCache())
        for ratio in (0.0, 0.15, 0.5, 1.0):
            cache = BlendedCache(chunks, ratio, HKVD(), corrector=corrector)
            logits = proof.run(state, here, torch.arange(160, device=here.device)[None], cache)
            errors.append((ratio, proof.rms_ratio(logits, full)))
    gpu, cpu = errors[:4], errors[4:]
    assert corrector or gpu[0][1] > gpu[2][1] > gpu[3][1]
    for (_, a), (_, b) in zip(gpu, cpu, strict=True):
        assert a == pytest.approx(b, rel=1e-2, abs=1e-4)


def test_chunks_on_the_cpu_are_placed_on_the_gpu():
    model = attach(tiny_model("llama", dtype=torch.bfloat16).cuda())
    ids = ids_of(80)
    chunks = [c.to("cpu") for c in prefill(model, [ids[0, :40], ids[0, 40:70]], progress=False)]
    cache = BlendedCache(chunks)
    out = generate(model, ids, cache)
    assert cache.layers[0].keys.is_cuda
    assert out.shape == (1, 88)
    assert cache.report.seconds["place"] > 0


def spread(model, first, folder):
    """An attached copy of a model of four layers, two of them on each of two devices."""
    from transformers import AutoModelForCausalLM

    model.save_pretrained(folder)
    other = 1 - first
    device_map = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": other, "lm_head": other}
    device_map |= {f"model.layers.{i}": first if i < 2 else other for i in range(4)}
    return attach(AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, dtype=torch.float32).eval())


TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


# -- CUDA graphs ------------------------------------------------------------------------------------------------------

BOUND = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}
"""RMS of the difference of logits / RMS of the logits: a few roundings through four layers with large weights."""


class Blends:
    """Blends of prompts of the same shape, with graphs and without."""

    def __init__(self, model, patch):
        self.model, self.patch = model, patch
        self.device = model.get_input_embeddings().weight.device
        self.usual = []
        for i, layer in enumerate(attachment_of(model).layers):
            layer.forward.own = self._counting(i, layer.forward.own)

    def _counting(self, i, own):
        @functools.wraps(own)
        def forward(*args, **kwargs):
            if isinstance(_compat.cache_in(args, kwargs), BlendedCache):
                self.usual.append(i)
            return own(*args, **kwargs)

        return forward

    def cache(self, seed=0, ratio=0.3, selector="hkvd", where=lambda chunk: chunk):
        """A cache and its prompt."""
        case = make_case(self.model, (40, 30, 50), seed=seed, question=9)
        return BlendedCache([where(chunk) for chunk in case.caches], ratio, selector, reserve=4), case.ids.to(
            self.device
        )

    def run(self, ids, cache, off=(), **kwargs):
        """Logits of the last row; `usual` tells which layers ran their own forward."""
        with self.patch.context() as patch:
            for name in off:
                patch.setenv(f"BLENDKV_{name}", "off")
            self.usual = []
            return run(self.model, ids, cache, **kwargs).logits[:, -1]

    def check(self, seed=0, off=("GRAPHS",), bound=None, logits_to_keep=0, **options):
        """Both; returns both caches."""
        caches = []
        for switched in (off, ()):
            cache, ids = self.cache(seed, **options)
            caches.append((cache, self.run(ids, cache, switched, logits_to_keep=logits_to_keep)))
        (twin, want), (mine, got) = caches
        self.close(got, want, bound)
        for ours, theirs in zip(mine.layers, twin.layers, strict=True):
            self.close(ours.keys, theirs.keys, bound)
            self.close(ours.values, theirs.values, bound)
        return mine, twin

    def step(self, mine, twin, ids, bound=None):
        want = self.run(ids.to(self.device), twin, ("GRAPHS",))
        got = self.run(ids.to(self.device), mine)
        self.close(got, want, bound)

    def close(self, got, want, bound=None):
        assert got.isfinite().all()
        assert proof.rms_ratio(got, want) <= (bound or BOUND[self.model.dtype])

    @property
    def refused(self):
        return attachment_of(self.model).graphs.refused


@pytest.fixture
def blends(monkeypatch):
    return lambda family="llama", **more: Blends(attach(tiny_model(family, **more).cuda()), monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "smollm3"])
def test_graphs_give_what_the_layers_give(blends, family, dtype):
    blends = blends(family, dtype=dtype)
    for seed in range(4):
        blends.check(seed)
    assert blends.usual == [0]  # the first layer computes everything
    assert not blends.refused
    for seed in range(2):
        blends.check(seed, logits_to_keep=1)
    assert blends.usual == [0, 3]  # of the last one, one row is wanted
    for seed in range(4):  # its own choice of rows: rounding could change what deviates most
        blends.check(seed, ("KERNELS",), selector="boundary")
    assert blends.usual == []
    assert not blends.refused


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
@pytest.mark.parametrize("layers", ["", "-0:3"])
def test_questions_by_graphs(blends, family, layers):
    """In fp32, where both choose the same rows; the pass ends in its last layer, which has no graph."""
    blends = blends(family, dtype=torch.float32)
    for seed in range(4):
        mine, _ = blends.check(seed, selector=f"attention{layers}")
    assert blends.usual == [2 if layers else 3]
    assert mine.report.seconds["question"] > 0
    assert not blends.refused


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 150])
def test_forty_tokens_by_graphs(blends, dtype, window):
    """The buffers grow ten times, and a window begins to slide."""
    blends = blends("mistral", sliding_window=window, dtype=dtype)
    mine, twin = blends.check()
    for seed in range(40):
        blends.step(mine, twin, tokens(1, seed)[None])
    assert blends.usual == []
    assert not blends.refused
    for cache in (mine, twin):
        cache.crop(-7)
    blends.step(mine, twin, tokens(1)[None])
    for cache in (mine, twin):
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
    for seed in range(4):
        blends.step(mine, twin, tokens(3, seed)[:, None])
    assert blends.usual == []


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_graphs_of_layers_with_experts(blends, family):
    """Recorded or refused, as the routing of this transformers allows; right in any case."""
    blends = blends(family)
    for seed in range(4):
        mine, twin = blends.check(seed, bound=1e-3)
    for seed in range(4):
        blends.step(mine, twin, tokens(1, seed)[None], bound=1e-3)
    nothing_is_left_recording()


def nothing_is_left_recording():
    """Random numbers, allocations and other people's graphs work after a recording that failed."""
    assert torch.multinomial(torch.ones(4, device="cuda"), 2).is_cuda
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1.0] * 4


def test_a_layer_that_cannot_be_recorded_leaves_the_others_their_graphs(blends):
    blends = blends()
    layer = attachment_of(blends.model).layers[1]
    own = layer.forward.own

    @functools.wraps(own)
    def forward(*args, **kwargs):
        out = own(*args, **kwargs)
        float((out if isinstance(out, torch.Tensor) else out[0]).sum())  # waits for the device
        return out

    layer.forward.own = forward
    for seed in range(4):
        blends.check(seed)
    assert set(blends.refused) == {1}
    assert blends.usual == [0, 1]
    nothing_is_left_recording()
    for seed in range(4):
        mine, twin = blends.check(seed, ratio=0.9)
    for seed in range(4):
        blends.step(mine, twin, tokens(1, seed)[None])
    assert blends.usual == [1]


@pytest.mark.parametrize("where", ["pinned", "pageable", "mixed"])
def test_graphs_with_chunks_in_host_memory(blends, where):
    """Graphs that were proven with chunks on the device: a layer's chunks must still be placed before its graph."""
    homes = [lambda chunk: chunk.pin_memory(), lambda chunk: chunk.to("cpu"), lambda chunk: chunk]
    blends, calls = blends(), []

    def move(chunk):
        calls.append(chunk)
        return homes[{"pinned": 0, "pageable": 1}.get(where, len(calls) % 3)](chunk)

    for seed in range(3):
        blends.check(seed)
    for seed in range(3, 6):
        blends.check(seed, where=move)
        assert blends.usual == [0]
        blends.check(seed, ("KERNELS",), where=move, selector="boundary")


@pytest.mark.parametrize("selector", ["hkvd", "attention"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_pinned_layers_are_read_beside_the_model(blends, family, selector, monkeypatch):
    """On a stream of their own, several layers together, whatever they are grouped by."""
    monkeypatch.setattr("blendkv.kernelbuffers.GROUP_BYTES", 1 << 14)
    blends, groups = blends(family, num_hidden_layers=7, dtype=torch.float32), []
    own = KernelBuffers._read_next

    def read_next(buffers):
        groups.extend(list(buffers._later)[:1])
        own(buffers)

    monkeypatch.setattr(KernelBuffers, "_read_next", read_next)
    for seed in range(4):
        blends.check(seed, where=lambda chunk: chunk.pin_memory(), selector=selector)
        read = [i for layers in groups for i in layers]
        assert read == [i for _ in range(2) for i in range(selector == "hkvd", 7)]
        groups.clear()
        blends.check(seed, ("KERNELS",), where=lambda chunk: chunk.pin_memory(), selector=selector)
        groups.clear()


def test_a_blend_that_stops_waits_for_what_it_reads(blends):
    """Buffers that a copy still writes to are not given to others."""
    blends = blends(num_hidden_layers=7)
    cache, ids = blends.cache(where=lambda chunk: chunk.pin_memory())
    layer = attachment_of(blends.model).layers[3]
    hook = layer.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        blends.run(ids, cache)
    hook.remove()
    assert not cache.layers or cache.work is None
    blends.check(1, where=lambda chunk: chunk.pin_memory())


@pytest.mark.parametrize("selector", ["hkvd", "attention"])
def test_layers_from_afar_arrive_on_the_card(blends, selector):
    """The pipeline copies pieces to the card beside the model; the answer is that of chunks which lie there."""
    blends, store = blends(num_hidden_layers=7, dtype=torch.float32), DictStore(local=False)
    homes = attachment_of(blends.model).homes
    for seed in range(4):
        cache, ids = blends.cache(seed, selector=selector)
        (chunks,) = cache.chunks
        TieredStore(Pool(1), store, write="through").put_many(chunks)
        want = blends.run(ids, cache)
        pipeline = Pipeline(TieredStore(Pool(1), store), piece_bytes=1 << 12, whole_bytes=0)
        found = pipeline.fetch([chunk.key for chunk in chunks], homes=homes, first=cache.reads_from)
        coming = [got.chunk for got in found]
        assert all(isinstance(chunk, ArrivingChunk) for chunk in coming)
        other = BlendedCache(coming, 0.3, selector, reserve=4)
        blends.close(blends.run(ids, other), want, 1e-5)
        assert all(t.is_cuda for chunk in coming for t in (*chunk.keys, *chunk.values))


def test_chunks_from_a_disk_are_read_whole_for_the_card(blends, tmp_path):
    """Pieces of a local store would hold Python's lock for longer than overlapping saves."""
    blends, store = blends(num_hidden_layers=7, dtype=torch.float32), DiskStore(tmp_path)
    cache, ids = blends.cache()
    (chunks,) = cache.chunks
    TieredStore(Pool(1), store, write="through").put_many(chunks)
    want = blends.run(ids, cache)
    tiers = TieredStore(Pool(1), store)
    pipeline = Pipeline(tiers, piece_bytes=1 << 12, whole_bytes=0)
    homes = attachment_of(blends.model).homes
    found = [got.chunk for got in pipeline.fetch([c.key for c in chunks], homes=homes, first=cache.reads_from)]
    assert [type(chunk) for chunk in found] == [ChunkCache] * len(chunks)
    assert all(t.is_cuda for chunk in found for t in (*chunk.keys, *chunk.values))
    assert tiers.stats.hits == {store.url: len(chunks)}
    blends.close(blends.run(ids, BlendedCache(found, 0.3, cache.selector, reserve=4)), want, 1e-5)


def test_graphs_in_every_mode_stream_and_thread(blends):
    blends = blends()
    for i in range(6):
        with (torch.inference_mode, torch.no_grad)[i % 2]():
            blends.check(i)
    want = {}
    for seed in range(4):
        cache, ids = blends.cache(seed)
        want[seed] = blends.run(ids, cache)
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(3)], {}
    prepared = {seed: blends.cache(seed) for seed in range(4)}
    torch.cuda.synchronize()
    for seed, (cache, ids) in prepared.items():  # nobody waits between them
        with torch.cuda.stream(streams[seed % 3]):
            got[seed] = blends.run(ids, cache)
    torch.cuda.synchronize()
    for seed in range(4):
        blends.close(got[seed], want[seed])
    failed = []

    def work(seed):
        try:
            for _ in range(8):
                cache, ids = blends.cache(seed)
                blends.close(run(blends.model, ids, cache, logits_to_keep=1).logits[:, -1], want[seed])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_graphs_follow_the_weights(blends):
    blends = blends()
    for seed in range(3):
        mine, twin = blends.check(seed)
    for seed in range(3):
        blends.step(mine, twin, tokens(1, seed)[None])
    attention = attachment_of(blends.model).layers[2].self_attn
    attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight.detach() * 0.5)
    blends.step(mine, twin, tokens(1)[None])
    for seed in range(4):
        blends.check(seed)
    assert blends.usual == [0]
    with torch.no_grad():
        attention.o_proj.weight.mul_(2)
    for seed in range(4):
        blends.check(seed)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_generate_by_graphs(blends, monkeypatch, options):
    blends, answers = blends(), []
    for off in (True, False, False, False):
        monkeypatch.setenv("BLENDKV_GRAPHS", "off" if off else "")
        cache, ids = blends.cache()
        answers.append(generate(blends.model, ids, cache, **options))
    assert all(torch.equal(answer, answers[0]) for answer in answers[1:])


@TWO_DEVICES
@pytest.mark.parametrize("first", [0, 1])
def test_graphs_on_two_devices(first, tmp_path, monkeypatch):
    blends = Blends(spread(tiny_model("llama"), first, tmp_path), monkeypatch)
    for seed in range(4):
        mine, twin = blends.check(seed)
    assert blends.usual == [0]
    for seed in range(4):
        blends.step(mine, twin, tokens(1, seed)[None])
    assert blends.usual == []
    assert not blends.refused
    for seed in range(2):
        blends.check(seed, where=lambda chunk: chunk.pin_memory())
        blends.check(seed, where=lambda chunk: chunk.to(f"cuda:{first}"))  # half of it on the wrong device


# -- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, "gemma3_text"])
def test_fused_norms_give_what_the_modules_give(family, dtype):
    """All RMS norms in the layers, but Gemma's, whose weight is one less."""
    model = attach(tiny_model(family, dtype=dtype).cuda())
    layers = attachment_of(model).layers
    norms = [m for layer in layers for m in layer.modules() if type(m).__name__.endswith("RMSNorm")]
    assert norms
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for module in norms:
        norm = module.__dict__.get("forward")
        assert isinstance(norm, FusedNorm) == (family != "gemma3_text")
        for scale in (10.0, 1.0, 1e-3):
            x = (torch.randn(2, 5, len(module.weight), device="cuda") * scale).to(dtype)
            usual = module(x)
            token = blending.set(True)
            try:
                fused = module(x)
            finally:
                blending.reset(token)
            assert fused.dtype == usual.dtype
            assert proof.rms_ratio(fused, usual) <= bound
