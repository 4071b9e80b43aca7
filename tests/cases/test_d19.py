import copy

import torch

from blendkv import BlendedCache, attach, prefill
from tests.cases.common import answer, assert_same_answer, forward, ids_of, model_of, peak_bytes

DOCUMENTS = [ids_of(64, seed)[0] for seed in range(100)]


def test_d19_chunks_made_outside_no_grad_hold_no_graph():
    """A prompt cache built with gradients on keeps every activation alive (huggingface/transformers#32681)."""
    model = model_of()
    assert torch.is_grad_enabled()
    for chunk in prefill(model, DOCUMENTS[:3], progress=False):
        for tensor in (*chunk.keys, *chunk.values):
            assert not tensor.requires_grad
            assert tensor.grad_fn is None
            assert tensor.is_leaf
            assert tensor._base is None  # a view would keep the whole batch's states
    assert torch.is_grad_enabled()


def test_d19_a_hundred_chunks_take_the_memory_of_one_forward_and_what_is_stored():
    """Nothing but the finished chunks may pile up while many are computed."""
    model = attach(model_of())
    one = peak_bytes(lambda: prefill(model, DOCUMENTS[:1], batch_tokens=64, progress=False))
    chunks = prefill(model, DOCUMENTS, batch_tokens=64, progress=False)
    stored = sum(chunk.nbytes for chunk in chunks)
    assert chunks[0].nbytes == 64 * 4 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dims, bytes
    hundred = peak_bytes(lambda: prefill(model, DOCUMENTS, batch_tokens=64, progress=False))
    assert stored < hundred < 1.2 * (one + stored)
    assert one > 2 * chunks[0].nbytes  # a forward is counted at all


def test_d19_forks_share_the_chunks_bytes():
    """Eight questions over the same chunks need the chunks once."""
    model = model_of()
    chunks = prefill(model, DOCUMENTS[:4], progress=False)
    cache = BlendedCache(chunks)
    assert peak_bytes(lambda: [cache.fork() for _ in range(8)]) == 0
    for fork in [cache.fork() for _ in range(8)]:
        for own, shared in zip(chunks, fork.chunks[0], strict=True):
            for a, b in zip((*own.keys, *own.values), (*shared.keys, *shared.values), strict=True):
                assert a.data_ptr() == b.data_ptr()


def test_d19_forks_answer_independently_and_leave_the_chunks_alone():
    """Each fork writes into buffers of its own; the first one's answer is still right after eight others."""
    model = model_of()
    chunks = prefill(model, DOCUMENTS[:2], progress=False)
    cache, held = BlendedCache(chunks), torch.cat(DOCUMENTS[:2])[None]
    prompts = [torch.cat([held, ids_of(6, 50 + i)], dim=1) for i in range(8)]
    forks = [cache.fork() for _ in prompts]
    got = [answer(model, prompt, fork, tokens=3) for prompt, fork in zip(prompts, forks, strict=True)]
    buffers = {la.keys.data_ptr() for fork in forks for la in fork.layers}
    assert len(buffers) == 8 * 4
    assert not buffers & {k.data_ptr() for chunk in chunks for k in chunk.keys}
    for prompt, mine in zip(prompts, got, strict=True):
        assert_same_answer(mine, answer(model, prompt, BlendedCache(chunks), tokens=3))


def test_d19_a_prompt_cache_can_be_deep_copied():
    """`copy.deepcopy` of a cache, filled or not, is what the transformers guide on prompt caches does."""
    model = model_of()
    chunks, held = prefill(model, DOCUMENTS[:2], progress=False), torch.cat(DOCUMENTS[:2])[None]
    prompt = torch.cat([held, ids_of(6, 50)], dim=1)
    wanted = answer(model, prompt, BlendedCache(chunks), tokens=3)
    assert_same_answer(answer(model, prompt, copy.deepcopy(BlendedCache(chunks)), tokens=3), wanted)
    filled = BlendedCache(chunks, recompute_ratio=1.0)
    forward(model, prompt, filled)
    twin = copy.deepcopy(filled)
    longer = torch.cat([prompt, ids_of(4, 51)], dim=1)
    first = answer(model, longer, filled, tokens=3)
    assert_same_answer(answer(model, longer, twin, tokens=3), first)


def test_d19_a_cache_filled_outside_no_grad_holds_no_graph():
    """A forward with gradients on must not tie the cache, and every activation behind it, to a graph."""
    model = model_of()
    chunks, held = prefill(model, DOCUMENTS[:2], progress=False), torch.cat(DOCUMENTS[:2])[None]
    cache = BlendedCache(chunks)
    model(input_ids=torch.cat([held, ids_of(6, 50)], dim=1), **{keyword(model): cache})
    for layer in cache.layers:
        assert not layer.keys.requires_grad
        assert not layer.values.requires_grad


def keyword(model) -> str:
    """The cache's name in a forward of the installed transformers."""
    from blendkv import _compat

    return _compat.cache_keyword(model.forward)
