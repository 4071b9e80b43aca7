"""`blendkv bench fairness` and `bench gateway`: whose transfer is next, and a gateway under load."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from blendkv._console import print_json, print_table, work
from blendkv._options import Json, read_integers, read_size


def fairness(
    slots: Annotated[str, typer.Option(help="Numbers of slots.")] = "1,4,8,16",
    seconds: Annotated[float, typer.Option(min=10, help="Of the made-up clock, in mean times of a piece.")] = 1000.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 5,
    threads: Annotated[bool, typer.Option(help="Also in threads, by the clock.")] = True,
    as_json: Json = False,
) -> None:
    """Waits of light clients beside one that floods, and shares of equal ones, by policy of the transfer scheduler."""
    counts = read_integers("--slots", slots, "1,8")
    if min(counts) < 1:
        raise typer.BadParameter("at least 1", param_hint="--slots")
    with work(as_json):
        from blendkv.bench.fairness import fairness_rows

        rows = fairness_rows(counts, seconds=seconds, seeds=seeds, threads=threads, progress=True)
    if as_json:
        print_json({"rows": rows})
        return
    cells: dict[tuple[str, int], dict[str, float]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        if row["kind"] == "shares":
            found = {"Jain": row["jain_equal"], "1:4": row["jain_sizes"]}
        else:
            where = "threads" if row["kind"] == "threads" else {"exponential": "exp."}.get(row["service"], "equal")
            found = {f"{where} {row['light_load']:.0%}": row["light_wait_p99"]}
        cells.setdefault((row["policy"], row["slots"]), {}).update(found)
        columns |= dict.fromkeys(found)
    lines = [
        [policy, f"{count}", *("" if name not in own else f"{own[name]:.3g}" for name in columns)]
        for (policy, count), own in cells.items()
    ]
    print_table(["policy", "slots", *columns], lines)
    typer.echo(
        "\n99 of 100 pieces of nine light clients waited at most so many mean times of a piece for a slot, beside one "
        "client that floods.\nPieces are equal or exponential; the light clients' load is in percent of what the slots "
        "can do. Jain's index of the bytes of ten clients is 1 if all got the same; 1:4 has pieces of two sizes."
    )


def gateway(
    minutes: Annotated[float, typer.Option(min=0, help="Of the soak; 0 leaves it out.")] = 10.0,
    clients: Annotated[int, typer.Option(min=1, help="At once.")] = 64,
    entries: Annotated[int, typer.Option(min=1, help="Chunk files.")] = 16,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Of each.")] = "4M",
    rounds: Annotated[int, typer.Option(min=0, help="Turns of the gateway and of a bare file server.")] = 5,
    round_seconds: Annotated[float, typer.Option(min=0.5, help="Of each.")] = 5.0,
    as_json: Json = False,
) -> None:
    """A gateway of `blendkv serve` under many clients: wrong bytes, memory, and its rate beside Starlette's files.

    Exit code 1 if a byte was wrong, or memory grew by more than 2% after minute 3.
    """
    with work(as_json):
        from blendkv.bench.gateway import gateway_rows

        each = read_size(size, "--size")
        rows = gateway_rows(minutes, clients, entries, each, rounds, round_seconds, progress=True)
    if as_json:
        print_json({"rows": rows})
    else:
        for row in rows:
            typer.echo(_told(row))
    bad = any(row["wrong"] or row["errors"] or row.get("rss_ratio", 1.0) > 1.02 for row in rows)
    raise typer.Exit(1 if bad else 0)


def _told(row: dict[str, Any]) -> str:
    if row["kind"] == "throughput":
        return (
            f"{row['clients']} clients, whole entries of {row['size'] / 1e6:.1f} MB: {row['gateway_mb_s']:,.0f} MB/s; "
            f"Starlette's FileResponse {row['bare_mb_s']:,.0f} MB/s; ratio {row['ratio']:.2f} "
            f"({row['ratio_least']:.2f} to {row['ratio_most']:.2f}); seconds of a processor a gigabyte: "
            f"{row['cpu_s_gb']:.2f}, {row['bare_cpu_s_gb']:.2f}"
        )
    return (
        f"{row['minutes']:g} minutes: {row['requests']:,} requests, {row['wrong']} wrong, {row['errors']} errors, "
        f"{row['mb_s']:,.0f} MB/s; memory {row['rss_settled_mb']:.0f} MB, at the end {row['rss_end_mb']:.0f} MB "
        f"({row['rss_ratio'] - 1:+.1%})"
    )
