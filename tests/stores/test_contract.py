"""Our stores keep the contract that plug-ins are held to."""

import uuid

import pytest

from blendkv.stores import DiskStore, RemoteStore
from blendkv.testing import StoreContract
from tests.stores.servers import BINARY, Server


class TestDisk(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return DiskStore(tmp_path / "store")


class TestDurableDisk(StoreContract):
    large = 1 << 20

    @pytest.fixture
    def store(self, tmp_path):
        return DiskStore(tmp_path / "store", durable=True)


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self):
        return RemoteStore(f"memory://{uuid.uuid4().hex}")


class TestFilesByFsspec(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return RemoteStore(f"file://{tmp_path}/store")


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


@pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server on this machine")
class TestValkey(StoreContract):
    @pytest.fixture
    def store(self, server):
        from blendkv.stores.valkey import ValkeyStore

        server.tell("FLUSHALL")
        return ValkeyStore.from_url(server.url)
