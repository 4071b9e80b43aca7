"""Threads of a gateway share one of malloc's arenas."""

import os
import platform
import subprocess
import sys

import pytest

from blendkv.serving.arenas import ARENAS, share_arenas

ON_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
COUNT = """
import ctypes, os, sys, tempfile, threading
from blendkv.serving.arenas import share_arenas

taken = share_arenas() if sys.argv[1] == "shared" else None
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.fdopen.restype = ctypes.c_void_p, ctypes.c_void_p
all_there = threading.Barrier(24)

def work():
    all_there.wait()
    for _ in range(200):
        libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(50_000))))
    all_there.wait()

threads = [threading.Thread(target=work) for _ in range(24)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
with tempfile.TemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    file.seek(0)
    print(taken, file.read().count(b"<heap nr="))
"""


def arenas(how: str, **environment: str) -> tuple[str, int]:
    """Whether malloc took what it was told, and how many arenas a process with 24 busy threads has."""
    told = {name: value for name, value in os.environ.items() if name not in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")}
    command = [sys.executable, "-c", COUNT, how]
    done = subprocess.run(command, env=told | environment, capture_output=True, text=True, check=True, timeout=120)
    taken, count = done.stdout.split()
    return taken, int(count)


@ON_GLIBC
def test_threads_share_arenas():
    assert arenas("not shared")[1] > 2 * ARENAS
    assert arenas("shared") == ("True", ARENAS)


@ON_GLIBC
@pytest.mark.parametrize("said", [{"MALLOC_ARENA_MAX": "6"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=6"}])
def test_the_environment_decides(said):
    taken, count = arenas("shared", **said)
    assert taken == "False"
    assert ARENAS < count <= 6


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_another_malloc_is_left_alone(monkeypatch, error):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)

    def no_library(name):
        raise error

    monkeypatch.setattr("blendkv.serving.arenas.ctypes.CDLL", no_library)
    assert not share_arenas()
