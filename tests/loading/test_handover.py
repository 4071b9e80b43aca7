"""A transfer goes on at the next gateway where the last one left off, and takes no wrong byte from either."""

import pytest

from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.throttle import Fault, ThrottledStore
from blendkv.chunkwriter import encode_chunk
from blendkv.loading.assembly import Assembly
from blendkv.loading.clocks import VirtualClock
from blendkv.loading.handover import LIES, Handover, transfer
from tests.drawn import SMALL, chunk_of
from tests.stores.dicts import DictStore

KEY = "cd" * 32
DATA = encode_chunk(chunk_of(SMALL, 2000))
SIZE = len(DATA)


def held(data=DATA):
    store = DictStore()
    store.entries[KEY] = data
    return store


def gateway(clock, rate=1e6, data=DATA, **settings):
    return ThrottledStore(held(data), Bandwidth.constant(rate), clock=clock, burst_s=0.0, **settings)


def moved(*stores, clock, **settings):
    handover, assembly = Handover(stores, clock=clock, **settings), Assembly(SIZE)
    return transfer(handover, KEY, assembly, piece=16384), assembly, handover.told


@pytest.mark.parametrize("at", [0, 31, 5000, 100_001, 300_000])
def test_the_second_goes_on_where_the_first_was_cut_off(at):
    clock = VirtualClock()
    done, assembly, told = moved(gateway(clock, faults=[Fault(at, "dead")]), gateway(clock), clock=clock)
    assert done
    assert bytes(assembly.read(0, SIZE)) == DATA
    assert told.handed_over == 1
    assert told.nbytes[0] <= at
    assert sum(told.nbytes.values()) == SIZE  # nothing comes twice, but for the piece that was cut


def test_a_stalled_gateway_costs_one_piece():
    clock = VirtualClock()
    done, _, told = moved(gateway(clock, faults=[Fault(50_000, "stall")]), gateway(clock), clock=clock, piece_s=0.25)
    assert done
    assert told.failures == {0: 1}
    assert clock.now() == pytest.approx(0.25 + SIZE / 1e6, abs=0.02)


def test_back_and_forth_if_both_stumble():
    clock = VirtualClock()
    cuts = [Fault(at, "cut") for at in range(20_000, SIZE, 40_000)]
    done, assembly, told = moved(gateway(clock, faults=cuts), gateway(clock, faults=cuts), clock=clock)
    assert done
    assert bytes(assembly.read(0, SIZE)) == DATA
    assert told.handed_over > 2


def liar(at):
    wrong = bytearray(DATA)
    wrong[at] ^= 0x55
    return bytes(wrong)


@pytest.mark.parametrize("at", [3, 700, 150_000, SIZE - 20])
def test_a_second_source_that_lies_mixes_nothing_in(at):
    clock = VirtualClock()
    first = gateway(clock, faults=[Fault(2 * 16384, "cut")])
    done, assembly, told = moved(first, gateway(clock, data=liar(at)), clock=clock, again_s=0.0)
    assert done
    assert bytes(assembly.read(0, SIZE)) == DATA
    assert told.lies[0] == 0
    assert told.lies[1] == (at > 40_000)


def test_one_that_only_lies_is_dropped_and_the_transfer_ends():
    clock = VirtualClock()
    lies = bytes(b ^ 0xFF for b in DATA)
    done, assembly, told = moved(gateway(clock, data=lies), clock=clock, again_s=0.0)
    assert not done
    assert told.lies == {0: LIES}
    assert assembly.usable() is None
    done, assembly, _ = moved(gateway(clock, data=lies), gateway(clock), clock=clock)
    assert done
    assert bytes(assembly.read(0, SIZE)) == DATA


def test_short_answers_and_raising_sources_are_failures():
    class Short(DictStore):
        def get(self, key, start=0, stop=None):
            return DATA[start : stop - 1]

    broken = held()
    broken.raises = OSError("gone")
    done, assembly, told = moved(Short(), broken, held(), clock=VirtualClock())
    assert done
    assert bytes(assembly.read(0, SIZE)) == DATA
    assert told.failures == {0: 1, 1: 1}


def test_nobody_answers():
    clock = VirtualClock()
    stores = [gateway(clock, rate=0.0), gateway(clock, rate=0.0)]
    with clock.deadline(0.6):
        done, _, told = moved(*stores, clock=clock, piece_s=0.5)
    assert not done
    assert clock.now() == pytest.approx(0.6)
    assert told.nbytes == {}
    assert Handover(stores, clock=clock).size(KEY) == SIZE
    with pytest.raises(ValueError, match="no sources"):
        Handover([])


def test_the_preferred_one_is_asked_again_after_a_while():
    clock = VirtualClock()
    first, second = gateway(clock, faults=[Fault(0, "cut")]), gateway(clock)
    handover = Handover([first, second], clock=clock, again_s=1.0)
    assert handover.get(KEY, 0, 100) == (DATA[:100], 1)
    assert handover.get(KEY, 100, 200) == (DATA[100:200], 1)
    second.faults = None
    second._dead = True
    assert handover.get(KEY, 200, 300) == (DATA[200:300], 0)
