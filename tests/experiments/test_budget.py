"""The ledger of pages: any sequence of records that come and go, against a plain set of pages."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from edge0.telemetry.pagecache import PAGE_BYTES, page_spans
from experiments.budgets.budget import Ledger, Records

FILES = (Path("a"), Path("b"))
RECORDS = 6
# Pieces of the files that belong to no record or to one; lengths in eighths of a page, so that pages are shared.
pieces = st.lists(st.tuples(st.integers(-1, RECORDS - 1), st.integers(0, 30)), max_size=30)


def records_of(layout):
    ranges = {record: [] for record in range(RECORDS)}
    for path, parts in zip(FILES, layout, strict=True):
        offset = 0
        for owner, eighths in parts:
            nbytes = eighths * PAGE_BYTES // 8
            if owner >= 0:
                ranges[owner].append((path, offset, nbytes))
            offset += nbytes
    return Records(lambda layer, expert: ranges[expert], [(0, record) for record in range(RECORDS)]), ranges


def pages_of(ranges):
    return {
        (path, page)
        for path in FILES
        for start, end in page_spans((offset, nbytes) for at, offset, nbytes in ranges if at == path)
        for page in range(start, end, PAGE_BYTES)
    }


@given(st.tuples(pieces, pieces), st.lists(st.integers(0, RECORDS - 1), max_size=30))
def test_a_page_counts_once_and_goes_with_its_last_holder(layout, toggled):
    records, ranges = records_of(layout)
    ledger, held = Ledger(records), set()
    for index in toggled:
        if index in held:
            held.remove(index)
            free = [(path, offset, nbytes) for path, parts in ledger.remove(index).items() for offset, nbytes in parts]
            kept = pages_of([part for record in held for part in ranges[record]])
            assert pages_of(free) == pages_of(ranges[index]) - kept
        else:
            held.add(index)
            ledger.add(index)
        expected = pages_of([part for record in held for part in ranges[record]])
        assert ledger.page_bytes == len(expected) * PAGE_BYTES
