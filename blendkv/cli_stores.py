"""`blendkv ls`, `inspect`, `evict` and `verify-store`: what is in a store, whether it is sound, and what may go."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import Json, one_of, read_age, read_size, shown_age, shown_size

if TYPE_CHECKING:
    from blendkv.stores.base import Entry, Store
    from blendkv.stores.checking import Verdict
    from blendkv.stores.inspection import Inspection
    from blendkv.stores.upkeep import Listed

STORE_HELP = "Folder, s3://..., redis://...; by default ~/.cache/blendkv, or $BLENDKV_HOME."
StoreUrl = Annotated[str | None, typer.Argument(metavar="[URL]", help=STORE_HELP, show_default=False)]
StoreOption = Annotated[str | None, typer.Option("--store", metavar="URL", help=STORE_HELP, show_default=False)]
SecretFile = Annotated[Path | None, typer.Option(help="File with the secret of sealed chunk files, 16 to 64 bytes.")]
INTERRUPTED = 130


def ls(
    url: StoreUrl = None,
    sort: Annotated[str, typer.Option(help="size, used, hits or key.")] = "used",
    limit: Annotated[int | None, typer.Option(min=0, help="Most entries to show; the sums are of all.")] = None,
    heads: Annotated[bool, typer.Option(help="Read of each entry what its chunk file says about itself.")] = True,
    as_json: Json = False,
) -> None:
    """List the entries of a store."""
    with work(as_json):
        from blendkv.stores import upkeep

        one_of("--sort", sort, upkeep.ORDERS)
        store, now = _open(url), time.time()
        entries = sorted(upkeep.listing(store), key=upkeep.ORDERS[sort])
        total, count = sum(entry.size for entry in entries), len(entries)
        listed = _listed(store, entries[:limit], heads)
        store.close()
    if as_json:
        print_json({"url": store.url, "entries": [_row(one) for one in listed], "count": count, "bytes": total})
        return
    rows = [[*_about(one, heads), *_use(one.entry, now)] for one in listed]
    columns = ["key", "size", *(("codec", "tokens", "model", "namespace") if heads else ()), "hits", "last use"]
    if rows:
        print_table(columns, rows, wrap=("codec", "model", "namespace"))
    more = f", {len(rows)} of them shown" if len(rows) < count else ""
    typer.echo(f"{store.url}: {_count(count)}, {shown_size(total)}{more}")


def inspect(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key, its first digits (6 or more), or a chunk file.")],
    store: StoreOption = None,
    text: Annotated[
        bool, typer.Option("--text", help="Show how the text of the chunk begins, if it is stored.")
    ] = False,
    secret_file: SecretFile = None,
    as_json: Json = False,
) -> None:
    """Tell what one entry is, and whether it is sound. Exit code 1 if it is not."""
    with work(as_json):
        from blendkv.errors import ChunkFileError
        from blendkv.stores.inspection import inspect_bytes

        data, full, place = _read(key, store)
        try:
            found = inspect_bytes(data, full, _secret(secret_file))
        except ChunkFileError as error:
            if full is not None or error.reason != "magic":
                raise
            raise ValueError(f"{place} is not a chunk file of blendkv (.bkv): it begins with other bytes") from None
    if as_json:
        print_json({"place": place} | found.to_dict(text))
    else:
        _print_inspection(found, place, text)
    raise typer.Exit(0 if found.sound else 1)


def evict(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Keys, or their first digits.")] = None,
    store: StoreOption = None,
    older_than: Annotated[str | None, typer.Option(metavar="AGE", help="Not used for so long: 30m, 12h, 7d.")] = None,
    to: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Least recently used first, until so much is left: 512M, 10G.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="DIGITS", help="First digits of a model's fingerprint.")] = None,
    namespace: Annotated[str | None, typer.Option(metavar="NAME", help="Of this namespace.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove entries for which all criteria hold: keys, --model and --namespace say which may go, the others when."""
    since = None if older_than is None else time.time() - read_age(older_than, "--older-than")
    left = None if to is None else read_size(to, "--to")
    given = [bool(keys), *(value is not None for value in (since, left, model, namespace))]
    if everything == any(given):
        hint = "--all takes no other criterion" if everything else "say what may go"
        raise typer.BadParameter(f"{hint}: KEY, --older-than, --to, --model, --namespace, or --all")
    if model == "":
        raise typer.BadParameter("no digits: every model's begins with those", param_hint="--model")
    with work(as_json):
        from blendkv.stores import upkeep

        opened = _open(store)
        entries = upkeep.listing(opened)
        if keys:
            wanted = {upkeep.find_key(entries, each, opened.url) for each in keys}
            entries = [entry for entry in entries if entry.key in wanted]
        if model is not None or namespace is not None:
            listed = _listed(opened, entries, heads=True)
            entries = [one.entry for one in listed if upkeep.belongs(one, model and model.lower(), namespace)]
        chosen = upkeep.victims(entries, unused_since=since, to_bytes=left)
        if since is not None and (unknown := sum(entry.last_used is None for entry in entries)):
            typer.echo(f"blendkv: of {_count(unknown)} the store does not know the last use: they stay", err=True)
        removed, kept, stopped = ([], [], False) if dry_run else _remove(opened, chosen)
        opened.close()
    _tell_evicted(opened.url, chosen if dry_run else removed, kept, dry_run, as_json)
    raise typer.Exit(INTERRUPTED if stopped else 1 if kept else 0)


def verify_store(
    url: Annotated[str, typer.Argument(metavar="URL", help=STORE_HELP.partition(";")[0] + ".")],
    delete: Annotated[
        bool, typer.Option("--delete", help="Put damaged entries into quarantine where there is one, else delete them.")
    ] = False,
    secret_file: SecretFile = None,
    as_json: Json = False,
) -> None:
    """Read every entry: checksums, and that its key is that of its contents. Exit code 1 if anything is damaged."""
    with work(as_json):
        from tqdm import tqdm

        from blendkv.stores import upkeep
        from blendkv.stores.checking import Verdict, check_all, judge

        secret = _secret(secret_file)
        store = _open(url)
        entries, verdict = upkeep.listing(store), Verdict(store.url)
        bar = tqdm(total=sum(entry.size for entry in entries), unit="B", unit_scale=True, desc="verify", leave=False)
        try:
            with bar:
                for verdict in judge(store, check_all(store, entries, secret), delete):
                    bar.update(verdict.bytes - bar.n)
        except KeyboardInterrupt:
            typer.echo(f"blendkv: stopped after {verdict.entries} of {_count(len(entries))}", err=True)
        store.close()
    if as_json:
        print_json(verdict.to_dict())
    else:
        _print_verdict(verdict)
    raise typer.Exit(INTERRUPTED if not verdict.complete else 0 if verdict.holds else 1)


# -- what they share --------------------------------------------------------------------------------------------------


def _open(url: str | None) -> Store:
    from blendkv._paths import blendkv_home
    from blendkv.stores.upkeep import open_existing

    return open_existing(str(blendkv_home()) if url is None else url)


def _secret(path: Path | None) -> bytes | None:
    if path is None:
        return None
    secret = path.read_bytes()
    if not 16 <= len(secret) <= 64:
        raise ValueError(f"{path} holds {len(secret)} bytes: a secret has 16 to 64 (does it end in a line break?)")
    return secret


def _read(key: str, url: str | None) -> tuple[bytes, str | None, str]:
    """Bytes, key if there is one, and where they are, of a chunk file or an entry."""
    from blendkv.stores.keys import SUFFIX, key_of
    from blendkv.stores.upkeep import find_key, listing, peek

    if os.sep in key or key.endswith(SUFFIX) or (url is None and os.path.isfile(key)):
        return Path(key).read_bytes(), key_of(os.path.basename(key)), key
    store = _open(url)
    full = find_key(listing(store), key, store.url)
    data = peek(store, full)
    if data is None:
        faults = ", ".join(+store.stats.faults) or "it is gone"
        raise ValueError(f"{store.url} did not give entry {full[:12]}... ({faults})")
    store.close()
    return data, full, store.url


def _listed(store: Store, entries: Sequence[Entry], heads: bool) -> list[Listed]:
    from tqdm import tqdm

    from blendkv.stores import upkeep

    if not heads:
        return [upkeep.Listed(entry, None) for entry in entries]
    bar = tqdm(upkeep.heads(store, entries), total=len(entries), desc="heads", unit="entry", leave=False, delay=0.5)
    return list(bar)


def _row(one: Listed) -> dict[str, Any]:
    row: dict[str, Any] = asdict(one.entry)
    row["bytes"] = row.pop("size")
    if one.head is not None:
        header = one.head.header
        row |= {"codec": header.codec, "level": header.level, "dtype": header.dtype, "tokens": header.tokens}
        row |= {"fingerprint": header.fingerprint, "namespace": header.namespace, "sealed": header.key_id is not None}
    return row | ({"fault": one.fault} if one.fault else {})


def _about(one: Listed, heads: bool) -> list[str]:
    first = [one.entry.key[:12], shown_size(one.entry.size)]
    if not heads:
        return first
    if one.head is None:
        return [*first, f"({one.fault})", "", "", ""]
    header = one.head.header
    sealed = "" if header.key_id is None else ", sealed"
    return [*first, f"{_codec(header)}{sealed}", f"{header.tokens:,}", header.fingerprint[:8], header.namespace]


def _codec(header: Any) -> str:
    return header.codec if header.codec == "raw" else f"{header.codec} {header.level}"


def _use(entry: Entry, now: float) -> list[str]:
    age = None if entry.last_used is None else now - entry.last_used
    return ["" if entry.hits is None else f"{entry.hits:,}", shown_age(age)]


def _count(number: int) -> str:
    return f"{number:,} {'entry' if number == 1 else 'entries'}"


def _remove(store: Store, chosen: Sequence[Entry]) -> tuple[list[Entry], list[Entry], bool]:
    """What was removed, what could not be, and whether somebody stopped it."""
    from tqdm import tqdm

    from blendkv.stores.upkeep import remove

    removed: list[Entry] = []
    kept: list[Entry] = []
    try:
        bar = tqdm(remove(store, chosen), total=len(chosen), desc="evict", unit="entry", leave=False, delay=0.5)
        for entry, gone in bar:
            (removed if gone else kept).append(entry)
    except KeyboardInterrupt:
        return removed, kept, True
    return removed, kept, False


def _tell_evicted(url: str, gone: Sequence[Entry], kept: Sequence[Entry], dry_run: bool, as_json: bool) -> None:
    total, now = sum(entry.size for entry in gone), time.time()
    if as_json:
        rows = [{"key": entry.key, "bytes": entry.size, "last_used": entry.last_used} for entry in gone]
        kept_keys = [entry.key for entry in kept]
        print_json({"url": url, "dry_run": dry_run, "removed": rows, "bytes": total, "kept": kept_keys})
        return
    if gone:
        rows = [[entry.key[:12], shown_size(entry.size), *_use(entry, now)] for entry in gone]
        print_table(["key", "size", "hits", "last use"], rows)
    typer.echo(f"{url}: {_count(len(gone))}, {shown_size(total)} {'would be ' if dry_run else ''}removed")
    if kept:
        typer.echo(f"blendkv: {_count(len(kept))} could not be removed: may you write to {url}?", err=True)


def _print_inspection(found: Inspection, place: str, text: bool) -> None:
    header, told = found.head.header, found.to_dict()
    shapes = {f"{s.heads} heads, keys {s.key_dim}, values {s.value_dim}": 0 for s in header.layers}
    for shape in header.layers:
        shapes[f"{shape.heads} heads, keys {shape.key_dim}, values {shape.value_dim}"] += 1
    sealed = "no" if header.key_id is None else f"yes, key id {header.key_id.hex() or '(empty)'}"
    checks = {None: "not checked: it is sealed, give --secret-file", (): "hold"}.get(found.damaged)
    right = {
        True: "that of its contents",
        False: "NOT that of its contents, or made with a secret",
        None: "not checked",
    }
    streams = ", ".join(f"{name} ({dtype})" for name, dtype in told["token_streams"].items())
    rows = {
        "place": place,
        "key": f"{found.key or '(none)'}\n{right[found.right_key]}" if found.key else "(none: a file of another name)",
        "size": f"{shown_size(found.size)}, decoded {shown_size(header.decoded_bytes)}",
        "format": f"version {told['version']}",
        "codec": f"{_codec(header)}{f', profile {header.profile_hash}' if header.profile_hash else ''}",
        "dtype": header.dtype,
        "tokens": f"{header.tokens:,}, after {told['conditioning']:,} of conditioning",
        "layers": "; ".join(f"{count} of {shape}" for shape, count in shapes.items())
        + ("" if header.layer0 else "; layer 0 is computed on reading"),
        "model": header.fingerprint,
        "tokenizer": header.tokenizer or "(none)",
        "namespace": header.namespace or "(none)",
        "sealed": sealed,
        "token streams": streams or "(none)",
        "checksums": checks or f"segments {', '.join(map(str, found.damaged or ()))} are DAMAGED",
    }
    if text:
        said = header.text if header.text is None or len(header.text) <= 300 else header.text[:300] + "..."
        rows["text"] = "(not stored)" if said is None else said
    print_table(["", "what"], [[name, value] for name, value in rows.items()], wrap=("what",))
    typer.echo("")
    cells = [
        [
            f"{unit.first}" if unit.first == unit.last else f"{unit.first} to {unit.last}",
            *("" if part is None else f"{part:,}" for part in (unit.keys, unit.values)),
            f"{unit.bytes:,}",
        ]
        for unit in found.units
    ]
    print_table(["layer", "K bytes", "V bytes", "bytes"], cells)


def _print_verdict(verdict: Verdict) -> None:
    kinds = (("damaged", verdict.damaged), ("unread", verdict.unread))
    rows = [[one["key"][:12], kind, one["reason"]] for kind, found in kinds for one in found]
    rows += [
        [key[:12], "foreign", "lies under a key that is not that of its contents, or made with a secret"]
        for key in verdict.foreign
    ]
    if rows:
        print_table(["key", "what", "why"], rows, wrap=("what", "why"))
    told = {"damaged": len(verdict.damaged), "unread": len(verdict.unread), "foreign": len(verdict.foreign)}
    said = [f"{count} {kind}" for kind, count in told.items() if count]
    said += [f"{verdict.sealed} sealed, not checked"] if verdict.sealed else []
    said += [f"{len(verdict.removed)} put away"] if verdict.removed else []
    entries = f"{_count(verdict.entries)}, {shown_size(verdict.bytes)}"
    typer.echo(f"{verdict.url}: {entries}: {', '.join([f'{verdict.ok} hold', *said])}")
