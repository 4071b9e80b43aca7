"""`blendkv precompute`: documents into a store, on one device or, under `accelerate launch`, on several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import reduce
from itertools import islice
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendkv._console import print_json, work
from blendkv._options import Device, Dtype, Json, Model, load, one_of, read_size
from blendkv.layout import CONDITIONS

if TYPE_CHECKING:
    from blendkv.library import ChunkLibrary
    from blendkv.precompute import Precomputed

PATIENCE_S = 600.0
"""Longest that a store may take for one batch: nobody waits for an answer here."""
Codec = Annotated[str, typer.Option(help="How chunks are stored: raw loses nothing; others need a profile.")]


def precompute(
    model: Model,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Texts, .json, .jsonl; folders: all .txt, .md, .jsonl.")
    ],
    store: Annotated[str, typer.Option(metavar="URL", help="Folder, s3://..., redis://...")],
    codec: Codec = "raw",
    level: Annotated[int | None, typer.Option(help="Of the codec; coarser above 0, finer below.")] = None,
    profile: Annotated[Path | None, typer.Option(help="File that `blendkv profile` made for the codec.")] = None,
    levels: Annotated[str, typer.Option(help="Beside each chunk, for a loading controller: klt@0,klt@4.")] = "",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Longer documents are cut, at sentence ends.")] = 512,
    condition: Annotated[str, typer.Option(help="Before each chunk: auto, none, bos, system or dummy.")] = "auto",
    system: Annotated[str | None, typer.Option(help="The system prompt, with --condition system.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Who may use each other's chunks; of shared stores.")] = None,
    field: Annotated[str, typer.Option(help="Field of JSON items that holds the text.")] = "text",
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most bytes in a folder; 64G if not said.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one forward.")] = 4096,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Compute the chunks of documents and store them. What the store has is not computed again."""
    one_of("--condition", condition, ("auto", *CONDITIONS))
    if system is not None and condition != "system":
        raise typer.BadParameter("it goes with --condition system", param_hint="--system")
    room = {} if capacity is None else {"capacity_bytes": read_size(capacity, "--capacity")}
    if room and "://" in store and not store.startswith("file://"):
        raise typer.BadParameter("only a folder has one", param_hint="--capacity")
    with work(as_json):
        from blendkv.documents import count_documents, find_files, read_documents

        found = find_files(files)
        total = count_documents(found, field)
        place = Place(device)
        loaded, tokenizer = load(model, dtype, place.device)
        kept = chosen_codec(codec, level, profile, levels)
        beside = chosen_levels(levels, profile)
        library = _library(loaded, tokenizer, store, room, kept, beside, chunk_tokens=chunk_tokens, condition=condition,
                           namespace=namespace, batch_tokens=batch_tokens)  # fmt: skip
        with library:
            done = _run(library, place.share(read_documents(found, field)), place, total, system)
        done = place.sum(done)
    if place.main:
        _tell(done, library, {"model": model, "files": len(found), "processes": place.count}, as_json)
    raise typer.Exit(1 if done.refused else 0)


class Place:
    """Which of several processes this is, and what its share is.

    Args:
        device: as given; "cuda" is each process's own card.

    Attributes:
        device: of this process.
        index: of this process.
        count: of processes.
        main: whether this is the one that speaks.
    """

    def __init__(self, device: str) -> None:
        from accelerate import PartialState

        state = PartialState(cpu=True) if device == "cpu" else PartialState()
        self.index, self.count, self.main = state.process_index, state.num_processes, state.is_main_process
        self.device = f"cuda:{state.local_process_index}" if device == "cuda" and self.count > 1 else device

    def share(self, documents: Iterator[str]) -> Iterator[str]:
        """Every n-th document."""
        return islice(documents, self.index, None, self.count)

    def sum(self, done: Precomputed) -> Precomputed:
        """What all processes did."""
        if self.count == 1:
            return done
        from accelerate.utils import gather_object

        return reduce(add, gather_object([done]))


def chosen_codec(name: str, level: int | None, profile: Path | None, levels: str = "") -> Any:
    """A codec by name, with its level and profile; one that needs none leaves it to the levels beside it."""
    from blendkv.codecs import codec_class, codec_names, get_codec

    one_of("--codec", name, codec_names())
    if codec_class(name).needs_profile and profile is None:
        raise ValueError(
            f"codec {name}: needs a profile of the model: `blendkv profile MODEL --data FILES --out FOLDER` makes it, "
            f"--profile FOLDER/{name}.safetensors reads it"
        )
    if levels and not codec_class(name).needs_profile:
        profile = None
    settings = {"level": level, "profile": None if profile is None else str(profile)}
    return get_codec(name, **{key: value for key, value in settings.items() if value is not None})


def chosen_levels(text: str, profile: Path | None) -> list[Any]:
    """Codecs of levels such as `klt@0,klt@4`, the least lossy first; none of an empty text."""
    from blendkv.codecs import get_codec

    made = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, at, level = part.partition("@")
        if at and not level.lstrip("-").isdigit():
            raise typer.BadParameter(f"{part!r} is no level such as klt@4", param_hint="--levels")
        made.append(chosen_codec(name, int(level), profile) if at else get_codec(name))
    return made


def _library(
    model: Any, tokenizer: Any, url: str, room: dict[str, int], codec: Any, levels: Any, **settings: Any
) -> ChunkLibrary:
    """A library that writes at once, and keeps next to nothing in memory."""
    from blendkv.library import ChunkLibrary
    from blendkv.stores import Pool, TieredStore, open_store

    tiers = TieredStore(Pool(1 << 20), open_store(url, **room), codec=codec, levels=levels, write="through")
    try:
        return ChunkLibrary(model, tokenizer, store=tiers, deadline_s=PATIENCE_S, **settings)
    except BaseException:
        tiers.close()
        raise


def _run(library: ChunkLibrary, documents: Iterator[str], place: Place, total: int, system: str | None) -> Precomputed:
    """A bar is shown by the process that speaks, as if all were equally fast."""
    from tqdm import tqdm

    from blendkv.precompute import precompute as fill

    bar = tqdm(total=total, unit="doc", desc="precompute", disable=not place.main, leave=False)

    def show(done: Precomputed) -> None:
        bar.set_postfix(computed=done.computed, found=done.found, refresh=False)
        bar.update(min(done.documents * place.count, total) - bar.n)

    with bar:
        return fill(library, documents, system=system, on_batch=show)


def _tell(done: Precomputed, library: ChunkLibrary, about: dict[str, Any], as_json: bool) -> None:
    tiers: Any = library.pool
    [store], codec = tiers.stores, tiers.codec
    if as_json:
        coded = {"codec": codec.name if codec else "raw", "level": codec.level if codec else 0}
        print_json(about | {"store": store.url} | coded | asdict(done))
        return
    rate = done.tokens / max(done.seconds, 1e-9)
    typer.echo(
        f"{done.documents:,} documents, {done.chunks:,} chunks, {done.tokens:,} tokens in {done.seconds:.1f} s "
        f"({rate:,.0f} tokens/s): {done.computed:,} chunks computed, {done.found:,} found. Store: {store.url}"
    )
    for note in library.pool.notes:
        typer.echo(f"blendkv: {note}", err=True)
    if done.refused:
        typer.echo(f"blendkv: {done.refused:,} chunks could not be stored: start again", err=True)
    if done.evicted:
        typer.echo(f"blendkv: {done.evicted:,} entries gave way to others: the store is full; see --capacity", err=True)
