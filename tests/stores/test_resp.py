"""Replies are read as they were sent, and nothing else is."""

import random
import time
import tracemalloc

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from blendkv.stores.resp import Replies
from tests.patience import SLACK_S

BLOB = (bytes, type(None))


class Wire:
    """Bytes that arrive in parts of some size, and then end."""

    def __init__(self, data: bytes, step: int) -> None:
        self.data, self.step, self.at = data, step, 0

    def recv(self, size: int) -> bytes:
        part = self.data[self.at : self.at + min(size, self.step)]
        self.at += len(part)
        return part

    def recv_into(self, buffer) -> int:
        part = self.recv(len(buffer))
        buffer[: len(part)] = part
        return len(part)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000, 1 << 20])
def test_what_was_sent_is_read(step):
    large = random.Random(1).randbytes(70_000 if step > 2 else 300)
    data = b"+OK\r\n:-5\r\n$0\r\n\r\n$-1\r\n$4\r\na\r\nb\r\n" + b"$%d\r\n%s\r\n" % (len(large), large)
    data += b"*2\r\n$1\r\n0\r\n*3\r\n:1\r\n$-1\r\n+x\r\n-OOM no\r\n$2\r\nhi\r\n"
    replies = Replies(Wire(data, step))
    assert replies.read((bytes,)) == b"OK"
    assert replies.read((int,)) == -5
    assert replies.read(BLOB) == b""
    assert replies.read(BLOB) is None
    assert replies.read(BLOB) == b"a\r\nb"
    assert replies.read(BLOB, len(large)) == large
    assert replies.read((list,)) == [b"0", [1, None, b"x"]]
    assert isinstance(replies.read(BLOB), ResponseError)
    assert replies.read(BLOB) == b"hi"
    assert replies.rest == 0
    with pytest.raises(RedisConnectionError):
        replies.read(BLOB)


@pytest.mark.parametrize(
    "data",
    [
        b"*2147483647\r\n",
        b"$2147483647\r\n",
        b"$99999999999999999999999\r\n",
        b"$-5\r\n",
        b"$1_0\r\n",
        b"$ 1\r\n",
        b"$3\r\nabcd\r\n",
        b"%1\r\n",
        b"\r\n",
        b"\0" * 100_000,
        b"*1\r\n" * 1000,
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=lambda data: repr(data[:16]),
)
def test_nonsense_is_refused_at_once_and_takes_no_memory(data):
    for kinds in (BLOB, (list,), (bytes,), (int,)):
        tracemalloc.start()
        begun = time.perf_counter()
        with pytest.raises(RedisError):
            Replies(Wire(data, 1 << 16)).read(kinds)
        assert time.perf_counter() - begun < 0.1 + SLACK_S
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()


def test_another_kind_of_reply_is_refused():
    for data, kinds in ((b":1\r\n", BLOB), (b"$1\r\nx\r\n", (int,)), (b"$-1\r\n", (bytes,)), (b"+OK\r\n", (list,))):
        with pytest.raises(InvalidResponse):
            Replies(Wire(data, 100)).read(kinds)
    with pytest.raises(InvalidResponse):
        Replies(Wire(b"$70000\r\n", 100)).read(BLOB, 69_999)


def test_random_damage_raises_nothing_else():
    draw = random.Random(0)
    good = b"$4\r\nabcd\r\n*2\r\n$1\r\n0\r\n*1\r\n:1\r\n-ERR no\r\n-MOVED 1 h:1\r\n+OK\r\n"
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        replies = Replies(Wire(bytes(data), draw.choice([3, 100])))
        try:
            for kinds in (BLOB, (list,), BLOB, BLOB, BLOB):
                replies.read(kinds)
        except (InvalidResponse, RedisConnectionError, ValueError):
            pass
