"""F32: nothing but the entries themselves says what a text is: no log, counter, report, message, file name or key."""

from __future__ import annotations

import io
import logging
import os
import stat
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from blendkv.attaching import attach
from blendkv.cache import BlendedCache
from blendkv.chunk import MissingChunk
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.library import ChunkLibrary
from blendkv.stores import DiskStore, Pool, RemoteStore, TieredStore
from blendkv.stores.valkey import ValkeyStore
from blendkv.testing import byte_tokenizer, tiny_model
from tests.drawn import profile_of
from tests.faults.rows import Result, row
from tests.s3 import BUCKET, OPTIONS, moto
from tests.stores.servers import BINARY, Server

MARK = "Zyzzyva-7731 quagga"
DOCUMENTS = [f"{MARK} lives in number {number}." for number in range(3)]
SYSTEM, QUESTION = f"Be brief, {MARK}.", f"Where does {MARK} live?"
SECRET = b"Zyzzyva-7731 quagga, as a secret"


def needles(tokenizer: Any) -> list[str]:
    """The text and its ids, in the ways in which they might be written."""
    ids = tokenizer(MARK, add_special_tokens=False)["input_ids"][2:10]
    raw = MARK.encode()
    words = ["Zyzzyva", "quagga", raw.hex(), repr(raw)[2:-1]]
    return [*words, *(sign.join(map(str, ids)) for sign in (", ", ",", " ", "-", "_", "\n")), ids_hex(ids)]


def ids_hex(ids: list[int]) -> str:
    return b"".join(each.to_bytes(4, "little") for each in ids).hex()


@contextmanager
def logs() -> Generator[io.StringIO]:
    """Everything that any logger says, at DEBUG."""
    said, before = io.StringIO(), logging.root.level
    handler = logging.StreamHandler(said)
    logging.root.addHandler(handler)
    logging.root.setLevel(logging.DEBUG)
    logging.getLogger("botocore").setLevel(logging.INFO)  # at DEBUG it writes down what it sends, as it was told to
    try:
        yield said
    finally:
        logging.root.removeHandler(handler)
        logging.root.setLevel(before)
        logging.getLogger("botocore").setLevel(logging.NOTSET)


def told(error: BaseException) -> str:
    """All that an error says: itself, what it came from, its traceback."""
    return repr(error) + "".join(traceback.format_exception(error))


def errors(model: Any, tokenizer: Any, folder: Path) -> Iterator[Callable[[], Any]]:
    """What raises, of all that has to do with chunks."""
    chunk = ChunkLibrary(model, tokenizer).prefill(DOCUMENTS)[0]
    data = encode_chunk(chunk)
    sealed = encode_chunk(chunk, secret=SECRET)
    for cut in (data[:20], data[:200], data[:-16], data + b"x", data[:100] + b"?" + data[101:], data[:-3] + b"???"):
        yield lambda cut=cut: decode_chunk(cut)
    yield lambda: decode_chunk(sealed)
    yield lambda: decode_chunk(sealed, secret=b"another secret, which is wrong")
    yield lambda: decode_chunk(data, secret=SECRET)
    yield lambda: decode_chunk(data, max_bytes=10)
    yield lambda: encode_chunk(chunk, get_codec("klt", profile=profile_of("klt")))
    tiny = ChunkLibrary(model, tokenizer, folder / "tiny", capacity_bytes=10, strict=True)
    tiny.pool.stores[0].capacity_bytes = 10
    yield lambda: tiny(DOCUMENTS, QUESTION)
    yield lambda: generate(model, ChunkLibrary(model, tokenizer, on_miss="recompute", strict=True)(DOCUMENTS, QUESTION))
    inputs = ChunkLibrary(model, tokenizer)(DOCUMENTS, QUESTION)
    generate(model, inputs)
    yield lambda: generate(model, inputs | {"input_ids": inputs["input_ids"].flip(1)})
    yield lambda: BlendedCache([DOCUMENTS[0]])  # ty: ignore[invalid-argument-type]
    yield lambda: TieredStore(Pool(), DiskStore(folder / "short"), secret=SECRET[:5])


def generate(model: Any, inputs: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0)


def used(result: Result, model: Any, tokenizer: Any, store: Any, kind: str, **options: Any) -> Iterator[str]:
    """Writes, reads, meets damage; gives everything that was said of it."""
    for _ in range(2):
        with ChunkLibrary(model, tokenizer, TieredStore(Pool(1), store, **options), namespace="ours") as kv:
            before = kv.pool.stores  # closed with the library, opened again by the first use
            inputs = kv(DOCUMENTS, QUESTION, system=SYSTEM)
            generate(model, inputs)
            kv.flush()
            report = inputs.report
            yield f"{report} {report!r} {report.to_dict()} {report._repr_html_()} {report.notes}"
            yield f"{kv.pool.stats} {[each.stats for each in before]} {kv.pool.notes} {list(kv.pool.keys())}"
            yield f"{inputs.cache!r} {inputs.cache.chunks!r} {kv.prefill(DOCUMENTS)!r} {store!r} {store.url}"
            result.found += sum(kv.pool.stats.hits.values())
        for key in list(store.keys())[:1]:
            store.put(key, b"\x8bBKV damaged")
    result.tried += 1


def files(result: Result, folder: Path) -> Iterator[str]:
    """Names, and who may read them."""
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        right = 0o700 if path.is_dir() else 0o600
        result.tried += 1
        result.expect(mode == right, f"{path.name[:8]}... is {mode:o}, not {right:o}")
        yield str(path.relative_to(folder))


@row
def f32(full: bool) -> Result:
    result, tokenizer = Result("F32"), byte_tokenizer(chat=True)
    model, said = attach(tiny_model("llama", num_hidden_layers=2)), []
    wanted = needles(tokenizer)
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack, logs() as log:
        before = os.umask(0)  # rights are the store's own doing, not the user's
        stack.callback(os.umask, before)
        for kind, options in (("plain", {}), ("sealed", {"secret": SECRET, "key_id": b"1"})):
            folder = Path(parent) / kind
            said += used(result, model, tokenizer, DiskStore(folder), kind, **options)
            said += files(result, folder)
            if BINARY:
                server = stack.enter_context(Server())
                said += used(result, model, tokenizer, ValkeyStore(url=server.url), kind, **options)
                said += [key.decode("latin-1") for key in server.tell("KEYS", "*")]
        url = f"http://127.0.0.1:{stack.enter_context(moto())}"
        bucket = RemoteStore(f"s3://{BUCKET}/store", endpoint_url=url, **OPTIONS)
        said += used(result, model, tokenizer, bucket, "S3", write="through")
        said += bucket._fs.find(BUCKET)
        said.append(
            repr(MissingChunk(ids=decode_chunk(encode_chunk(ChunkLibrary(model, tokenizer).prefill(DOCUMENTS)[0])).ids))
        )
        for number, attempt in enumerate(errors(model, tokenizer, Path(parent))):
            with suppress(AssertionError):
                try:
                    attempt()
                except Exception as error:
                    said.append(told(error))
                else:
                    result.expect(False, f"attempt {number} raises nothing")
            result.tried += 1
        logging.getLogger("blendkv").debug("the ear works")
        result.expect("the ear works" in log.getvalue(), "logs are not heard")
        entries = b"".join(path.read_bytes() for path in (Path(parent) / "plain").rglob("*.bkv"))
        result.expect(MARK.encode() in entries, "the marked text is nowhere, so that nothing was tried")
        for what in (*said, log.getvalue()):
            what = " ".join(what.split())  # a tensor's numbers are written in columns
            result.tried += 1
            leaks = [needle for needle in wanted if needle in what]
            at = what.find(leaks[0]) if leaks else 0
            result.expect(not leaks, f"said {leaks[:1]}: {what[max(0, at - 80) : at + 60]!r}")
    result.figures["texts looked through"] = len(said) + 1
    result.figures["bytes of logs"] = len(log.getvalue())
    return result
