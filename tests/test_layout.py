"""Imports point one way: up the list in README, never down it, whether at the top of a file or inside a function."""

import ast
from pathlib import Path

import pytest

import blendkv

PACKAGE = Path(blendkv.__file__).parent
_ORDER = """
_version _paths _extras errors plugins sockets container.format container.seals container.header container.packing
container.sources container.writer container.reader container codecs.classes codecs.tables codecs.naive codecs.loops
codecs.rans codecs.base codecs.raw codecs.profile codecs.protect codecs.statistics codecs.transform codecs.klt
codecs.cachegen codecs.fitting codecs _compat compiling flops listening report kernels.table chunk weights rope
kernels.naive kernels.placing kernels.rows kernels.rans kernels.klt kernels.mass kernels.attention kernels levelkeys
chunkfile chunkwriter overlap expanding landing prompt selectors.base selectors.static selectors.deviation
selectors.attention
selectors.stored selectors.combined selectors.names selectors correctors stores.base stores.deadline stores.keys
stores.urls stores.files stores.hits stores.inventory stores.disk stores.breaker stores.resp stores.valkey_server
stores.valkey_servers stores.valkey_url stores.valkey stores.catalog stores.valkey_centre stores.http
stores.http_centre stores.patience stores.remote stores.eviction stores.coding stores.filing stores.opening
stores.pool stores.writing stores.reading stores.backlog stores.tiered stores.saved stores stores.upkeep
stores.checking stores.inspection loading.queues loading.scheduler loading.sources loading.arriving loading
loading.clocks loading.throughput loading.streaming loading.policies loading.levels loading.assembly loading.orders
loading.handover loading.wanted loading.client attention mass cache facts plan choosing buffers kernelbuffers
correcting waits recording graphs norms rows question blend accounting catching decoding attachment stopping hooks
learning
proof attaching layout conversation pace loading.costs loading.plans loading.decision loading.controller
loading.progress loading.sparing loading.incoming loading.survey loading.transfer loading.pipeline loading.guided
loading.timely prefilling loading.measuring scoring supply divergence guard manifest gathering hub sharing pretrained
inputs library counting telemetry documents precompute texts trials calibrating models contract testing passages
loading.losses bench bench.measure bench.scores bench.intervals bench.records bench.readers bench.synthetic
bench.tasks bench.methods bench.shapes bench.ondisk bench.prompts bench.gates bench.decode bench.memory bench.results
bench.stores
bench.traces bench.bandwidth bench.throttle bench.eviction bench.kernels bench.coding bench.expanding bench.ttft
bench.laying bench.answering bench.forcing bench.loading_runs bench.loading bench.mapping bench.conditions
bench.settings bench.items bench.journal bench.summary bench.codec_table bench.store_table bench.queueing
bench.workload bench.serving bench.throughput bench.throughput_table bench.table bench.leaderboard bench.quality
bench.insights bench.quality_plot bench.throughput_plot bench.plot bench.suggest bench.coders bench.codec bench.joint
bench.links bench.simulation bench.oracle bench.streaming bench.sending bench.streaming_levels bench.fairness
bench.gateway_bare bench.gateway_load bench.gateway verify families survey guide demo serving.arenas
serving.limits serving.tokens serving.slots serving.ranges serving.entries serving.protocol serving.metrics
serving.logs serving.central serving.answers serving.chunks serving.names serving.app serving.server serving
integrations integrations.extras integrations.detokenizing integrations.answering integrations.prefetching
integrations.langchain_messages integrations.langchain_retriever integrations.langchain_chat integrations.langchain
integrations.llama_index integrations.pipeline integrations.haystack web.asked web.telling web.tokens web.running
web.drawing web.visitors web.page web.server web _console _options cli_bench cli_bench_stores cli_bench_streaming
cli_bench_serving cli_bench_throughput cli_codec cli_env cli_quality cli_serve cli_stores cli_precompute cli_calibrate
cli_bench_loading cli_demo cli __main__
"""
ORDER = _ORDER.split()


def imports(path: Path) -> set[str]:
    """Modules of blendkv that a file imports; those for type checkers alone do not count."""
    found: set[str] = set()
    skip: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skip |= {inner for child in node.body for inner in ast.walk(child)}
        if node in skip:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "blendkv":
            found |= {alias.name for alias in node.names if alias.name in ORDER}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("blendkv."):
            name = node.module.removeprefix("blendkv.")
            found |= {f"{name}.{alias.name}" for alias in node.names} & set(ORDER) or {name}
    return found


def module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def test_every_file_has_its_place():
    assert sorted(map(module, FILES)) == sorted(ORDER)


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_point_up(path):
    here = ORDER.index(module(path))
    down = {name for name in imports(path) if ORDER.index(name) >= here}
    assert not down
