"""Which loads are looked at, and whose device bytes a load may claim."""

from __future__ import annotations

import pytest

from edge0.checkpoint.header import CheckpointIndex
from edge0.checkpoint.layout import ExpertLayout
from edge0.families import read_config
from edge0.telemetry.loads import DEMAND, LoadRecord
from edge0.telemetry.pagecache import FilePages
from experiments import observer as module
from experiments.observer import CacheObserver


@pytest.fixture
def watch(unit_35b):
    """A function that shows an observer some loads, and returns their records."""
    layout = ExpertLayout.of(CheckpointIndex.open(unit_35b), read_config(unit_35b))
    files = {path: FilePages(path) for path in layout.paths}
    ranges = layout.ranges(layout.layers[0], 0)

    def watched(count, probe_every=1, seed=0, reading_threads=1, warm_up=0):
        observer = CacheObserver(files, None, 1, seed)
        observer.reading_threads = reading_threads
        records = [LoadRecord(0, 0, 0, DEMAND, 1, 9, 0) for _ in range(warm_up + count)]
        for number, record in enumerate(records):
            observer.probe_every = 1 if number < warm_up else probe_every
            observer.before(ranges, record)
            observer.after(record)
        return records[warm_up:]

    yield watched
    for pages in files.values():
        pages.close()


def places(records):
    return [number for number, record in enumerate(records) if record.cold_bytes >= 0]


def test_one_load_in_n_is_drawn_alike_in_every_arm_and_at_no_fixed_place_of_a_layer(watch):
    found = places(watch(2000, probe_every=8))
    assert 190 < len(found) < 310  # 250 expected, six times their spread around it
    assert found == places(watch(2000, probe_every=8, warm_up=7)) != places(watch(2000, probe_every=8, seed=1))
    assert {number % 8 for number in found} == set(range(8))
    assert places(watch(5)) == [0, 1, 2, 3, 4] and places(watch(5, probe_every=0)) == []


@pytest.mark.parametrize(
    ("darwin", "threads", "own"), [(False, 2, True), (False, 1, True), (True, 1, True), (True, 2, False)]
)
def test_where_device_bytes_are_counted_for_the_process_one_load_of_several_claims_none(
    watch, monkeypatch, darwin, threads, own
):
    monkeypatch.setattr(module, "DARWIN", darwin)
    (record,) = watch(1, reading_threads=threads)
    assert (record.device_bytes >= 0) is own and (own or record.device_bytes == -1)
