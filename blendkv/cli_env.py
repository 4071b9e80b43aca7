"""`blendkv env`: what a bug report should say of a machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from blendkv._console import print_json, work
from blendkv._options import Json

PACKAGES = (
    "blendkv", "torch", "transformers", "accelerate", "tokenizers", "huggingface_hub", "safetensors", "numpy", "numba",
    "triton", "flash-attn", "xxhash", "fsspec", "s3fs", "redis", "starlette", "uvicorn", "langchain-core",
    "llama-index-core", "haystack-ai", "gradio", "gguf", "peft", "torchao", "bitsandbytes",
)  # fmt: skip
SWITCHES = ("BLENDKV_HOME", "BLENDKV_GRAPHS", "BLENDKV_KERNELS", "BLENDKV_DEBUG", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")


def env(as_json: Json = False) -> None:
    """Print versions, devices and switches, to go with a bug report. No path, host or user name is in it."""
    with work(as_json):
        said = facts()
    if as_json:
        print_json(said)
        return
    for name, value in said.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        typer.echo(f"- {name}: {shown}")


def facts() -> dict[str, object]:
    """What is installed, and what torch sees."""
    import torch

    from blendkv.kernels import unusable

    found: dict[str, object] = {
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["CUDA"] = torch.version.cuda or "not in this torch"
    found["devices"] = cards or ["cpu"]
    found["threads"] = torch.get_num_threads()
    device = torch.device("cuda" if cards else "cpu")
    found["Triton kernels"] = unusable([device], torch.bfloat16, [64]) or "usable"
    set_here = [name for name in SWITCHES if name in os.environ]
    found["switches"] = [name if name == "BLENDKV_HOME" else f"{name}={os.environ[name]}" for name in set_here] or [
        "none"
    ]
    return found
