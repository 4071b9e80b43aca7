"""`bench streaming`: links, rows beside an oracle, what is asked of a policy, orders of sending, a moving client."""

import json
import uuid

import numpy as np
import pytest
from typer.testing import CliRunner

from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.links import SETS, links_of, read_links
from blendkv.bench.sending import MOVES, move_rows, order_rows, send
from blendkv.bench.simulation import simulate
from blendkv.bench.streaming import Prompt, checks, streaming_rows
from blendkv.bench.throttle import ThrottledStore
from blendkv.chunkwriter import encode_chunk
from blendkv.cli import main
from blendkv.codecs import get_codec
from blendkv.loading.clocks import VirtualClock
from blendkv.loading.levels import write_levels
from blendkv.loading.orders import ORDERS
from blendkv.loading.policies import FixedLevel
from blendkv.loading.streaming import Item, Rung
from blendkv.stores import RemoteStore
from tests.drawn import SMALL, chunk_of, profile_of

RUNGS = (Rung("raw", 1_600_000, 0.0), Rung("good", 300_000, 0.004, 0.01), Rung("poor", 100_000, 0.1, 0.01))
PROMPT = Prompt((Item(RUNGS, 0.4),) * 8, 0.1, 8 * 1_600_000)


# -- links --


@pytest.mark.parametrize("name", SETS)
def test_links_are_the_same_for_a_seed_and_nominal(name):
    many = links_of(name, 200, 0.5, seed=3)
    assert links_of(name, 5, 0.5, seed=3) == many[:5]
    assert links_of(name, 5, 0.5, seed=4) != many[:5]
    rates = np.array([link.rates for link in many])
    moving = rates[rates > 0]
    assert 0.9 < moving.mean() < 1.1 if name != "wireless" else 0.6 < moving.mean() < 1.5
    assert (rates == 0).any() == (name == "outages")
    if name == "outages":
        assert all((one == 0).sum() >= 4 for one in rates)
    if name == "wireless":
        assert np.quantile(rates, 0.05) < np.median(rates) / 5


def test_links_of_a_file(tmp_path):
    path = tmp_path / "links.jsonl"
    path.write_text('{"bw": [1, 3]}\n\n{"bw": [0, 2.5], "more": 1}\n')
    assert [link.rates for link in read_links(path, 2.0)] == [(0.5, 1.5), (0.0, 2.0)]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1, 2]",
        '{"bw": []}',
        '{"bw": [1, -1]}',
        '{"bw": [1, "2"]}',
        '{"bw": [NaN]}',
        '{"bw": [0, 0]}',
        "{}",
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, line):
    path = tmp_path / "links.jsonl"
    path.write_text('{"bw": [1]}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2: "):
        read_links(path, 1.0)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no lines"):
        read_links(path, 1.0)
    with pytest.raises(ValueError, match="choose among uniform"):
        links_of("sunny", 1, 1.0)


# -- counted time is what real bytes take --


@pytest.mark.parametrize("seed", range(3))
def test_the_simulation_takes_as_long_as_a_throttled_store(seed):
    link = links_of("wireless", seed + 1, 0.1, seed)[seed].scaled(2_000_000)
    chunks = [chunk_of(SMALL, 500 + i, seed=i) for i in range(4)]
    store = RemoteStore(f"memory://{uuid.uuid4().hex}")
    levels = [write_levels(store, chunk, [get_codec("raw")])[0] for chunk in chunks]
    items = [Item((Rung("raw", level.nbytes, 0.0),), 1.0) for level in levels]
    counted = simulate(items, FixedLevel("raw"), link, 10.0, latency_s=0.01, piece=1 << 14)
    slow = ThrottledStore(store, link, latency_s=0.01, clock=VirtualClock(), burst_s=0.0)
    for level in levels:
        for start in range(0, level.nbytes, 1 << 14):
            assert slow.get(level.key, start, min(start + (1 << 14), level.nbytes))
    assert counted.ttft_s == pytest.approx(slow.clock.now(), rel=1e-6)
    assert counted.brought == slow.carried


# -- rows --


@pytest.fixture(scope="module")
def rows():
    sets = {name: links_of(name, 6, PROMPT.text_s / 10) for name in ("uniform", "outages")}
    chosen = []
    made = list(streaming_rows(PROMPT, sets, loads=(0.5, 10.0), slos=(0.5, 1.0), chosen=chosen.append))
    assert chosen
    assert all(len(names) == 8 and len(set(names)) > 1 for names in chosen)
    return made


def test_rows_of_every_policy_in_every_cell(rows):
    names = {"raw", "good", "poor", "text", "in-order", "adaptive", "oracle"}
    cells = {}
    for row in rows:
        cells.setdefault((row["traces"], row["load"], row["slo"]), {})[row["policy"]] = row
    assert len(cells) == 8
    for (_, load, slo), cell in cells.items():
        assert set(cell) == names
        assert all(0 <= row["violations"] <= 1 for row in cell.values())
        assert cell["text"]["violations"] == (1.0 if slo < 1 else 0.0)
        assert cell["text"]["ttft_s"] == pytest.approx(PROMPT.text_s)
        assert min(row["violations"] for row in cell.values()) == pytest.approx(cell["oracle"]["violations"])
        assert cell["adaptive"]["ttft_of_text"] <= 1.1 + 1e-9
        assert cell["adaptive"]["kl"] < 0.1
        assert cell["raw"]["kl"] is None or cell["raw"]["kl"] == 0.0
        if load == 0.5 and cell["raw"]["kl"] is not None:
            assert cell["raw"]["brought"] == pytest.approx(1.0)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_checks_say_what_is_asked(rows):
    found = checks(rows)
    assert len(found) == 8
    for one in found:
        assert one["near_oracle"] == (one["violations"] <= one["oracle_violations"] + 0.05 + 1e-9)
        assert (one["holds"] is None) == (not one["applies"])
        if one["fixed"] is not None:
            assert one["applies"] == (one["fixed_violations"] >= 0.6)
    hopeless = {"violations": 1.0, "kl": 0.5, "ttft_of_text": 3.0}
    cell = {"traces": "x", "load": 1.0, "slo": 0.5}
    own = [
        cell | {"policy": "adaptive"} | hopeless,
        cell | {"policy": "good", "violations": 0.7, "kl": 0.004},
        cell | {"policy": "poor", "violations": 0.65, "kl": 0.4},
        cell | {"policy": "poorer", "violations": 0.1, "kl": 0.6},
        cell | {"policy": "oracle", "violations": 0.0, "kl": 0.0},
    ]
    (one,) = checks(own)
    assert (one["fixed"], one["applies"], one["holds"], one["near_oracle"]) == ("poor", True, False, False)


def test_levels_that_not_every_chunk_has_are_no_fixed_policy():
    prompt = Prompt((Item(RUNGS, 0.4), Item(RUNGS[1:], 0.4)), 0.0, 3_200_000)
    assert prompt.levels == ["good", "poor"]


# -- orders and a moving client --


@pytest.fixture(scope="module")
def files():
    codec = get_codec("klt", profile=profile_of("klt"), streams=2)
    return codec, [encode_chunk(chunk_of(SMALL, 600, seed=seed), codec) for seed in range(3)]


def test_by_half_of_the_bytes_bases_are_worth_most(files):
    codec, data = files
    total = sum(map(len, data))
    link = Bandwidth.constant(total)
    half = {order: send(data, codec, order, link, 0.75, 2048) for order in ORDERS}
    assert half["base-first"].usable == 1.0
    assert 0 < half["base-first"].refined < 1
    assert 0 < half["sequential"].usable < 1
    assert half["refinements-first"].usable < half["sequential"].usable
    assert send(data, codec, "refinements-first", link, 0.5, 2048).usable == 0
    for order in ORDERS:
        whole = send(data, codec, order, link, 1.0, 2048)
        assert (whole.usable, whole.refined, whole.brought) == (1.0, 1.0, total)
        assert all(file.complete for file in whole.files)
        assert send(data, codec, order, link, 1e-6, 2048).usable == 0
    first = half["base-first"].files[0].usable()
    assert len(first) == 600


def test_order_rows(files):
    codec, data = files
    sets = {"wireless": links_of("wireless", 4, 0.1)}
    rows = list(order_rows(data, codec, sets, 1.0, slos=(0.5,), loads=(1.0,), piece=2048))
    assert [row["order"] for row in rows] == list(ORDERS)
    by_order = {row["order"]: row for row in rows}
    assert by_order["base-first"]["usable"] >= by_order["sequential"]["usable"]
    assert by_order["sequential"]["usable"] >= by_order["refinements-first"]["usable"]


def test_a_client_that_hands_over_brings_no_byte_twice(files):
    codec, _ = files
    store = RemoteStore(f"memory://{uuid.uuid4().hex}")
    (level,) = write_levels(store, chunk_of(SMALL, 2000), [codec])
    rows = list(move_rows(store, level, links_of("uniform", 3, 0.1), 1.0))
    assert [row["move"] for row in rows] == list(MOVES) * 3
    for at in (0.1, 0.5, 0.9):
        over, anew, stay = (row for row in rows if row["at"] == at)
        assert over["arrived"] == anew["arrived"] == 1.0
        assert stay["arrived"] == 0.0
        assert 1.0 <= over["brought"] < 1.1  # the piece that was under way
        assert anew["brought"] > over["brought"] + 0.5 * at
        assert over["ttft_s"] <= anew["ttft_s"] + 1e-6


# -- the command --


def test_bad_input_of_the_command(tmp_path):
    path = tmp_path / "links.jsonl"
    path.write_text('{"bw": [1, 2]}\n{"bw": "fast"}\n')
    for options, said in (
        (["--traces", str(path)], "line 2"),
        (["--traces", str(tmp_path / "none.jsonl")], "none.jsonl"),
        (["--slos", "0.5,x"], "positive numbers"),
        (["--loads", "0"], "positive numbers"),
    ):
        result = CliRunner().invoke(main, ["bench", "streaming", *options])
        assert result.exit_code != 0
        assert said in " ".join(result.output.split())
        assert "Traceback" not in result.output
