"""Coroutines are tests here, where pytest-asyncio is installed (langchain-tests brings it)."""

import os

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")


def pytest_configure(config):
    if config.pluginmanager.hasplugin("asyncio"):
        config.option.asyncio_mode = "auto"
