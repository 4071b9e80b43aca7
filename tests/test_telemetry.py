"""Counters are sums of the reports, private in nothing, and never in a prompt's way."""

import copy
import gc
import logging
import pickle
import threading
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from blendkv import BlendReport, ChunkLibrary, Guard, TieredStore, _compat, telemetry
from blendkv.counting import METRICS, MOST_VALUES, Counts
from blendkv.report import LayerRows
from blendkv.stores import DiskStore, Pool
from blendkv.testing import byte_tokenizer, tiny_model
from tests.patience import until
from tests.stores.dicts import DictStore

SECRETS = ["The tower is 61 m high.", "It was built in 1923. The architect was M. Ilg."]
QUESTION = "How high is the tower?"


@pytest.fixture
def library(attached):
    return lambda store="memory://", **options: ChunkLibrary(attached(), byte_tokenizer(chat=True), store, **options)


def ask(kv, documents=SECRETS, **options):
    return asked(kv, documents, **options).report


def asked(kv, documents, **options):
    """Inputs that were used, and hold what was loaded for them."""
    inputs = kv(documents, QUESTION, **options)
    kv.model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)
    return inputs


def scraped(registry) -> dict[tuple, float]:
    """Name and labels of each line, as Prometheus sees it."""
    lines = (sample for family in registry.collect() for sample in family.samples)
    return {(line.name.removeprefix("blendkv_"), *sorted(line.labels.items())): line.value for line in lines}


def value(lines, name, **labels):
    return lines[(name, *sorted(({"library": "default"} | labels).items()))]


# -- listeners ---------------------------------------------------------------------------------------------------------


def test_listeners_are_told_once_a_blend_when_the_report_is_whole(library):
    kv, told = library(), []
    remove = kv.on_report(lambda report: told.append((report, report.layers[-1].reused, report.cache_bytes)))
    inputs = kv(SECRETS, QUESTION)
    assert not told  # nothing was blended yet
    kv.model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert told == [(inputs.report, inputs.report.reused_tokens, inputs.report.cache_bytes)]
    remove()
    remove()
    ask(kv)
    assert len(told) == 1


def test_one_that_fails_costs_nothing_and_is_logged_once(library, caplog):
    kv, told = library(), []
    kv.on_report(lambda report: 1 / 0)
    kv.on_report(told.append)
    plain = library()
    with caplog.at_level(logging.WARNING, "blendkv"):
        outs = [each.model.generate(**each(SECRETS, QUESTION), max_new_tokens=6, do_sample=False, pad_token_id=0)
                for each in (kv, kv, plain)]  # fmt: skip
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[2])
    assert len(told) == 2
    assert [record.message for record in caplog.records] == [
        "a listener of reports failed (told once); prompts go on without it"
    ]
    assert not any(text in caplog.text for text in SECRETS)


def test_what_is_no_function_is_refused_at_once(library):
    with pytest.raises(TypeError, match="a listener is a function of a BlendReport, not 'print'"):
        library().on_report("print")


def test_copies_of_a_report_and_forks_of_its_cache_tell_nobody(library, attached):
    kv, told = library(), []
    kv.on_report(told.append)
    inputs = kv(SECRETS, QUESTION)
    for twin in (copy.deepcopy(inputs.report), pickle.loads(pickle.dumps(inputs.report))):
        twin.listeners.tell(twin)
    fork = inputs.cache.fork()
    given = {_compat.CACHE_ARG: fork}
    attached().generate(inputs.input_ids, **given, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert fork.report.reused_tokens > 0
    assert not told


def test_the_guards_own_blends_are_not_counted(library):
    kv, told = library(guard=Guard(share=1.0)), []
    kv.on_report(told.append)
    inputs = kv(SECRETS, QUESTION)
    out = kv.model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert kv.guard.check(kv.model, inputs, out) is not None
    assert told == [inputs.report]


# -- what is counted ---------------------------------------------------------------------------------------------------


@pytest.fixture
def registry():
    return pytest.importorskip("prometheus_client").CollectorRegistry()


def test_prometheus_has_the_sums_of_the_reports(library, registry, tmp_path):
    kv = library(TieredStore(Pool(), DiskStore(tmp_path)))
    telemetry.prometheus(kv, registry=registry)
    assert value(scraped(registry), "prompts_total") == 0
    long = [" ".join(f"word{n}" for n in range(90))]  # its file is read in pieces
    reports = [ask(kv, long)]
    kv.flush()
    kv.clear()
    inputs = asked(kv, long)
    until(lambda: len(kv.pool.pool) == 3)  # memory is given what has come after the prompt was
    reports += [inputs.report, ask(kv, long)]
    lines = scraped(registry)
    assert value(lines, "prompts_total") == 3
    for origin in ("reused", "recomputed", "fresh", "missed"):
        want = sum(getattr(report.layers[-1], origin) for report in reports)
        assert value(lines, "tokens_total", origin=origin) == want
    assert value(lines, "chunks_total", result="hit") == sum(use.hit for report in reports for use in report.chunks)
    assert value(lines, "prefilled_tokens_total") == reports[0].prefilled_tokens > 0
    assert value(lines, "placed_bytes_total") == sum(report.chunk_bytes for report in reports)
    loaded = sum((Counter(report.loaded) for report in reports), Counter())
    assert value(lines, "loaded_tokens_total", tier="memory") == loaded.pop("memory") > 0
    assert value(lines, "loaded_tokens_total", tier="file") == sum(loaded.values()) > 0
    assert value(lines, "loaded_bytes_total", tier="file") == sum(reports[1].loading.nbytes.values()) > 0
    for stage, seconds in reports[0].seconds.items():
        total = seconds + sum(report.seconds[stage] for report in reports[1:])
        assert value(lines, "seconds_total", stage=stage) == pytest.approx(total)
    [disk] = kv.pool.stores
    assert value(lines, "store_hits_total", tier="file") == disk.stats.hits > 0
    assert value(lines, "store_puts_total", tier="file") == disk.stats.puts > 0
    assert value(lines, "memory_bytes") == kv.pool.pool.stats.bytes > 0


def test_misses_and_faults_have_their_reasons(library, registry):
    store = DictStore()
    kv = library(TieredStore(Pool(), store), on_miss="recompute", namespace="n")
    telemetry.prometheus(kv, registry=registry)
    report = ask(kv)
    store.stats.count("misses", "timeout")
    store.stats.count("misses", "what a stranger's server said: PASSWORD=hunter2")
    lines = scraped(registry)
    assert {name[1:]: n for name, n in lines.items() if name[0] == "missed_tokens_total"} == {
        (("library", "default"), ("reason", reason)): tokens for reason, tokens in report.misses.items()
    }
    faults = {dict(name[1:])["fault"]: n for name, n in lines.items() if name[0] == "store_faults_total"}
    assert faults["timeout"] == 1
    assert faults["other"] == 1


def test_nothing_private_is_in_them(library, registry, tmp_path):
    folder = tmp_path / "home-of-jane"
    kv = library(TieredStore(Pool(), DiskStore(folder)), namespace="tenant-jane")
    telemetry.prometheus(kv, registry=registry)
    ask(kv)
    from prometheus_client import generate_latest

    said = generate_latest(registry).decode()
    private = [*SECRETS, QUESTION, "jane", *kv.keys(SECRETS), *(key[:8] for key in kv.keys(SECRETS))]
    assert [text for text in private if text in said] == []


def test_labels_are_bounded():
    counts = Counts(Pool())
    for number in range(3 * MOST_VALUES):
        report = BlendReport(layers=[LayerRows(0, 0, 1, 0)])
        report.chunks = [SimpleNamespace(hit=False, found=1, reason=f"reason {number}")]
        counts.add(report)
    found = counts.of("missed_tokens")
    assert len(found) <= MOST_VALUES + 1
    assert sum(found.values()) == 3 * MOST_VALUES
    assert found["other",] > MOST_VALUES


def test_stores_of_one_kind_have_names_of_their_own(tmp_path, library, registry):
    kv = library(TieredStore(Pool(), DiskStore(tmp_path / "near"), DiskStore(tmp_path / "far")))
    telemetry.prometheus(kv, registry=registry)
    tiers = {dict(name[1:])["tier"] for name in scraped(registry) if name[0] == "store_hits_total"}
    assert tiers == {"memory", "file", "file-2"}


def test_a_report_whose_times_a_device_still_measures_is_read_later():
    class Event:
        done = waited = False

        def query(self):
            return self.done

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, other):
            return 2000.0

    counts, first, second = Counts(Pool()), Event(), Event()
    for event in (first, second):
        report = BlendReport(layers=[LayerRows(0, 0, 1, 0)])
        report.clock._events.append(("recompute", None, Event(), event))
        counts.add(report)
    assert not first.waited
    first.done = True
    counts.add(BlendReport(layers=[LayerRows(0, 0, 1, 0)]))
    assert first.waited
    assert not second.waited
    assert counts.of("prompts") == {(): 3}  # whoever asks waits for the rest
    assert second.waited
    assert counts.of("seconds")["recompute",] == 4.0


def test_threads_lose_no_counts():
    counts = Counts(Pool())

    def work():
        for _ in range(500):
            counts.add(BlendReport(layers=[LayerRows(0, 0, 2, 0)]))
            counts.of("tokens")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.of("prompts") == {(): 2000}
    assert counts.of("tokens")["fresh",] == 4000


# -- registries and meters ---------------------------------------------------------------------------------------------


def test_two_libraries_in_one_registry(library, registry):
    one, other = library(), library()
    first = telemetry.prometheus(one, name="one", registry=registry)
    telemetry.prometheus(other, name="other", registry=registry)
    with pytest.raises(ValueError, match="the registry has a library 'one' already"):
        telemetry.prometheus(other, name="one", registry=registry)
    ask(one)
    lines = scraped(registry)
    assert [value(lines, "prompts_total", library=name) for name in ("one", "other")] == [1, 0]
    first.close()
    assert ("prompts_total", ("library", "one")) not in scraped(registry)
    again = telemetry.prometheus(one, name="one", registry=registry)
    ask(one)
    assert value(scraped(registry), "prompts_total", library="one") == 1
    assert again.counts is not first.counts


def test_the_registry_keeps_no_library_alive(registry):
    kv = ChunkLibrary(tiny_model("llama"), byte_tokenizer(chat=True))
    telemetry.prometheus(kv, registry=registry)
    ask(kv)
    ghosts = [weakref.ref(thing) for thing in (kv, kv.pool, kv.model)]
    del kv
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None, None, None]
    assert value(scraped(registry), "prompts_total") == 1


def test_opentelemetry_says_the_same(library, registry):
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = metrics.MeterProvider(metric_readers=[reader])
    kv = library()
    telemetry.prometheus(kv, registry=registry)
    telemetry.opentelemetry(kv, provider.get_meter("test"))
    gone = telemetry.opentelemetry(library(), provider.get_meter("test"), name="gone")
    ask(kv)
    ask(kv)
    gone.close()
    [scope] = reader.get_metrics_data().resource_metrics[0].scope_metrics
    said = {}
    for metric in scope.metrics:
        about = METRICS[metric.name.removeprefix("blendkv.")]
        assert (metric.unit, metric.description) == (about.unit, about.help)
        for point in metric.data.data_points:
            total = "" if about.gauge else "_total"
            name = metric.name.removeprefix("blendkv.") + total
            said[(name, *sorted(point.attributes.items()))] = point.value
    assert said == scraped(registry)
    assert value(said, "prompts_total") == 2
    provider.shutdown()


def test_names(library, registry):
    with pytest.raises(ValueError, match="names no library"):
        telemetry.prometheus(library(), name="", registry=registry)
