"""Our stores keep the contract that plug-ins are held to."""

import uuid

import pytest

from blendkv.stores import DiskStore, RemoteStore
from blendkv.testing import StoreContract


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
