"""What commands are given, and how it is read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from blendkv.selectors import Selector

DTYPES = ("float32", "bfloat16", "float16", "auto")
MODEL_HELP = "Hub id, folder, GGUF file, or `bundled`."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: float32, bfloat16, float16, or auto.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto to spread the model.")]
Ratios = Annotated[str, typer.Option("--ratio", help="Share of chunk tokens recomputed; several as 0.05,0.15.")]
SelectorName = Annotated[
    str, typer.Option("--selector", help="Which tokens are recomputed, such as hkvd or attention.")
]


def shaped_model(shape: str, dtype: str, device: str) -> Any:
    """A model of a known shape."""
    from blendkv.bench.shapes import SHAPES, shape_model

    one_of("--shape", shape, SHAPES)
    if dtype == "auto":
        raise typer.BadParameter("a shape has no dtype of its own: name one", param_hint="--dtype")
    one_of("--dtype", dtype, DTYPES)
    check_device("cuda" if device == "auto" else device)
    import torch

    return shape_model(shape, dtype=getattr(torch, dtype), device=device)


def check_device(device: str) -> None:
    """Refuses a device that torch does not know or see."""
    import torch

    if device == "auto":
        return
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise typer.BadParameter(f"{device!r} is not a device: cpu, cuda, cuda:1, ...", param_hint="--device") from None
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(
            f"{device!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here",
            param_hint="--device",
        )


def load(model: str, dtype: str = "float32", device: str = "cpu", attn: str | None = None) -> tuple[Any, Any]:
    one_of("--dtype", dtype, DTYPES)
    check_device(device)
    from blendkv.models import load_model

    return load_model(model, dtype=dtype, device=device, attn_implementation=attn)


def figure(value: float | None, form: str, unit: str = "") -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else f"{value:{form}}{unit}"


def read_ratios(text: str, option: str = "--ratio") -> list[float]:
    """The numbers in a list such as `0,0.15`."""
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.05,0.15", param_hint=option) from None
    for ratio in ratios:
        if not 0.0 <= ratio <= 1.0:
            raise typer.BadParameter(f"{ratio:g} is outside [0, 1]", param_hint=option)
    return list(dict.fromkeys(ratios))


def read_lengths(text: str, option: str = "--tokens") -> list[int]:
    """The numbers in a list such as `2048,4096`."""
    lengths = read_integers(option, text, "2048,4096")
    for length in lengths:
        if length < 1:
            raise typer.BadParameter(f"{length} is not a number of tokens: at least 1", param_hint=option)
    return lengths


def read_integers(option: str, text: str, example: str) -> list[int]:
    """The whole numbers in a list, each once."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as {example}", param_hint=option) from None


def read_names(option: str, text: str, choices: Any) -> list[str]:
    """The names in a list such as `full,blend`, each once."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names or [""]:
        one_of(option, name, choices)
    return names


def named_selector(name: str, source: Any = "k") -> Selector:
    """The selector of a name."""
    from blendkv.selectors import HKVD, get_selector

    try:
        return HKVD(source) if name == "hkvd" else get_selector(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--selector") from None


def one_of(option: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise typer.BadParameter(f"{value!r}: choose one of {', '.join(choices)}", param_hint=option)


_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def read_size(text: str, option: str) -> int:
    """Bytes, as `4k`, `1.5G` or `512MiB`, in powers of 1024; `10GB` in powers of 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(ib|b)?)", text.strip(), re.IGNORECASE)
    if found is None or (not found[2] and (found[3] or "").lower() == "ib"):
        raise typer.BadParameter(f"{text!r} is not a size such as 512MiB, 10G or 4k", param_hint=option)
    base = 1000 if (found[3] or "").lower() == "b" else 1024
    return round(float(found[1]) * base ** _UNITS[found[2].lower()])


def read_age(text: str, option: str) -> float:
    """Seconds, as `90s`, `30m`, `12h`, `7d` or `2w`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip(), re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not an age such as 30m, 12h or 7d", param_hint=option)
    return float(found[1]) * _SECONDS[found[2].lower()]


def shown_size(size: int) -> str:
    """A size for people, in three digits or so."""
    value, unit = float(size), 0
    while value >= 1023.95 and unit < 4:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {('', 'Ki', 'Mi', 'Gi', 'Ti')[unit]}B" if unit else f"{size} B"


def shown_age(seconds: float | None) -> str:
    """How long ago, for people; nothing where it is unknown."""
    if seconds is None:
        return ""
    for name, unit in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{max(seconds, 0):.0f} s ago"
