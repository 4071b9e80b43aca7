"""Coroutines are tests here, where pytest-asyncio is installed (langchain-tests brings it)."""


def pytest_configure(config):
    if config.pluginmanager.hasplugin("asyncio"):
        config.option.asyncio_mode = "auto"
