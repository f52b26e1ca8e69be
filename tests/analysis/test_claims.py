"""claims.yaml: the paper's own file, digits as they were written, and every refusal."""

from pathlib import Path

import pytest

from analysis.paper.claims import Stated, load_claims

CLAIMS = Path(__file__).parents[2] / "results" / "paper" / "claims.yaml"
GOOD = "id: a, value: 1, unit: u, kind: exact, where: w, experiment: e"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("claims: [", "not YAML"),
        ("- a list", "expected a mapping with a list 'claims'"),
        ("claims: [{id: a, value: 1}]", "claim a lacks unit, kind, where, experiment"),
        ("claims: [{value: 1}]", "claim number 1 lacks id"),
        ("claims: [just text]", "claim number 1 is not a mapping (found str)"),
        ("claims: [{id: a, value: 1, unit: u, kind: wish, where: w, experiment: e}]", "claim a has kind 'wish'"),
        (f"claims:\n  - {{{GOOD}}}\n  - {{{GOOD}}}\n", "claim a is stated twice"),
        (f"claims: [{{{GOOD}, machin: m}}]", "claim a has an unknown key 'machin' (did you mean machine?)"),
        (
            "claims: [{id: a, value: 1, unit: tok/s, warm, kind: exact, where: w, experiment: e}]",
            "claim a has an unknown key 'warm' (a unit with a comma must be quoted)",
        ),
        ("claims: [{id: a, value: 1, unit: 3, kind: exact, where: w, experiment: e}]", "claim a: unit must be text"),
    ],
)
def test_bad_claims_are_refused_in_one_line(tmp_path, text, reason):
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_claims(path)
    assert str(caught.value).startswith(f"{path}: ") and reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="absent.yaml: cannot be read"):
        load_claims(tmp_path / "absent.yaml")


def test_the_papers_claims_load_and_keep_their_digits():
    claims = load_claims(CLAIMS)
    assert claims.by_id["tab3.k8"].value == [1.8, 3.3]
    assert claims.machine_name(claims.by_id["tab3.gain"]) == "MacBook M2, 16 GB"
    assert claims.machine_name(claims.by_id["tab3.order_k"]) == ""
    low, _ = claims.by_id["tab3.gain"].value
    assert isinstance(low, Stated) and (str(low), low, low.decimals) == ("1.80", 1.8, 2)
