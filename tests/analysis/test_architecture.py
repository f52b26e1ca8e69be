"""The exact claims: each answered, each judged by the room that its own rounding leaves."""

import pytest
from released_counts import CLAIMS, write_counts

from analysis.paper import architecture
from analysis.paper.claims import load_claims
from analysis.paper.findings import Status


def judged(tmp_path, change=None):
    document = architecture.load_counts(write_counts(tmp_path / "counts.json", change))
    return {finding.claim.id: finding for finding in architecture.findings(document, load_claims(CLAIMS))}


def test_every_exact_claim_of_the_shapes_comes_out(tmp_path):
    found = judged(tmp_path)
    wanted = {name for name in load_claims(CLAIMS).by_id if name.startswith("arch.")} | {"staged.stack_tensors"}
    assert set(found) == wanted
    rounded = ("disk", "adapters_disk", "lora_disk", "active")
    for name, finding in found.items():
        expected = Status.WITHIN if name.split(".")[-1] in rounded else Status.REPRODUCED
        assert finding.status is expected, name
    assert found["arch.35b.disk"].ours == "19.5088" and "0.05" in found["arch.35b.disk"].why
    assert found["arch.8b.active"].ours == "1.1403" and found["arch.35b.active"].ours == "2.94643"
    assert "with heads and LoRA 3.04" in found["arch.35b.active"].why


@pytest.mark.parametrize(
    ("claim", "key", "value", "status"),
    [
        ("arch.35b.layers", "layers", 41, Status.DIFFERS),
        ("arch.35b.disk", "base_bytes", 19_549_000_000, Status.WITHIN),
        ("arch.35b.disk", "base_bytes", 19_551_000_000, Status.DIFFERS),
        ("arch.35b.lora_disk", "lora_bytes", 42_510_000, Status.DIFFERS),
        ("arch.35b.head_input", "head_input", 2304, Status.DIFFERS),
        ("staged.stack_tensors", "stack_tensors", 6, Status.DIFFERS),
        ("arch.lora", "lora_rank", 8, Status.DIFFERS),
    ],
)
def test_what_does_not_come_out_says_so(tmp_path, claim, key, value, status):
    def change(document):
        document["released"]["35b"][key] = value

    assert judged(tmp_path, change)[claim].status is status


def test_every_count_says_what_it_rests_on(tmp_path):
    """Our own constants agree with the paper because they were taken from it: only files are evidence beside them."""

    def released(document):
        document["released"]["35b"]["source"] = "files of edge0-35b"

    shapes = "counted from edge0's shape constants; a released checkpoint given with model= is counted from its files"
    assert all(finding.why.startswith(shapes) for finding in judged(tmp_path).values())
    found = judged(tmp_path, released)
    assert found["arch.35b.disk"].why.startswith("counted from the files of edge0-35b")
    assert found["arch.8b.disk"].why.startswith(shapes)
    assert found["arch.lora"].why == f"counted from the files of edge0-35b; {shapes}; both models"


def test_about_is_five_per_cent(tmp_path):
    def change(document):
        document["released"]["8b"]["active"]["always"] -= 5_000_000

    finding = judged(tmp_path, change)["arch.8b.active"]
    assert finding.status is Status.DIFFERS and "5% are allowed" in finding.why


def test_the_room_of_a_stated_number_is_half_of_its_last_digit():
    assert [architecture.half_unit(value) for value in (19.5, 0.2, 42)] == [0.05, 0.05, 0.5]


def test_a_document_that_lacks_a_model_is_refused(tmp_path):
    path = write_counts(tmp_path / "counts.json", lambda document: document["released"].pop("8b"))
    with pytest.raises(ValueError, match=r"counts\.json: expected the counts of the released models 35b and 8b"):
        architecture.load_counts(path)
