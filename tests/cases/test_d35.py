import errno
import multiprocessing
import random
from pathlib import Path
from typing import Any

import torch

from blendkv import Pool, TieredStore, attach, chunk_key, model_fingerprint
from blendkv.stores import DiskStore
from tests.cases.common import assert_same_answer, model_of
from tests.cases.stored import ask, assert_hit, files_of, library, local
from tests.chunks import assert_same
from tests.faults.systems import system

PROCESSES, ROUNDS = 4, 6


def documents(number: int) -> list[str]:
    return [f"Round {number} of all who write.", f"Another text, {number * 31}."]


def worker(folder: str, number: int, barrier: Any, answers: Any) -> None:
    """Asks about the same documents at the same moment as the others; in worker 0 calls fail at random."""
    torch.set_num_threads(1)
    draw, told = random.Random(number), []

    def fail(name: str) -> None:
        if number == 0 and name in ("write", "rename", "pread", "fsync") and draw.random() < 0.1:
            raise OSError(errno.EIO, "injected")

    try:
        kv = library(model_of(), TieredStore(Pool(1), DiskStore(folder)))
        with system(before=fail):
            for turn in range(ROUNDS):
                barrier.wait(timeout=120)
                (ids, logits), report = ask(kv, documents(turn))
                (_, again), second = ask(kv, documents(turn))
                told.append((ids.tolist(), logits.tolist(), float((again - logits).abs().max()), report.put_failures))
                told[-1] += (second.loaded.get(kv.pool.stores[0].url, 0),)
        answers.put((number, told, dict(kv.pool.stats.damaged)))
    except BaseException as error:
        barrier.abort()
        answers.put((number, repr(error), {}))


def test_d35_processes_that_store_the_same_chunks(tmp_path, monkeypatch):
    """A shared name for what is being written: one failed, or a short file was published (LMCache#2517, #4991)."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cases.test_d35"])
    kv = library(model_of(), tmp_path)  # which proves the model for all
    barrier, answers = context.Barrier(PROCESSES), context.Queue()
    processes = [
        context.Process(target=worker, args=(str(tmp_path), number, barrier, answers)) for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    told = [answers.get(timeout=240) for _ in processes]
    for process in processes:
        process.join()
    wanted = [local(kv, documents(turn)) for turn in range(ROUNDS)]
    for number, rounds, damaged in told:
        assert isinstance(rounds, list), rounds
        assert not damaged
        for (ids, logits, changed, failed, loaded), want in zip(rounds, wanted, strict=True):
            assert_same_answer((torch.tensor(ids), torch.tensor(logits)), want)
            assert changed < 1e-4
            assert not failed or number == 0  # who loses the race succeeds too
            assert loaded or number == 0
    keys = [path.stem for path in files_of(tmp_path)]
    assert len(keys) == len(set(keys)) == 1 + 2 * ROUNDS  # the head, and one file a document
    assert not list(tmp_path.rglob("*.tmp"))
    assert not (tmp_path / "bad").exists()
    for turn in range(ROUNDS):
        assert_hit(kv, documents(turn))
    fresh = library(kv.model, "memory://")
    for turn in range(ROUNDS):
        for made, stored in zip(fresh.prefill(documents(turn)), kv.prefill(documents(turn)), strict=True):
            assert made.key == stored.key
            torch.testing.assert_close(made.keys, stored.keys, atol=1e-5, rtol=1e-5)


def shard(number: int):
    """One of two halves of a model, as tensor parallelism cuts attention: a KV head and two query heads each."""
    model = model_of(num_key_value_heads=1, num_attention_heads=2)
    whole = model_of().state_dict()
    for name, parameter in model.state_dict().items():
        kind = name.split(".")[-2]
        dim = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}.get(kind)
        parameter.copy_(whole[name] if dim is None else whole[name].chunk(2, dim)[number])
    return model


def test_d35_two_shards_of_a_model_never_share_a_name(tmp_path):
    """Ranks wrote the same object name (sglang PR #10969)."""
    shards = [attach(shard(number)) for number in (0, 1)]
    fingerprints = {model_fingerprint(each) for each in (*shards, model_of())}
    assert len(fingerprints) == 3
    assert len({chunk_key([1, 2, 3], fingerprint) for fingerprint in fingerprints}) == 3
    libraries = [library(each, tmp_path) for each in shards]
    made = [kv.prefill(documents(0)) for kv in libraries]
    assert len(files_of(tmp_path)) == 4
    for kv, mine in zip(libraries, made, strict=True):
        kv.clear()
        for chunk, again in zip(mine, kv.prefill(documents(0)), strict=True):
            assert_same(chunk, again)
        assert kv.pool.stats.hits[kv.pool.stores[0].url] == 2
    assert not torch.equal(made[0][0].keys[0], made[1][0].keys[0])
