"""`blendkv bench gateway`: a short sample of the soak, and wrong bytes that it notices."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from blendkv.bench.gateway_load import load
from blendkv.cli import main
from tests.serving.gateways import TOKEN, chunk_file, disk, gateway


@pytest.mark.slow
def test_a_short_soak():
    arguments = ["bench", "gateway", "--minutes", "0.1", "--clients", "64", "--size", "1M", "--rounds", "1"]
    result = CliRunner().invoke(main, [*arguments, "--round-seconds", "1", "--json"])
    rows = {row["kind"]: row for row in json.loads(result.stdout)["rows"]}
    soak = rows["soak"]
    assert (soak["wrong"], soak["errors"]) == (0, 0), soak
    assert soak["requests"] > 64
    assert soak["rss_ratio"] < 1.5  # a leak of what is sent would be many times that; 2% is for ten minutes
    assert rows["throughput"]["wrong"] == 0
    assert rows["throughput"]["ratio"] > 0.2  # a loaded machine; the figure is in docs/guides/serving.md


def test_wrong_bytes_are_noticed(tmp_path):
    store, files = disk(tmp_path / "store"), {}
    for seed in range(3):
        key, data = chunk_file(seed)
        store.put(key, data)
        file = tmp_path / key
        file.write_bytes(data)
        files[key] = str(file)
    with gateway(store) as running:
        found = asyncio.run(load(running.port, TOKEN, files, 8, 1.0, ""))
        assert (found["wrong"], found["errors"]) == (0, 0), found
        assert found["requests"] > 8
        flipped = bytearray(data)
        flipped[-20] ^= 1
        file.write_bytes(flipped)
        found = asyncio.run(load(running.port, TOKEN, files, 8, 1.0, "get"))
        assert 0 < found["wrong"] < found["requests"]
        assert asyncio.run(load(running.port, "a-token-of-nobody", files, 2, 0.2, "get"))["wrong"] > 0
