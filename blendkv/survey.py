"""Tries every decoder family on this machine's transformers: proven, refused, wrong or crashed.

A family is proven if `attach` accepts it and blends of exact chunks then agree with what the model says without
blendkv, in place, moved and through `generate`. That is measured here once more and in another way, so that a hole in
the proof of `attach` shows as "wrong".
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from blendkv import _compat
from blendkv.attaching import attach, attachment_of, detach
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache
from blendkv.errors import UnsupportedModelError
from blendkv.families import NotBuiltError, families, tiny_family
from blendkv.learning import rms_ratio
from blendkv.prefilling import prefill
from blendkv.selectors import HKVD, Random

BOUND = 1e-4
"""RMS error of logits and of every layer's keys and values / RMS of what the model says by itself."""
LIMIT_S = 120.0
"""Most seconds that one family may take."""
TOKENS, STEPS, MOVED = 60, 4, 31
BORDERS = (7, 25, 44, 56)
States = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """What became of one family.

    Attributes:
        family: one of `families()`.
        status: proven, refused, wrong or crashed; "not built" if it could not be tried.
        detail: the largest error, or the message.
    """

    family: str
    status: str
    detail: str

    def to_dict(self) -> dict[str, str]:
        """Plain values, for JSON."""
        return asdict(self)


# -- one family -------------------------------------------------------------------------------------------------------


def examine(family: str, attn: str | None = None) -> Outcome:
    """Builds, attaches and checks one family; if the refusal says that eager attention would do, that is tried.

    Args:
        family: one of `families()`.
        attn: the attention implementation; the model's own choice by default.
    """
    try:
        model = tiny_family(family, attn_implementation=attn)
        with torch.no_grad():
            model(input_ids=_ids(model), use_cache=False)
    except Exception as error:
        return Outcome(family, "not built", _told(error))
    try:
        attach(model)
    except (UnsupportedModelError, ValueError) as error:
        message = _told(error)
        return (
            examine(family, "eager") if attn is None and "='eager'" in message else Outcome(family, "refused", message)
        )
    except Exception as error:
        return Outcome(family, "crashed", _told(error))
    try:
        detach(model)
        errors = dict(blend_errors(model))
    except Exception as error:
        return Outcome(family, "crashed", f"attached, then {_told(error)}")
    bad = {name: error for name, error in errors.items() if not error <= BOUND}
    if bad:
        return Outcome(family, "wrong", "; ".join(f"{name}: {error:.2g}" for name, error in bad.items()))
    notes = [] if attn is None else [f"attn_implementation={attn!r}"]
    notes += [] if any(name.startswith("generate") for name in errors) else ["forward only: cannot generate by itself"]
    return Outcome(family, "proven", ", ".join([f"largest error {max(errors.values()):.0e}", *notes]))


def _told(error: Exception) -> str:
    own = isinstance(error, UnsupportedModelError | NotBuiltError)
    return " ".join(f"{'' if own else type(error).__name__ + ': '}{error}".split())


def _ids(model: PreTrainedModel) -> Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(3, vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def blend_errors(model: PreTrainedModel) -> Iterator[tuple[str, float]]:
    """Every error of blends against the model without blendkv, by name.

    Args:
        model: not attached; it is attached afterwards.
    """
    ids, here = _ids(model), torch.arange(TOKENS)[None]
    own = _forward(model, ids, DynamicCache(), here)
    places = {"in place": (here, own), "moved": (here + MOVED, _forward(model, ids, DynamicCache(), here + MOVED))}
    try:
        steps = _generate(
            model, ids, use_cache=False
        )  # with a cache of its own, Moshi forgets what its mask still sees
    except Exception:  # this transformers cannot generate with it at all
        steps = None
    state = attachment_of(attach(model))
    chunks = _exact_chunks(model, ids, own[1])
    for ratio, layer in ((0.0, 0), (0.15, min(1, len(state.layers) - 1)), (0.5, 0), (0.3, len(state.layers) - 1)):
        for name, (positions, expected) in places.items():
            cache = BlendedCache(chunks, selector=Random(3), check_layers={layer: ratio})
            yield f"{name}, ratio {ratio}", _distance(_forward(model, ids, cache, positions), expected)
            yield f"{name}, report at ratio {ratio}", _unaccounted(cache)
        if steps is not None:
            cache = BlendedCache(chunks, selector=Random(3), check_layers={layer: ratio})
            yield f"generate, ratio {ratio}", _steps_apart(_generate(model, ids, cache), steps)
    yield "ratio 1", _distance(_forward(model, ids, BlendedCache(chunks, 1.0), here), own)
    alone = prefill(model, [ids[0, a:b] for a, b in pairwise(BORDERS)], progress=False)
    _, layers = _forward(model, ids, BlendedCache(alone, 0.0), here)
    yield "layer 0 of chunks computed alone", max(map(rms_ratio, layers[0], own[1][0]))
    cache = BlendedCache(alone, 0.15, HKVD())
    logits, _ = _forward(model, ids, cache, here)
    yield "blend", _unaccounted(cache) if bool(logits.isfinite().all()) else math.inf


def _forward(model: PreTrainedModel, ids: Tensor, cache: object, positions: Tensor) -> tuple[Tensor, States]:
    """Logits `[1, V]` of the last token, and keys and values of every layer."""
    keyword = _compat.cache_keyword(model.forward)
    logits = model(input_ids=ids, position_ids=positions, use_cache=True, **{keyword: cache}).logits
    return logits[:, -1].clone(), [(k.clone(), v.clone()) for k, v in _compat.cached_states(cache)]


def _generate(model: Any, ids: Tensor, cache: object = None, **settings: bool) -> tuple[Tensor, Tensor]:
    """Logits `[STEPS, 1, V]` and tokens `[STEPS]` of greedy `generate`."""
    given = settings if cache is None else {_compat.CACHE_ARG: cache}
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **given,
    )
    return torch.stack(output.logits), output.sequences[0, -STEPS:]


def _exact_chunks(model: PreTrainedModel, ids: Tensor, layers: States) -> list[ChunkCache]:
    facts, positions = attachment_of(model).facts, torch.arange(TOKENS)[None]
    turns = [(rotation, rotation.angles(facts.rotary, positions)) for rotation in facts.rotations]
    keys = [rotation.unrotate(k, angles)[0] for (rotation, angles), (k, _) in zip(turns, layers, strict=True)]
    return [
        ChunkCache(
            ids[0, a:b],
            tuple(k[:, a:b].clone() for k in keys),
            tuple(v[0, :, a:b].clone() for _, v in layers),
            facts.fingerprint,
        )
        for a, b in pairwise(BORDERS)
    ]


def _distance(got: tuple[Tensor, States], expected: tuple[Tensor, States]) -> float:
    pairs = [(got[0], expected[0])]
    pairs += [pair for ours, own in zip(got[1], expected[1], strict=True) for pair in zip(ours, own, strict=True)]
    errors = [rms_ratio(a, b) for a, b in pairs]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _steps_apart(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Error of logits; infinite if the tokens differ."""
    return rms_ratio(got[0], expected[0]) if torch.equal(got[1], expected[1]) else math.inf


def _unaccounted(cache: BlendedCache) -> float:
    """Tokens that the report counts twice or not at all, over layers, and chunk tokens that were not found."""
    report = cache.report
    told = [layer.reused + layer.recomputed + layer.fresh + layer.missed for layer in report.layers]
    return float(sum(abs(rows - TOKENS) for rows in told) + abs(report.chunk_tokens - (BORDERS[-1] - BORDERS[0])))


# -- all of them ------------------------------------------------------------------------------------------------------


def survey(
    names: Sequence[str], limit_s: float = LIMIT_S, command: Sequence[str] = (sys.executable, "-m", "blendkv.survey")
) -> Iterator[Outcome]:
    """Examines families in processes of their own, so that a hang or a crash costs one family and no more.

    Args:
        names: of `families()`.
        limit_s: most seconds for one.
        command: what prints one line of JSON for each name that follows it.
    """
    names = list(names)
    while names:
        for outcome in _batch(names, limit_s, command):
            yield outcome
            names.remove(outcome.family)


def _batch(names: list[str], limit_s: float, command: Sequence[str]) -> Iterator[Outcome]:
    """Outcomes of one process, which may end before all names had their turn: the last outcome then says why."""
    left = list(names)
    with tempfile.TemporaryDirectory() as home:
        environment = {"HF_HUB_OFFLINE": "1"} | os.environ | {"BLENDKV_HOME": home}
        child = subprocess.Popen(
            [*command, *names], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            for line in child.stdout or ():
                lines.put(line)
            lines.put("")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            while left:
                line = lines.get(timeout=limit_s)
                if not line:
                    yield Outcome(left[0], "crashed", f"its process ended with code {child.wait()}")
                    return
                yield Outcome(**json.loads(line))
                del left[0]
        except queue.Empty:
            yield Outcome(left[0], "crashed", f"no answer after {limit_s:g} s")
        finally:
            child.kill()
            child.wait()
            reader.join()
            if child.stdout:
                child.stdout.close()


def check_names(names: Sequence[str]) -> list[str]:
    """The families that are meant: those named, or all.

    Raises:
        ValueError: naming one that this transformers does not have.
    """
    known = families()
    unknown = [name for name in names if name not in known and name != "all"]
    if unknown:
        raise ValueError(
            f"transformers {_compat.TRANSFORMERS_VERSION} has no causal family {unknown[0]!r}; name a model_type such "
            "as llama, or all"
        )
    return known if "all" in names else list(dict.fromkeys(names))


def main(names: Sequence[str]) -> None:
    """What a process of `survey` does: one line of JSON for each family."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr
    for name in names:
        print(json.dumps(examine(name).to_dict()), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
