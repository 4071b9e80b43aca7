"""CUDA graphs of layers, without CUDA: when they are recorded, used and dropped, and that no answer changes.

`tests.fakegpu` stands in for kernels and graphs. The same with real ones: `tests/test_gpu.py`.
"""

import copy
import functools
import gc
import pickle
import threading

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from blendkv import BlendedCache, _compat, attach, detach, graphs, prefill
from blendkv.attaching import attachment_of
from blendkv.attachment import LayerForward
from blendkv.norms import FusedNorm
from blendkv.selectors import HKVD, Attention
from blendkv.testing import tiny_model
from tests.fakegpu import FakeGPU, FakeGraph
from tests.helpers import generate, make_case, run, tokens

pytest.importorskip("triton")

LAYERS = 3
NARROW = LAYERS - 1
"""Layers that have graphs in a blend with the schedule {1: ratio}."""


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU(monkeypatch)


@pytest.fixture
def make(gpu):
    """`make(family)`: an attached model of three layers, nobody else's."""

    def build(family="llama", **overrides):
        model = attach(tiny_model(family, num_hidden_layers=LAYERS, **overrides))
        gpu.count()
        return model

    return build


@pytest.fixture
def blend(gpu, monkeypatch):
    """`blend(model, seed)`: a prompt with graphs and without; must agree. Returns the cache and its twin.

    Afterwards `gpu.count()` tells what the run with graphs did. The logits are compared as the caller gets them, after
    the next run has come and gone.
    """
    held = []

    def check(model, seed=0, ratio=0.3, selector="hkvd", lengths=(13, 9, 17), schedule=None, **kwargs):
        case = make_case(model, lengths, seed=seed)

        def cache():
            return BlendedCache(case.caches, ratio, selector, check_layers=schedule, reserve=4)

        with monkeypatch.context() as patch:
            patch.setenv("BLENDKV_GRAPHS", "off")
            twin = cache()
            want = run(model, case.ids, twin, **kwargs)
        gpu.count()
        mine = cache()
        got = run(model, case.ids, mine, **kwargs)
        held.append((got.logits, got.logits.clone()))
        for logits, first in held:
            assert torch.equal(logits.isnan(), first.isnan())
            assert torch.equal(logits.nan_to_num(), first.nan_to_num())  # nothing wrote over an earlier answer
        same(got.logits, want.logits)
        same_states(mine, twin)
        assert mine.report.layers == twin.report.layers
        return mine, twin

    return check


@pytest.fixture
def step(gpu, monkeypatch):
    """`step(model, mine, twin, ids)`: decodes the same with graphs and without; must agree. Returns logits."""

    def check(model, mine, twin, ids, **kwargs):
        with monkeypatch.context() as patch:
            patch.setenv("BLENDKV_GRAPHS", "off")
            want = run(model, ids, twin, **kwargs).logits
        gpu.count()
        got = run(model, ids, mine, **kwargs).logits
        same(got, want)
        same_states(mine, twin)
        return got

    return check


def same(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4, equal_nan=True)


def same_states(a, b):
    for ours, theirs in zip(a.layers, b.layers, strict=True):
        same(ours.keys, theirs.keys)
        same(ours.values, theirs.values)


def warm(blend, model, **kwargs):
    """Graphs for what `blend` runs with these arguments: recorded, proven."""
    for seed in (90, 91):
        result = blend(model, seed, **kwargs)
    return result


# -- a life -----------------------------------------------------------------------------------------------------------


def test_recorded_then_proven_then_replayed(gpu, make, blend):
    model = make()
    counts = []
    for seed in range(4):
        blend(model, seed)
        counts.append(gpu.count())
    assert counts == [(NARROW, 0, LAYERS), (0, NARROW, LAYERS), (0, NARROW, 1), (0, NARROW, 1)]
    assert not attachment_of(model).graphs.refused


def test_nothing_is_recorded_during_attach(gpu):
    attach(tiny_model("qwen3", num_hidden_layers=LAYERS))
    assert gpu.count()[:2] == (0, 0)


def test_prompts_of_about_the_same_length_share_graphs_others_do_not(gpu, make, blend):
    model = make()
    warm(blend, model)
    blend(model, 1, lengths=(12, 9, 17))  # one row fewer
    assert gpu.count() == (0, NARROW, 1)
    blend(model, 2, lengths=(30, 40, 41))
    assert gpu.count() == (NARROW, 0, LAYERS)
    blend(model, 3)
    assert gpu.count() == (0, NARROW, 1)


@pytest.mark.parametrize("ratio", [0.0, 0.7])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "phi3", "granite", "smollm3", "olmo2"])
def test_families(gpu, make, blend, step, family, ratio):
    model = make(family, **({"sliding_window": 12} if family == "mistral" else {}))
    for seed in range(3):
        mine, twin = blend(model, seed, ratio)
    assert gpu.count()[1:] == ((LAYERS, 0) if ratio == 0.0 else (NARROW, 1))
    for seed in range(3):
        step(model, mine, twin, tokens(1, seed)[None])
    assert gpu.count() == (0, LAYERS, 0)
    assert not attachment_of(model).graphs.refused


def test_gradual_schedule_with_two_widths_or_one(gpu, make, blend):
    model = make()
    for seed in range(3):
        blend(model, seed, lengths=(33, 29, 27), schedule={1: 0.6, 2: 0.1})
    assert gpu.count() == (0, 2, 1)
    for seed in range(3):  # 16 more rows or less: layer 2 begins with the shape of layer 1
        blend(model, seed, lengths=(33, 29, 27), schedule={1: 0.6, 2: 0.58})
    assert gpu.count() == (0, 2, 1)
    assert len(attachment_of(model).graphs._shapes) == 2


def test_the_question_pass_ends_without_a_graph(gpu, make, blend):
    model, counts = make(), []
    for seed in range(4):
        mine, _ = blend(model, seed, selector="attention")
        counts.append(gpu.count())
        assert mine.report.seconds["question"] > 0
    asked = LAYERS - 1  # in the last one it ends half-way
    assert counts[0] == (LAYERS + asked, 0, 2 * LAYERS)
    assert counts[1] == (0, LAYERS + asked, 2 * LAYERS)
    assert counts[2:] == [(0, LAYERS + asked, 1)] * 2
    assert not attachment_of(model).graphs.refused


@pytest.mark.parametrize("family", ["qwen3", "mistral", "smollm3"])
@pytest.mark.parametrize("settings", [{}, {"layers": (0, 1)}, {"last": 3}], ids=str)
def test_a_question_by_graphs_hears_the_same(gpu, make, blend, family, settings):
    """Prompts and questions of several lengths, in turn: what one left behind does not reach the next."""
    model = make(family, **({"sliding_window": 12} if family == "mistral" else {}))
    heard = []

    class Spy(Attention):
        def score(self, candidates):
            heard.append(candidates.attention)
            return super().score(candidates)

    for seed, lengths in enumerate([(13, 9, 17), (13, 9, 17), (13, 9, 17), (12, 9, 18), (30, 40, 41), (12, 11, 17)]):
        blend(model, seed, selector=Spy(**settings), lengths=lengths)
        want, got = heard[-2:]
        assert sorted(got) == sorted(want) == list(settings.get("layers", range(LAYERS)))
        for layer in want:
            same(got[layer], want[layer])
    assert gpu.count()[1] > LAYERS


def test_a_question_that_a_replay_hears_otherwise_is_not_trusted(gpu, make, blend, monkeypatch):
    model, own = make(), FakeGraph.replay
    blend(model, 0, selector="attention")

    def replay(graph):
        own(graph)
        for shape in attachment_of(model).graphs._shapes.values():
            for mass in shape.outputs.values():
                mass += 1

    monkeypatch.setattr(FakeGraph, "replay", replay)
    blend(model, 1, selector="attention")
    assert sorted(attachment_of(model).graphs.refused) == list(range(LAYERS - 1))


def test_only_the_last_row_is_wanted(gpu, make, blend):
    model = make()
    for seed in range(3):
        blend(model, seed, logits_to_keep=1)
    assert gpu.count() == (0, 1, 1 + 1)  # the last layer narrows to rows that are asked for: no graph


def test_many_rows_are_left_alone(gpu, make, blend):
    model = make()
    warm(blend, model)
    attachment_of(model).graphs.widest = 20
    blend(model, 1)
    assert gpu.count() == (0, 0, LAYERS)


def test_ratio_one_has_no_graphs(gpu, make, blend):
    model = make()
    blend(model, 1, 1.0)
    assert gpu.count() == (0, 0, LAYERS)


# -- what fails -------------------------------------------------------------------------------------------------------


def test_a_recording_that_fails_is_not_tried_again(gpu, make, blend):
    model = make()
    gpu.error = RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
    blend(model, 0)
    assert gpu.count() == (0, 0, LAYERS)
    assert set(attachment_of(model).graphs.refused.values()) == {str(gpu.error).splitlines()[0]}
    gpu.error = None
    for seed in range(1, 4):
        blend(model, seed)
        assert gpu.count() == (0, 0, LAYERS)


def test_one_layer_that_fails_leaves_the_others_their_graphs(gpu, make, blend):
    model = make()
    attachment_of(model).facts  # noqa: B018
    warm(blend, model)
    attachment_of(model).graphs.refused[1] = "for a test"
    for seed in range(2):
        blend(model, seed)
        assert gpu.count() == (0, NARROW - 1, 2)


@pytest.mark.parametrize("wrong", [0.01, float("nan"), float("inf")])
def test_a_replay_that_disagrees_is_refused(gpu, make, blend, wrong):
    model = make()
    blend(model, 0)
    gpu.wrong = wrong
    blend(model, 1)
    assert gpu.count() == (0, NARROW, LAYERS)
    refused = attachment_of(model).graphs.refused
    assert len(refused) == NARROW
    assert all(reason.startswith("a replay is off by") for reason in refused.values())
    blend(model, 2)
    assert gpu.count() == (0, 0, LAYERS)


def test_a_layer_that_returns_more_than_hidden_states_is_refused(gpu, make, blend, monkeypatch):
    model = make()
    monkeypatch.setattr(graphs, "_unwrap", lambda output: (None, None))
    blend(model, 0)
    assert gpu.count() == (0, 0, LAYERS)
    assert len(attachment_of(model).graphs.refused) == NARROW


def test_what_is_hidden_states_alone():
    hidden, other = torch.zeros(1), torch.ones(1)
    for output in (hidden, (hidden,), (hidden, None)):
        found, wrap = graphs._unwrap(output)
        assert found is hidden
        again = wrap(other)
        assert (again if output is hidden else again[0]) is other
        assert type(again) is type(output)
    for output in ((hidden, other), (), {"hidden": hidden}, None):
        assert graphs._unwrap(output)[0] is None


def test_a_layer_that_writes_over_its_input_is_refused(gpu, make, blend):
    """Its output would be the graphs' own tensor, which the next prompt overwrites."""
    model = make()
    layer = model.model.layers[LAYERS - 1]
    own = layer.forward.own

    @functools.wraps(own)
    def forward(hidden, *args, **kwargs):
        return hidden.copy_(own(hidden, *args, **kwargs))

    layer.forward.own = forward
    model.model.norm = nn.Identity()
    for seed in range(4):
        blend(model, seed)
    assert gpu.count() == (0, NARROW - 1, 2)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_blend_that_stops_half_way_lets_the_next_one_in(gpu, make, blend, error):
    model = make()
    warm(blend, model)
    case = make_case(model)

    class Stops(HKVD):
        def score(self, candidates):
            raise error

    cache = BlendedCache(case.caches, 0.3, Stops())
    with pytest.raises(type(error)):
        run(model, case.ids, cache)
    error.__traceback__ = None  # it holds the frames, those the cache
    del cache
    gc.collect()
    blend(model, 3)
    assert gpu.count() == (0, NARROW, 1)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_step_that_stops_half_way_lets_the_next_one_in(gpu, make, blend, step, error, monkeypatch):
    model = make()
    mine, twin = warm(blend, model)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].forward, "own", raiser(error))
        with pytest.raises(type(error)):
            run(model, tokens(1)[None], mine)
    mine.crop(-1 if mine.get_seq_length() > twin.get_seq_length() else 0)
    for layer in mine.layers:
        layer.resize(twin.get_seq_length())
    mine.ids = twin.ids
    for seed in range(3):
        step(model, mine, twin, tokens(1, seed)[None])
    assert gpu.count() == (0, LAYERS, 0)


def raiser(error):
    def forward(*args, **kwargs):
        raise error

    return forward


def test_a_strict_cache_that_misses_lets_the_next_one_in(gpu, make, blend):
    model = make()
    warm(blend, model)
    case = make_case(model)
    cache = BlendedCache([*case.caches, *prefill(model, [tokens(8, 77)], progress=False)], 0.3, strict=True)
    with pytest.raises(LookupError):
        run(model, case.ids, cache)
    blend(model, 3)
    assert gpu.count() == (0, NARROW, 1)


# -- what somebody wants to see ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["layer", "submodule", "layer-pre", "submodule-pre", "global", "global-pre"])
def test_hooks_of_others_see_every_call(gpu, make, blend, where):
    model = make()
    warm(blend, model)
    layer = model.model.layers[2]
    module, seen = (layer if where.startswith("layer") else layer.mlp), []

    def hook(m, *rest):
        if m is module:
            seen.append(rest[0][0].shape[1])

    everywhere = nn.modules.module
    register = {
        "layer": module.register_forward_hook,
        "submodule": module.register_forward_hook,
        "layer-pre": module.register_forward_pre_hook,
        "submodule-pre": module.register_forward_pre_hook,
        "global": everywhere.register_module_forward_hook,
        "global-pre": everywhere.register_module_forward_pre_hook,
    }[where]
    handle = register(hook)
    try:
        for seed in range(2):
            seen.clear()
            blend(model, seed)
            assert gpu.count() == (0, 0, LAYERS)
            assert len(seen) == 3  # the chunks, the run without graphs, the one with
    finally:
        handle.remove()
    blend(model, 3)
    assert gpu.count() == (0, NARROW, 1)


def test_a_forward_that_somebody_replaced_runs(gpu, make, blend):
    """As accelerate's hooks do: inside a layer, after graphs were recorded."""
    model = make()
    warm(blend, model)
    mlp, layer = model.model.layers[2].mlp, model.model.layers[2]
    own = mlp.forward
    mlp.forward = lambda x: own(x) * 0.5
    blend(model, 0)
    assert gpu.count() == (0, 0, LAYERS)
    del mlp.forward
    blend(model, 1)
    assert gpu.count() == (0, NARROW, 1)
    ours = layer.forward
    layer.forward = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    blend(model, 2)
    assert gpu.count() == (0, 0, LAYERS)
    layer.forward = ours
    blend(model, 3)
    assert gpu.count() == (0, NARROW, 1)


def test_outputs_of_all_layers(gpu, make, blend):
    model = make(attn_implementation="eager")
    warm(blend, model)
    for what in ("output_hidden_states", "output_attentions"):
        blend(model, 0, **{what: True})
        assert gpu.count() == (0, 0, LAYERS)
    mine, _ = blend(model, 1)  # transformers leaves hooks behind that do nothing
    assert gpu.count() == (0, NARROW, 1)
    out = run(model, tokens(1)[None], mine, output_hidden_states=True)
    assert gpu.count() == (0, 0, LAYERS)
    assert len(out.hidden_states) == LAYERS + 1
    model.config.output_hidden_states = True
    blend(model, 2)
    assert gpu.count() == (0, 0, LAYERS)


def test_padding(gpu, make, blend, step):
    model = make()
    warm(blend, model)
    length = make_case(model).ids.shape[1]
    mask = torch.ones(1, length, dtype=torch.long)
    mine, twin = blend(model, 0, attention_mask=mask)
    assert gpu.count() == (0, NARROW, 1)
    mask[:, 0] = 0
    blend(model, 0, attention_mask=mask)
    assert gpu.count() == (0, 0, LAYERS)
    for seed in range(3):
        mask = torch.ones(1, length + 1 + seed, dtype=torch.long)
        step(model, mine, twin, tokens(1)[None], attention_mask=mask)
    assert gpu.count() == (0, LAYERS, 0)
    mask = torch.ones(1, length + 4, dtype=torch.long)
    mask[:, 0] = 0
    step(model, mine, twin, tokens(1)[None], attention_mask=mask)
    assert gpu.count() == (0, 0, LAYERS)


def test_arguments_of_layers_that_change(gpu, make, blend):
    """Numbers are compiled in; a tensor that is not copied in would be read at a stale address."""
    model = make()
    warm(blend, model, marker=1)
    blend(model, 0, marker=1)
    assert gpu.count() == (0, NARROW, 1)
    blend(model, 1, marker=2)
    assert gpu.count() == (0, 0, LAYERS)
    blend(model, 2, marker=torch.ones(3))
    assert gpu.count() == (0, 0, LAYERS)
    blend(model, 3)
    assert gpu.count() == (0, 0, LAYERS)


def test_positions_in_a_form_that_is_not_known():
    """A tensor that is not found would not be copied in."""
    found = torch.zeros(1)
    for value in (found, (found, [found]), None, 3, [1.5, "x"]):
        assert graphs._is_movable(value)
    for value in ({"full": found}, (found, {"full": found}), object()):
        assert not graphs._is_movable(value)


def test_switched_off(gpu, make, blend, step, monkeypatch):
    model = make()
    mine, twin = warm(blend, model)
    for _ in range(2):
        step(model, mine, twin, tokens(1)[None])
    for name in ("BLENDKV_GRAPHS", "BLENDKV_KERNELS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "off")
            blend(model, 1)
            assert gpu.count() == (0, 0, LAYERS)
            step(model, mine, twin, tokens(1)[None])
            assert gpu.count() == (0, 0, LAYERS)


def test_gradients_and_autocast(gpu, make, blend, step):
    model = make()
    mine, twin = warm(blend, model)
    for _ in range(2):
        step(model, mine, twin, tokens(1)[None])
    case = make_case(model)
    with torch.autocast("cpu", torch.bfloat16):
        gpu.count()
        run(model, case.ids, BlendedCache(case.caches, 0.3))
        run(model, tokens(1)[None], mine)
        assert gpu.count() == (0, 0, 2 * LAYERS)
    model(input_ids=case.ids, **{_compat.cache_keyword(model.forward): BlendedCache(case.caches, 0.3)})
    assert gpu.count() == (0, 0, LAYERS)


def test_a_cache_filled_under_autocast_is_decoded_without_graphs(gpu, make, blend, step):
    """Layers that do not rotate have keys in bf16 then: a kernel would write beyond such a buffer."""
    model = make("smollm3")
    mine, twin = warm(blend, model)
    for _ in range(2):
        step(model, mine, twin, tokens(1)[None])
    case = make_case(model)
    pair = BlendedCache(case.caches, 1.0), BlendedCache(case.caches, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        for cache in pair:
            run(model, case.ids, cache)
    assert {layer.keys.dtype for layer in pair[0].layers} == {torch.float32, torch.bfloat16}
    gpu.count()
    states = [layer.keys.dtype for layer in pair[0].layers]
    with pytest.raises(RuntimeError, match="dtype"):  # torch's own attention wants one dtype
        run(model, tokens(1)[None], pair[0])
    assert gpu.count()[:2] == (0, 0)
    assert [layer.keys.dtype for layer in pair[0].layers] == states


# -- weights ----------------------------------------------------------------------------------------------------------


def in_place(model):
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(0.5)


def replaced(model):
    layer = model.model.layers[2].self_attn
    layer.o_proj.weight = nn.Parameter(layer.o_proj.weight.detach() * 0.5)


def another_storage(model):
    weight = model.model.layers[2].input_layernorm.weight
    weight.data = weight.data * 0.5


def another_module(model):
    model.model.layers[2].mlp = copy.deepcopy(model.model.layers[1].mlp)


def cast(model):
    model.double()
    model.float()


@pytest.mark.parametrize("change", [in_place, replaced, another_storage, another_module, cast])
@pytest.mark.parametrize("first", ["blend", "step"])
def test_weights_that_change(gpu, make, blend, step, change, first):
    model = make()
    mine, twin = warm(blend, model)
    for seed in range(3):
        step(model, mine, twin, tokens(1, seed)[None])
    old = set(gpu.graphs)
    with torch.no_grad():
        change(model)
    gpu.replays.clear()
    if first == "step":
        step(model, mine, twin, tokens(1)[None])
        assert gpu.count()[2] == LAYERS
    for seed in range(4):
        blend(model, seed)
    step(model, mine, twin, tokens(1)[None])
    assert not old & set(gpu.replays)
    assert set(gpu.replays)  # new ones


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls deprecated names of transformers
def test_adapters_that_are_switched(gpu, blend):
    peft = pytest.importorskip("peft")
    base = tiny_model("llama", num_hidden_layers=LAYERS)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config, adapter_name="first").eval()
    torch.manual_seed(1)
    model.add_adapter("second", config)
    attach(model)
    inner = model.get_base_model()
    logits = {}
    for name in ("first", "second", "first", None, "second"):
        gpu.replays.clear()
        old = set(gpu.graphs)
        if name is None:
            with model.disable_adapter():
                for seed in range(3):
                    blend(inner, seed)
        else:
            model.set_adapter(name)
            for seed in range(3):
                mine, _ = blend(inner, seed)
            logits.setdefault(name, []).append(mine.layers[-1].keys)
        assert not old & set(gpu.replays)
    assert not torch.equal(logits["first"][0], logits["second"][0])
    assert torch.equal(logits["first"][0], logits["first"][1])


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("clone", [copy.deepcopy, through_pickle])
def test_a_copy_has_graphs_and_weights_of_its_own(gpu, make, blend, step, clone):
    model = make()
    mine, twin = warm(blend, model)
    for _ in range(2):
        step(model, mine, twin, tokens(1)[None])
    old = set(gpu.graphs)
    other = clone(model)
    assert attachment_of(other).graphs is None
    for ours, theirs in zip(model.model.layers, other.model.layers, strict=True):
        assert theirs.forward is not ours.forward
        assert theirs.forward.own.__self__ is theirs
        assert theirs.input_layernorm.__dict__["forward"].module is theirs.input_layernorm
        assert theirs.input_layernorm.__dict__["forward"].own.__self__ is theirs.input_layernorm
    case = make_case(model)
    before = run(model, case.ids, DynamicCache()).logits
    with torch.no_grad():
        for layer in other.model.layers:
            layer.post_attention_layernorm.weight.mul_(1.5)
            layer.mlp.down_proj.weight.mul_(0.5)
    assert torch.equal(run(model, case.ids, DynamicCache()).logits, before)
    assert not torch.allclose(run(other, case.ids, DynamicCache()).logits, before)
    gpu.replays.clear()
    for seed in range(3):
        blend(other, seed)
    assert gpu.count() == (0, NARROW, 1)
    assert not old & set(gpu.replays)
    gpu.replays.clear()
    blend(model, 5)
    assert gpu.count() == (0, NARROW, 1)
    assert set(gpu.replays) <= old
    del model, mine, twin
    gc.collect()
    blend(other, 6)
    assert gpu.count() == (0, NARROW, 1)


def test_detach_leaves_no_trace(gpu, make, blend):
    model = make()
    warm(blend, model)
    assert any(isinstance(m.__dict__.get("forward"), LayerForward) for m in model.modules())
    assert any(isinstance(m.__dict__.get("forward"), FusedNorm) for m in model.modules())
    detach(model)
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_detach_puts_back_the_forward_that_was_there(gpu):
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    layer = model.model.layers[1]
    own, calls = layer.forward, []

    @functools.wraps(own)
    def forward(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    layer.forward = forward
    attach(model)
    assert calls
    detach(model)
    assert layer.forward is forward
    assert "forward" not in model.model.layers[0].__dict__


# -- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_twenty_tokens(gpu, make, blend, step, family):
    """Across five growths of the buffers (`reserve=4`) and the border of a window."""
    extra = {
        "mistral": {"sliding_window": 50},
        "gemma3_text": {"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "gpt_oss": {"sliding_window": 50, "num_local_experts": 4, "attn_implementation": "eager"},
    }.get(family, {})
    if family == "gemma3_text":
        extra["layer_types"] = extra["layer_types"][:LAYERS]
    model = make(family, **extra)
    mine, twin = blend(model)
    ids = tokens(1)[None]
    places = set()
    for i in range(20):
        logits = step(model, mine, twin, ids)
        recorded, replayed, usual = gpu.count()
        if i == 0:
            assert recorded + len(attachment_of(model).graphs.refused) == LAYERS
        else:
            assert (recorded, usual) == (0, LAYERS if i == 1 else LAYERS - replayed)
        ids = logits[:, -1:].argmax(-1)
        places.add(mine.layers[0]._keys.data_ptr())
    assert len(places) > 2
    assert not attachment_of(model).graphs.refused


def test_a_batch_reordered_cropped_repeated_and_cut(gpu, make, step, monkeypatch):
    model = make()
    cases = [make_case(model), make_case(model, seed=3)]
    ids = torch.cat([case.ids for case in cases])
    caches = []
    for switch in ("on", "off"):
        monkeypatch.setenv("BLENDKV_GRAPHS", switch)
        caches.append(BlendedCache([case.caches for case in cases], 0.3, reserve=4))
        run(model, ids, caches[-1])
    monkeypatch.delenv("BLENDKV_GRAPHS")
    mine, twin = caches
    same_states(mine, twin)

    def three(batch):
        for seed in range(3):
            step(model, mine, twin, tokens(batch, seed)[:, None])

    three(2)
    assert gpu.count() == (0, LAYERS, 0)
    for change in (
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.crop(-2),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    ):
        for cache in caches:
            change(cache)
        three(2)
        assert gpu.count() == (0, LAYERS, 0)
    for cache in caches:
        cache.batch_repeat_interleave(2)
    three(4)
    for cache in caches:
        cache.batch_select_indices(torch.tensor([2, 0]))
    three(2)
    assert gpu.count() == (0, LAYERS, 0)
    step(model, mine, twin, tokens(6).view(2, 3))  # three at once
    assert gpu.count() == (0, 0, LAYERS)
    three(2)
    assert gpu.count() == (0, LAYERS, 0)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_generate(gpu, make, monkeypatch, options):
    model = make()
    answers = {}
    for switch in ("off", "on", "on", "on"):
        monkeypatch.setenv("BLENDKV_GRAPHS", switch)
        case = make_case(model, seed=5)
        cache = BlendedCache(case.caches, 0.3, reserve=4)
        answers.setdefault(switch, []).append(generate(model, case.ids, cache, **options))
    assert gpu.count()[1] > 0
    assert all(torch.equal(answer, answers["off"][0]) for answer in answers["on"])


def test_caches_in_turn(gpu, make, blend, step):
    """Two are decoded a token at a time, a third is filled between; all read through one table."""
    model = make()
    pairs = [blend(model, 1), blend(model, 2, lengths=(8, 30, 11))]
    for i in range(6):
        for seed, (mine, twin) in enumerate(pairs):
            step(model, mine, twin, tokens(1, 10 * i + seed)[None])
        blend(model, i, ratio=(0.3, 0.0)[i % 2])
    assert gpu.count()[1:] == (NARROW, 1) or gpu.count()[1] == 0
    step(model, *pairs[0], tokens(1)[None])
    assert gpu.count() == (0, LAYERS, 0)


def test_a_cache_that_went_before_its_graph_is_replayed(gpu, make, blend):
    """A graph must hold nothing of the cache that it was recorded with: its memory is somebody else's by then."""
    model = make()
    warm(blend, model)
    gc.collect()
    litter = [torch.full((1, 2, 60, 16), float("nan")) for _ in range(50)]
    blend(model, 3)
    assert gpu.count() == (0, NARROW, 1)
    del litter


def test_positions_of_the_callers_own(gpu, make, blend, step):
    model = make()
    mine, twin = blend(model)
    length = mine.get_seq_length()
    for i in range(4):
        step(model, mine, twin, tokens(1, i)[None], position_ids=torch.tensor([[length + 3 * i]]))
    assert gpu.count() == (0, LAYERS, 0)


# -- what could go stale ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["pinned", "elsewhere"])
def test_chunks_in_host_memory_are_placed_before_a_replay(gpu, make, blend, monkeypatch, home):
    """They come layer by layer: nobody but the replay of a graph would ask for them."""
    model = make()
    warm(blend, model)
    own = BlendedCache.__init__

    def init(cache, chunks, *args, **kwargs):
        for chunk in chunks:
            chunk.__dict__["homes"] = (None if home == "pinned" else torch.device("meta"),) * LAYERS
        own(cache, chunks, *args, **kwargs)

    monkeypatch.setattr(BlendedCache, "__init__", init)
    for seed in range(2):
        blend(model, seed)
        assert gpu.count() == (0, NARROW, 1)
    for seed in range(3):
        blend(model, seed, 0.0)
    assert gpu.count() == (0, LAYERS, 0)
    assert not attachment_of(model).graphs.refused


def test_two_kinds_of_position_embeddings(gpu, make, blend, step):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = make("gemma3_text", sliding_window=12, layer_types=types)
    mine, twin = warm(blend, model)
    blend(model, 0)
    assert gpu.count() == (0, NARROW, 1)
    (shape,) = attachment_of(model).graphs._shapes.values()
    assert len({id(t) for t in shape.inputs.values()}) >= 4
    for seed in range(3):
        step(model, mine, twin, tokens(1, seed)[None])
    assert gpu.count() == (0, LAYERS, 0)


def test_kinds_of_position_embeddings_in_another_order(gpu, make, blend):
    """Rows dropped one layer later: the other kind comes first, in the same shape."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = make("gemma3_text", sliding_window=12, layer_types=types)
    for _ in range(2):
        for schedule in ({1: 0.3}, {2: 0.3}, {0: 0.3}):
            for seed in range(3):
                blend(model, seed, schedule=schedule, selector="boundary")


def test_tensors_made_anew_for_each_layer(gpu, make, blend, step):
    """One that is freed leaves its id to the next: they must not be taken for the same."""
    model = make()

    def scaled(i, own):
        @functools.wraps(own)
        def call(hidden, *args, position_embeddings, **kwargs):
            made = tuple(t * (1 + 0.1 * i) for t in position_embeddings)
            return own(hidden, *args, position_embeddings=made, **kwargs)

        return call

    class Layers(nn.ModuleList):
        def __getitem__(self, index):
            found = super().__getitem__(index)
            return [scaled(i, layer) for i, layer in enumerate(found)] if isinstance(index, slice) else found

    model.model.layers = Layers(model.model.layers)
    for seed in range(3):
        mine, twin = blend(model, seed)
    assert gpu.count() == (0, NARROW, 1)
    for seed in range(3):
        step(model, mine, twin, tokens(1, seed)[None])
    assert gpu.count() == (0, LAYERS, 0)


def test_shapes_that_are_forgotten(gpu, make, blend, monkeypatch):
    """The least recently used goes, even one of this very pass; what comes back is recorded anew."""
    monkeypatch.setattr(graphs, "SHAPES", 1)
    model = make()
    for seed in range(3):
        blend(model, seed, lengths=(33, 29, 27), schedule={1: 0.6, 2: 0.1})
        assert gpu.count() == (NARROW, 0, LAYERS)
    assert len(attachment_of(model).graphs._shapes) == 1
    monkeypatch.setattr(graphs, "SHAPES", 2)
    for lengths in ((13, 9, 17), (33, 29, 27), (60, 60, 60), (13, 9, 17)):
        for seed in range(3):
            blend(model, seed, lengths=lengths)
    assert len(attachment_of(model).graphs._shapes) == 2


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_inference_mode_and_no_grad_in_turn(gpu, make, blend, step, modes):
    model = make()
    pairs = []
    for i in range(6):
        with modes[i % 2]():
            pairs.append(blend(model, i))
    assert gpu.count() == (0, NARROW, 1)
    for i in range(6):
        for mine, twin in pairs[:2]:
            with modes[i % 2]():
                step(model, mine, twin, tokens(1, i)[None])
    assert gpu.count() == (0, LAYERS, 0)


def test_another_dtype(gpu, make, blend, step):
    model = make(dtype=torch.float32)
    warm(blend, model)
    model.to(torch.bfloat16)
    attach(model)
    gpu.replays.clear()
    old = set(gpu.graphs)
    case = make_case(model)
    for _ in range(3):
        run(model, case.ids, BlendedCache(case.caches, 0.3))
    assert gpu.count()[1] > 0
    assert not old & set(gpu.replays)


def test_an_answer_is_not_overwritten(gpu, make, blend):
    """The last layer's output belongs to the caller; a decoder without a last norm hands it out as it is."""
    model = make()
    model.model.norm = nn.Identity()
    warm(blend, model)
    for seed in range(3):  # `blend` looks at all earlier answers
        blend(model, seed)
    case = make_case(model, seed=7)
    first = run(model.model, case.ids, BlendedCache(case.caches, 0.3)).last_hidden_state
    copied = first.clone()
    mine, _ = blend(model, 8)
    assert torch.equal(first.nan_to_num(), copied.nan_to_num())
    held = []
    for seed in range(5):
        gpu.count()
        out = run(model.model, tokens(1, seed)[None], mine).last_hidden_state
        held.append((out, out.clone()))
    assert gpu.count() == (0, LAYERS, 0)
    assert all(torch.equal(out, then) for out, then in held)


def test_a_decoder_that_keeps_hidden_states_of_layers_has_no_graphs(gpu, make, blend):
    """A replay writes over what the layer before returned: a decoder that reads it later would read something else."""
    model = make()
    kept = []

    def keeps(i, own):
        @functools.wraps(own)
        def call(hidden, *args, **kwargs):
            kept[i:] = [hidden]
            out = own(hidden, *args, **kwargs)
            return out + 0.5 * kept[1] if i == LAYERS - 1 and kept[1].shape == out.shape else out

        return call

    class Layers(nn.ModuleList):
        def __getitem__(self, index):
            found = super().__getitem__(index)
            return [keeps(i, layer) for i, layer in enumerate(found)] if isinstance(index, slice) else found

    model.model.layers = Layers(model.model.layers)
    for seed in range(4):
        blend(model, seed, schedule={0: 0.3}, selector="boundary")
        assert gpu.count()[1] == 0


def test_threads(gpu, make, blend):
    """While one blends with graphs another runs as usual, and both are right."""
    model = make()
    warm(blend, model)
    waits, goes_on = threading.Event(), threading.Event()

    class Waiting(HKVD):
        def score(self, candidates):
            waits.set()
            assert goes_on.wait(30)
            return super().score(candidates)

    case, other = make_case(model, seed=1), make_case(model, seed=2)
    want = [run(model, c.ids, BlendedCache(c.caches, 0.3)).logits for c in (case, other)]
    got, cache = {}, BlendedCache(case.caches, 0.3, Waiting())
    thread = threading.Thread(target=lambda: got.update(first=run(model, case.ids, cache).logits))
    gpu.count()
    thread.start()
    assert waits.wait(30)
    got["second"] = run(model, other.ids, BlendedCache(other.caches, 0.3)).logits
    assert gpu.count() == (0, 0, LAYERS + 1)  # and the first layer of the one that waits
    goes_on.set()
    thread.join()
    assert gpu.count() == (0, NARROW, 0)
    same(got["first"], want[0])
    same(got["second"], want[1])
    blend(model, 3)
    assert gpu.count() == (0, NARROW, 1)


def test_many_threads(gpu, make):
    model = make()
    cases = [make_case(model, seed=seed) for seed in range(4)]
    want = [run(model, case.ids, BlendedCache(case.caches, 0.3)).logits for case in cases]
    failed = []

    def work(i):
        for _ in range(4):
            cache = BlendedCache(cases[i].caches, 0.3, reserve=2)
            try:
                same(run(model, cases[i].ids, cache).logits, want[i])
                for seed in range(4):
                    run(model, tokens(1, seed)[None], cache)
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_no_garbage_is_collected_while_a_graph_is_recorded():
    """A graph of a model that is gone, destroyed in the middle of a recording, would spoil it."""
    import gc

    from blendkv.recording import _no_collection

    with _no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError), _no_collection():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    try:
        with _no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
