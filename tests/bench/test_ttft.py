"""The methods behind one interface, and the rows of `bench ttft`."""

import shutil
from dataclasses import replace

import pytest
import torch

from blendkv import flops
from blendkv.bench import ondisk
from blendkv.bench.decode import TokenClock, decode_rate
from blendkv.bench.gates import require_exact, require_exact_states, require_same
from blendkv.bench.methods import METHODS, Blend, Case, Full, Prefix, Reuse, make_methods
from blendkv.bench.prompts import pool_name, random_case
from blendkv.bench.results import device_name, identity
from blendkv.bench.table import markdown
from blendkv.bench.ttft import _states_length, ttft_rows
from blendkv.errors import BlendError, StoreError
from blendkv.rope import Rotation
from blendkv.selectors import get_selector
from blendkv.stores import DiskStore

FIELDS = {
    "device", "shape", "dtype", "method", "selector", "ratio", "tokens", "question_tokens", "chunk_tokens", "batch",
    "pool", "run", "ttft_s", "full_ttft_s", "speedup", "flop_limit", "achieved_of_limit", "floor_s",
    "achieved_of_floor", "one_token_s", "charged_budget", "peak_bytes", "placed_bytes", "pool_bytes",
    "decode_tokens_per_s", "full_decode_tokens_per_s", "decode_ratio", "spread_s", "all_ttft_s", "stages_s", "versions",
}  # fmt: skip


@pytest.fixture
def case(attached):
    return random_case(attached("llama"), tokens=80, chunk_tokens=32, question_tokens=8)


def test_a_random_case_is_chunks_and_a_question(case):
    assert [len(chunk) for chunk in case.chunks] == [32, 32, 16]
    assert case.tokens == 80
    assert case.ids.shape == (1, 88)
    assert case.ids[0, 80:].tolist() == list(case.question)


@pytest.mark.parametrize("method", [Prefix(), Blend(1.0)], ids=["prefix", "ratio 1"])
def test_exact_methods_answer_as_full_recompute_each_time_they_are_asked(case, method):
    full = Full().prepare(case)(5, output_logits=True)
    run = method.prepare(case)
    for _ in range(2):
        answer = run(5, output_logits=True)
        assert answer.tokens.tolist() == full.tokens.tolist()
        torch.testing.assert_close(answer.logits, full.logits, atol=1e-4, rtol=1e-4)
    assert len(full.tokens) == 5
    assert full.report is None


def test_reuse_recomputes_nothing_and_says_so(case):
    report = Reuse().prepare(case)(1).report
    assert report.reused_tokens == 80
    assert Reuse().charged_budget(case, report) == 0
    assert report.layers[0].recomputed == 0


def test_flop_limits_and_budgets(case):
    shape = flops.model_shape(case.model)
    assert Full().flop_limit(shape, case) == Full().charged_budget(case, None) == 1
    assert Prefix().charged_budget(case, None) == pytest.approx(48 / 80)
    rest = flops.full_flops(shape, 80, 8) - flops.full_flops(shape, 32) + shape.head_flops
    assert Prefix().flop_limit(shape, case) == pytest.approx(flops.full_flops(shape, 80, 8) / rest)
    assert Blend(0.15).flop_limit(shape, case) == flops.flop_limit(shape, 80, 8, 0.15)
    assert Reuse().flop_limit(shape, case) == flops.flop_limit(shape, 80, 8, 0.0)
    static = make_methods(["blend"], [0.15], "boundary")[0]
    assert static.flop_limit(shape, case) == flops.flop_limit(shape, 80, 8, 0.15, static=True)
    assert make_methods(["blend"], [0.15], "all")[0].flop_limit(shape, case) == pytest.approx(1)


def test_methods_by_name():
    assert [method.name for method in make_methods(METHODS, (0.1, 0.2))] == [*METHODS, "blend"]
    with pytest.raises(ValueError, match="unknown method 'magic'"):
        make_methods(["full", "magic"])
    with pytest.raises(ValueError, match="outside"):
        make_methods(["blend"], [1.2])
    with pytest.raises(ValueError, match="unknown selector"):
        make_methods(["blend"], [0.1], "magic")


def test_rows(attached):
    rows = ttft_rows(
        attached("llama"), tokens=64, chunk_tokens=32, question_tokens=8, ratios=(0.1, 0.5), repeats=2, decode_tokens=3
    )
    assert [row["method"] for row in rows] == ["full", "prefix", "reuse", "blend", "blend"]
    full = rows[0]
    for row in rows:
        assert set(row) >= FIELDS
        assert len(row["all_ttft_s"]) == 2
        assert row["ttft_s"] > 0
        assert row["speedup"] == pytest.approx(full["ttft_s"] / row["ttft_s"])
        assert row["achieved_of_limit"] == pytest.approx(row["speedup"] / row["flop_limit"])
        assert (row["tokens"], row["device"]) == (64, device_name(torch.device("cpu")))
        assert (row["shape"], row["pool"], row["run"], row["batch"]) == ("llama", "cpu", 0, 1)
        assert row["spread_s"] == [min(row["all_ttft_s"]), max(row["all_ttft_s"])]
        assert row["full_ttft_s"] == full["ttft_s"]
        assert row["floor_s"] == max(full["ttft_s"] / row["flop_limit"], row["one_token_s"])
        assert row["peak_bytes"] >= 0
        assert (row["decode_tokens_per_s"] is not None) == (row["method"] in ("full", "blend"))
    assert full["speedup"] == full["flop_limit"] == full["charged_budget"] == 1
    assert 0.1 < rows[3]["charged_budget"] < rows[4]["charged_budget"] < 1


def test_full_recompute_is_measured_though_nobody_asked_for_its_row(attached):
    [row] = ttft_rows(
        attached("llama"),
        tokens=32,
        chunk_tokens=32,
        question_tokens=4,
        methods=["reuse"],
        repeats=1,
        decode_tokens=0,
    )
    assert row["method"] == "reuse"
    assert row["speedup"] > 0
    assert row["decode_tokens_per_s"] is None


def test_no_time_is_reported_where_ratio_1_is_not_full_prefill(case, monkeypatch):
    require_exact(case)
    monkeypatch.setattr(Blend, "kept", 0.0)
    with pytest.raises(BlendError, match="not full prefill"):
        require_exact(case)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("batch", [1, 2])
def test_exact_states_pass_their_gate_and_wrong_ones_do_not(attached, monkeypatch, family, batch):
    model = attached(family, sliding_window=24) if family == "mistral" else attached(family)
    case = random_case(model, 80, 32, 8, batch=batch)
    assert require_exact_states(case) < 1e-4
    right = Rotation.rotate
    monkeypatch.setattr(Rotation, "rotate", lambda self, keys, angles, **kw: right(self, keys * 1.01, angles, **kw))
    with pytest.raises(BlendError, match="do not stay exact"):
        require_exact_states(case)


def test_a_batch_shares_its_chunks_and_every_row_answers_alike(attached):
    case = random_case(attached("llama"), 64, 32, 8, batch=3)
    assert case.ids.shape == (3, 72)
    for method in (Full(), Prefix(), Blend(0.2)):
        answer = method.prepare(case)(4, output_logits=True)
        assert answer.logits.shape[0] == 12
        tokens = answer.tokens.view(3, 4)
        assert torch.equal(tokens[0], tokens[1])
        assert torch.equal(tokens[0], tokens[2])
    assert require_exact(case) < 1e-4


def test_lengths_selectors_and_runs_each_have_their_rows(attached, capsys):
    seen = []
    rows = ttft_rows(
        attached("llama"),
        tokens=[64, 96],
        chunk_tokens=32,
        question_tokens=8,
        methods=["blend"],
        selectors=["boundary", "all"],
        ratios=(0.1, 0.5),
        repeats=1,
        runs=2,
        batch=2,
        decode_tokens=0,
        on_row=lambda row: seen.append(len(seen)),
        progress=True,
    )
    blends = [("boundary", 0.1), ("boundary", 0.5), ("all", 1.0)]  # which has a ratio of its own
    told = [(row["run"], row["tokens"], row["selector"], row["ratio"]) for row in rows]
    assert told == [(run, n, *blend) for run in (0, 1) for n in (64, 96) for blend in blends]
    assert len(seen) == len(rows)
    assert len({identity(row) for row in rows}) == len(rows)
    said = capsys.readouterr().err
    assert said.count("ratio 1 equals full recompute") == 2
    assert said.count("exact keys and values stay exact") == 1
    assert said.index("96 tokens: exact") < said.index("64 tokens: blend boundary 0.1")


@pytest.mark.parametrize(
    ("lengths", "gate"), [([512, 1024], 1024), ([1024, 4096, 2048], 2048), ([32768, 16384], 8192), ([100], 100)]
)
def test_the_length_at_which_exact_states_are_blended(lengths, gate):
    assert _states_length(lengths) == gate


def test_chunks_lie_where_they_are_wanted(attached):
    for pool in ("cpu", "disk"):
        assert pool_name(random_case(attached("llama"), 64, 32, 8, pool=pool)) == pool
    for wrong, why in {"cuda": "the model is on cpu", "pinned": "needs CUDA", "tape": "unknown pool"}.items():
        if wrong != "pinned" or not torch.cuda.is_available():
            with pytest.raises(ValueError, match=why):
                random_case(attached("llama"), 64, 32, 8, pool=wrong)


def test_a_disk_without_room_is_told_of_before_anything_is_timed(attached, monkeypatch):
    monkeypatch.setattr(ondisk, "DiskStore", lambda folder: DiskStore(folder, capacity_bytes=1000))
    with pytest.raises(StoreError, match=r"4 of 4 chunks could not be written .*\(capacity\): let TMPDIR"):
        random_case(attached("llama"), 128, 32, 8, pool="disk")


def test_chunks_on_a_disk_are_read_by_every_call_and_say_the_same(attached):
    case, there = (random_case(attached("llama"), 128, 32, 8, pool=pool) for pool in ("cpu", "disk"))
    blends = [Blend(0.3), Blend(0.15, get_selector("boundary")), Reuse()]
    assert require_same(case, there, blends) < 1e-5
    shutil.rmtree(there.read.folder)
    with pytest.raises(RuntimeError, match="are gone"):
        blends[0].prepare(there)(1)


def test_chunks_that_say_something_else_stop_the_benchmark(attached):
    case, other = (random_case(attached("llama"), 128, 32, 8, seed=seed) for seed in (0, 1))
    wrong = replace(case, chunks=tuple(replace(a, keys=b.keys) for a, b in zip(case.chunks, other.chunks, strict=True)))
    with pytest.raises(BlendError, match="say something else"):
        require_same(case, wrong, [Blend(0.1)])


def test_several_pools_take_turns(attached):
    rows = ttft_rows(
        attached("llama"),
        tokens=64,
        chunk_tokens=32,
        question_tokens=8,
        repeats=2,
        pool=["cpu", "disk"],
        decode_tokens=2,
    )
    assert [(row["method"], row["pool"]) for row in rows] == [
        ("full", "cpu"), ("prefix", "cpu"), ("reuse", "cpu"), ("reuse", "disk"), ("blend", "cpu"), ("blend", "disk"),
    ]  # fmt: skip
    assert "of_first" not in rows[0]
    for first, second in (rows[2:4], rows[4:6]):
        assert (first["of_first"], first["first_pool"]) == (1, "cpu")
        assert second["of_first"] == second["ttft_s"] / first["ttft_s"]
        assert second["full_ttft_s"] == rows[0]["ttft_s"]
    table = markdown(rows)
    assert table.count("of the time from cpu") == 2
    assert "files, read in every call" in table
    with pytest.raises(ValueError, match="at least one"):
        ttft_rows(attached("llama"), pool=[])


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0},
        {"tokens": []},
        {"chunk_tokens": 0},
        {"repeats": 0},
        {"decode_tokens": -1},
        {"runs": 0},
        {"batch": 0},
    ],
)
def test_numbers_out_of_range(attached, wrong):
    with pytest.raises(ValueError, match="at least"):
        ttft_rows(attached("llama"), **wrong)


def test_the_clock_counts_new_tokens_only(case):
    clock = TokenClock()
    Full().prepare(case)(4, min_new_tokens=4, streamer=clock)
    assert len(clock.times) == 4
    assert clock.times == sorted(clock.times)
    assert decode_rate(Full().prepare(case), 3) > 0


def test_the_first_piece_is_exact_where_it_stands(attached):
    case = Case.of(attached("llama"), [list(range(40))], [7, 8, 9])
    full, reuse = (method.prepare(case)(3, output_logits=True) for method in (Full(), Reuse()))
    torch.testing.assert_close(reuse.logits, full.logits, atol=1e-4, rtol=1e-4)
