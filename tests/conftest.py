"""Shared by all tests: no network, a stand-in for the Hub, and the outputs of the official code."""

import os

# Before any Hugging Face import: nothing may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Before torch: models so small gain nothing from threads, and processes that test in parallel would share the cores.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.hub_server import HubServer
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from hypothesis import settings

settings.register_profile("lex", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("lex")


def pytest_configure(config: pytest.Config) -> None:
    """Keep xdist from beginning with the files of most tests: those of few tests start processes, and take longest."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of long tests, then of many, so that processes that share the files end together."""
    long, tests = Counter[Path](), Counter(item.path for item in items)
    for item in items:
        long[item.path] += any(item.get_closest_marker(name) for name in ("processes", "inductor"))
    items.sort(key=lambda item: (-long[item.path], -tests[item.path]))


def pytest_collection() -> None:
    """While tests import, each collection of garbage would go through ever more that is none."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What all imports have left lives as long as the process: a collection of garbage need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Nor need it look again at what a file leaves: measurements collect garbage before each batch size they try."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def own_environment() -> Iterator[None]:
    """What a file, or a library that it starts, sets in the environment is not seen by the next one."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder with outputs of the official code; its README tells where each comes from."""
    return Path(__file__).with_name("golden")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No graphs of tests before this one, and their counters at 0."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def online(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server, which huggingface_hub in this very process then takes for the Hub."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # It tries a broken upload again, and would wait 23 seconds in between.
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    close_session()
    yield hub
    close_session()
