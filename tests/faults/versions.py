"""F18: chunks of another model, tokenizer, adapter or transformers are misses; of the same they are hits, and right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from blendkv import chunk as chunks
from blendkv.attaching import attach, detach
from blendkv.library import ChunkLibrary
from blendkv.stores import DiskStore, Pool, TieredStore
from blendkv.testing import byte_tokenizer, tiny_model
from tests.faults.rows import Result, row

DOCUMENTS = ("The tower is 61 m high.", "It was built in 1923. The architect was M. Ilg.")
ROOT = Path(__file__).parent.parent.parent
OTHER = "BLENDKV_OTHER_PYTHON"
"""Names the Python of an environment with another transformers; else one that `make test-matrix` made is looked for."""


def library(folder: str, model: Any, tokenizer: Any, **options: Any) -> ChunkLibrary:
    """Without memory of its own, so that each document comes from the folder, or is computed."""
    return ChunkLibrary(model, tokenizer, TieredStore(Pool(1), DiskStore(folder)), **{"condition": "none"} | options)


def hits(kv: ChunkLibrary) -> tuple[int, list[torch.Tensor]]:
    """Documents that the folder had, and the values of their last layers."""
    before = sum(kv.pool.stats.hits.values())
    found = kv.prefill(DOCUMENTS)
    return sum(kv.pool.stats.hits.values()) - before, [chunk.values[-1] for chunk in found]


# -- one field changed ------------------------------------------------------------------------------------------------


def weight(name: str, at: int = 0) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        with torch.no_grad():
            dict(model.named_parameters())[name].view(-1)[at] += 0.125
        return model

    return change


def config(name: str, value: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        setattr(model.config, name, value)
        return model

    return change


class Adapter(nn.Module):
    """A layer with low-rank weights beside it, and what PEFT's have."""

    active_adapters, merged_adapters, disable_adapters = ("default",), (), False

    def __init__(self, base: nn.Linear, scale: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base, self.scaling = base, {"default": scale}
        self.a = nn.Parameter(torch.randn(2, base.in_features, generator=generator))
        self.b = nn.Parameter(torch.randn(base.out_features, 2, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scaling["default"] * (x @ self.a.T @ self.b.T)


def adapter(scale: float, seed: int) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        attention = model.model.layers[1].self_attn
        attention.v_proj = Adapter(attention.v_proj, scale, seed)
        return model

    return change


def llama(**settings: Any) -> Any:
    return tiny_model("llama", num_hidden_layers=2, **settings)


def models() -> dict[str, Callable[[], Any]]:
    """The same model but for one thing."""
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    return {
        "architecture": lambda: tiny_model("mistral", num_hidden_layers=2),
        "a field of the config": lambda: llama(rms_norm_eps=1e-3),
        "dtype": lambda: llama(dtype=torch.bfloat16),
        "rope's theta": lambda: llama(rope_parameters=rope),
        "rope's scaling": lambda: llama(rope_parameters=scaled),
        "seed of the weights": lambda: llama(seed=1),
        "quantisation": lambda: config("quantization_config", {"quant_method": "none", "bits": 8})(llama()),
        "one weight of attention": lambda: weight("model.layers.0.self_attn.k_proj.weight")(llama()),
        "one weight of a norm": lambda: weight("model.layers.1.input_layernorm.weight", 7)(llama()),
        "one weight of an MLP": lambda: weight("model.layers.0.mlp.down_proj.weight", 100)(llama()),
        "one embedding": lambda: weight("model.embed_tokens.weight", 999)(llama()),
        "an adapter": lambda: adapter(1.0, 0)(llama()),
        "another adapter": lambda: adapter(1.0, 1)(llama()),
        "an adapter's scale": lambda: adapter(0.5, 0)(llama()),
    }


def settings() -> dict[str, tuple[Any, dict[str, Any]]]:
    """The same model used in another way: tokenizer, options."""
    same = byte_tokenizer()
    return {
        "tokenizer": (byte_tokenizer(merges=(("z", "q"),)), {}),
        "special tokens": (byte_tokenizer(chat=True, bos=True), {}),
        "what stands before": (byte_tokenizer(bos=True), {"condition": "bos"}),
        "namespace": (same, {"namespace": "another"}),
        "secret": (same, {"namespace": "ours"}),
    }


@contextmanager
def next_format() -> Generator[None]:
    with mock.patch.object(chunks, "KEY_VERSION", chunks.KEY_VERSION + 1):
        yield


def one_field(result: Result) -> None:
    tokenizer = byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        model = attach(llama())
        kv = library(folder, model, tokenizer)
        found, right = hits(kv)
        result.expect(found == 0, "the folder is not empty")

        def restored(what: str) -> None:
            again, values = hits(kv)
            result.found += again
            equal = all(torch.equal(a, b) for a, b in zip(values, right, strict=True))
            result.expect(again == len(DOCUMENTS) and equal, f"{what}: no hit after it was restored")

        restored("nothing")
        for what, make in models().items():
            changed = attach(make())
            again, values = result.call(hits, library(folder, changed, tokenizer))
            result.tried += 1
            result.expect(again == 0, f"{what}: {again} hits")
            again, own = hits(library(folder, changed, tokenizer))
            result.found += again
            result.expect(again == len(DOCUMENTS), f"{what}: its own chunks are no hits")
            result.expect(all(torch.equal(a, b) for a, b in zip(values, own, strict=True)), f"{what}: wrong")
            detach(changed)
            restored(what)
        for what, (other, options) in settings().items():
            again, _ = result.call(hits, library(folder, model, other, **options))
            result.tried += 1
            result.expect(again == 0, f"{what}: {again} hits")
            restored(what)
        with next_format():
            again, _ = result.call(hits, library(folder, model, tokenizer))
            result.tried += 1
            result.expect(again == 0, f"version of keys: {again} hits")
        restored("version of keys")
        in_place(result, kv, model, restored)
        for name, value in (("_name_or_path", "elsewhere"), ("use_cache", False), ("transformers_version", "9.9")):
            again, _ = hits(library(folder, attach(config(name, value)(llama())), tokenizer))
            result.found += again
            result.expect(again == len(DOCUMENTS), f"{name} decides no keys and values, and costs a hit")


def in_place(result: Result, kv: ChunkLibrary, model: Any, restored: Callable[[str], None]) -> None:
    """Weights of a model in use are changed, and changed back: its library notices by itself."""
    tensor = model.model.layers[0].self_attn.v_proj.weight
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.mul_(1.5)
    again, _ = hits(kv)
    result.tried += 1
    result.expect(again == 0, f"weights changed in place: {again} hits")
    with torch.no_grad():
        tensor.copy_(before)
    restored("weights changed in place")


# -- another transformers ---------------------------------------------------------------------------------------------


def other_python() -> str | None:
    """The interpreter of another environment, if there is one."""
    for place in (os.environ.get(OTHER, ""), *map(str, ROOT.glob(".venv-tf-5.4.0/bin/python"))):
        if place and Path(place).exists():
            return place
    return None


def child(folder: str, weights: str) -> None:
    """In either environment: prefills, answers, and tells."""
    import transformers
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    model = llama()
    model.load_state_dict(load_file(weights))
    kv = library(folder, attach(model), byte_tokenizer(), recompute_ratio=0.0)
    found, values = hits(kv)
    inputs = kv(DOCUMENTS, "How high is it?")
    answer = kv.model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    inputs = ChunkLibrary(kv.model, kv.tokenizer, recompute_ratio=0.0)(DOCUMENTS, "How high is it?")
    fresh = kv.model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    told = {
        "transformers": transformers.__version__,
        "hits": found,
        "answer": answer[0].tolist(),
        "fresh": fresh[0].tolist(),
        "values": [float(v.double().sum()) for v in values],
    }
    print("told " + json.dumps(told))


def told_by(python: str, folder: str, weights: str) -> dict[str, Any]:
    code = f"from tests.faults.versions import child; child({folder!r}, {weights!r})"
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, env=settings, timeout=600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    if not lines:
        raise RuntimeError(f"{python} told nothing: {done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("told "))


def across(result: Result, python: str, times: int) -> None:
    """One writes and the other reads: both hit with equal answers, or both miss."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as parent:
        weights = f"{parent}/weights"
        state = {name: tensor.clone() for name, tensor in llama().state_dict().items()}
        save_file(state, weights)
        both: dict[str, int] = {}
        for number in range(times):
            for writer, reader in ((python, sys.executable), (sys.executable, python)):
                folder = f"{parent}/{number}-{len(both)}"
                wrote = result.call(told_by, writer, folder, weights)
                read = result.call(told_by, reader, folder, weights)
                if wrote is None or read is None:
                    continue
                again = result.call(told_by, writer, folder, weights)
                both[f"{wrote['transformers']} to {read['transformers']}"] = read["hits"]
                result.tried += 1
                result.found += again["hits"]
                result.expect(wrote["hits"] == 0 and again["hits"] == len(DOCUMENTS), "its own chunks are no hits")
                result.expect(read["hits"] in (0, len(DOCUMENTS)), "some hit and some miss")
                result.expect(read["answer"] == read["fresh"], "another answer than without a store")
                result.expect(again["answer"] == wrote["answer"] == wrote["fresh"], "another answer from a store")
                near = all(abs(a - b) < 1e-3 for a, b in zip(read["values"], wrote["values"], strict=True))
                result.expect(near, f"other values: {read['values']}, {wrote['values']}")
        result.expect(len(set(both.values())) == 1, f"one way they hit, the other they miss: {both}")
        result.figures.update({f"hits, {way}": count for way, count in both.items()})


@row
def f18(full: bool) -> Result:
    result = Result("F18")
    one_field(result)
    python = other_python()
    if python is None:
        result.figures["other transformers skipped: set BLENDKV_OTHER_PYTHON, or make .venv-tf-5.4.0/.stamp"] = 1
    elif full or os.environ.get(OTHER):
        across(result, python, 2 if full else 1)
    return result
