"""Whether tests notice: `python -m tests.mutations` breaks our code in one place at a time and runs some tests.

Every mutation must make a test fail, and unbroken the same tests must pass. Prints one line each; exit code 1 if a
mutation was not noticed. `--only NAME` tries one, `--markdown` prints the table of docs/guides/faults.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutation:
    """One deliberate mistake.

    Attributes:
        name: what it does.
        file: below `blendkv`.
        before: text that is there exactly once.
        after: what is there instead.
        tests: arguments of pytest.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str


MUTATIONS = (
    Mutation(
        "checksums of segments are not compared",
        "container/reader.py",
        "if not holds(number, segment, checks[number]):",
        "if False:",
        "tests/container/test_damage.py tests/stores/test_tiered.py",
    ),
    Mutation(
        "the checksum of the head is not compared",
        "container/packing.py",
        "if head_check(data[: f.CHECKED] + data[f.PRELUDE.size :]) != prelude.check:",
        "if False:",
        "tests/container/test_damage.py",
    ),
    Mutation(
        "tags of sealed heads are not compared",
        "container/reader.py",
        "if not same(tag.head(bytes(data[: f.CHECKED]) + data[f.PRELUDE.size : end]), data[end:]):",
        "if False:",
        "tests/container tests/test_chunkfile.py",
    ),
    Mutation(
        "a tenant's secret is not part of the key",
        "supply.py",
        "common = self.tokenizer_digest, self.namespace, self.secret",
        "common = self.tokenizer_digest, self.namespace, None",
        "tests/test_library.py",
    ),
    Mutation(
        "a stored file is not asked for its own key",
        "stores/opening.py",
        "if key not in (own, level_key_of(own, file.header)):",
        "if False:",
        "tests/stores/test_tiered.py",
    ),
    Mutation(
        "a library does not compare token ids on a hit",
        "supply.py",
        "tuple(chunk.ids.tolist()) == piece.ids\n            and ",
        "",
        "tests/test_library.py tests/cases/test_bad_input.py tests/cases/test_d39.py",
    ),
    Mutation(
        "the namespace is not part of the key",
        "chunk.py",
        "            namespace.encode(),\n",
        '            b"",\n',
        "tests/test_chunk.py tests/test_library.py",
    ),
    Mutation(
        "what stood before a chunk is not part of the key",
        "chunk.py",
        "            ids_bytes(conditioning),\n",
        "            ids_bytes(()),\n",
        "tests/test_chunk.py tests/test_library.py",
    ),
    Mutation(
        "fields of the key are not framed by their lengths",
        "chunk.py",
        'return b"".join(struct.pack("<Q", len(f)) + f for f in fields)',
        'return b"".join(fields)',
        "tests/test_chunk.py",
    ),
    Mutation(
        "damaged entries stay where they are",
        "stores/reading.py",
        'getattr(store, "quarantine", store.delete)(entry)',
        "pass",
        "tests/stores/test_tiered.py",
    ),
    Mutation(
        "entries are written in place, not renamed",
        "stores/files.py",
        'name = f"{key}.{os.getpid()}-{token_hex(4)}.tmp"',
        'name = f"{key}.bkv"',
        "tests/stores/test_disk.py tests/faults/test_faults.py",
    ),
    Mutation(
        "a durable put does not wait for the disk",
        "stores/files.py",
        "            os.fsync(fd)\n",
        "            pass\n",
        "tests/stores/test_disk.py tests/faults/test_faults.py",
    ),
    Mutation(
        "temporary files are not locked",
        "stores/files.py",
        "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n        view",
        "            pass\n        view",
        "tests/stores/test_disk.py tests/faults/test_faults.py",
    ),
    Mutation(
        "links are followed",
        "stores/files.py",
        "_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW",
        "_SAFE = os.O_CLOEXEC",
        "tests/stores/test_disk.py",
    ),
    Mutation(
        "the cap of a folder is not kept",
        "stores/disk.py",
        "return size <= self.capacity_bytes and (excess <= 0 or self._evict(excess))",
        "return True",
        "tests/stores/test_disk.py",
    ),
    Mutation(
        "deadlines are not kept",
        "stores/deadline.py",
        "return most if end is None else max(0.0, min(most, end - time.monotonic()))",
        "return most",
        "tests/stores/test_remote.py tests/stores/test_valkey.py tests/stores/test_tiered.py",
    ),
    Mutation(
        "a budget is never used up",
        "stores/deadline.py",
        "self.left -= time.monotonic() - begin",
        "pass",
        "tests/stores/test_tiered.py",
    ),
    Mutation(
        "the breaker never opens",
        "stores/breaker.py",
        'self._state == "half-open" or self._failed >= self._most',
        "False",
        "tests/stores/test_breaker.py",
    ),
    Mutation(
        "the manifest is written before the pieces",
        "stores/valkey.py",
        "        fault = _first(self._ask(asks))\n        if not fault:",
        '        self._ask([Ask(name, ("SET", name, entry.line()), (bytes, str))])\n'
        "        fault = _first(self._ask(asks))\n        if not fault:",
        "tests/stores/test_valkey.py",
    ),
    Mutation(
        "the queue of a writer has no bound",
        "stores/writing.py",
        "if self._bytes - before + len(data) > self.capacity_bytes:",
        "if False:",
        "tests/stores/test_writing.py",
    ),
    Mutation(
        "an exception ends a writer's thread",
        "stores/writing.py",
        "except Exception as error:  # a plug-in's: the thread lives on",
        "except ZeroDivisionError as error:",
        "tests/stores/test_writing.py",
    ),
    Mutation(
        "what has been read from afar is not put nearer",
        "stores/tiered.py",
        "if writer in self._writers[:level] and writer.put(key, data):",
        "if False:",
        "tests/stores/test_tiered.py",
    ),
    Mutation(
        "keys are rotated in their own dtype, not in fp32",
        "rope.py",
        "source = keys.float()",
        "source, cos, sin = keys, cos.to(keys.dtype), sin.to(keys.dtype)",
        "tests/test_rope.py",
    ),
    Mutation(
        "a model's fingerprint is not compared",
        "facts.py",
        "if chunk.fingerprint != self.fingerprint:",
        "if False:",
        "tests/cases/test_d27.py tests/test_library.py",
    ),
)


def run(tests: str, source: Path) -> tuple[bool, str]:
    """Whether tests pass, and the first that does not; those that are not there are left out."""
    there = [name for name in tests.split() if (source / name.partition("::")[0]).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *there]
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=900)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return done.returncode == 0, failed[1] if failed else done.stdout[-300:]


def attempt(mutation: Mutation) -> tuple[bool, str]:
    """Whether a mutation was noticed, and by which test."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("blendkv", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "blendkv" / mutation.file
        text = path.read_text()
        if text.count(mutation.before) != 1:
            return False, f"the text to be changed is there {text.count(mutation.before)} times"
        path.write_text(text.replace(mutation.before, mutation.after))
        passed, failed = run(mutation.tests, copy)
        return not passed and "::" in failed, failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--markdown", action="store_true", help="a table")
    args = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if args.only in mutation.name]
    missed = 0
    tests = " ".join(dict.fromkeys(name for mutation in chosen for name in mutation.tests.split()))
    passed, failed = run(tests, ROOT)
    if not passed:
        print(f"without any mutation {failed} fails")
        return 1
    if args.markdown:
        print("| mutation | noticed by |\n|---|---|")
    for mutation in chosen:
        noticed, by = attempt(mutation)
        missed += not noticed
        told = by if noticed else f"NOT NOTICED ({by})"
        print(f"| {mutation.name} | `{told}` |" if args.markdown else f"{mutation.name}: {told}", flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
