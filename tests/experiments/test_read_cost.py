"""Cold experts by both ways of reading: every pair has one sample of each, and both were cold."""

from experiments.read_cost import COLD_SHARE, measure


def test_a_run_in_small(unit_35b):
    rows, window = measure(unit_35b, k=3, pairs=2, threads=2, seed=0)
    assert rows.groupby("pair")["way"].apply(list).tolist() == [["pread", "mmap"], ["mmap", "pread"]]
    assert (rows.groupby("pair")["layer"].nunique() == 1).all() and (rows["experts"] == 3).all()
    assert (rows["cold_share"] >= COLD_SHARE).all() and (rows["ns"] > 0).all()
    assert window in ("as-is", "lowered", "random")
