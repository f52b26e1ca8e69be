"""The paper against itself: what it contradicts today, and that each check notices a number that cannot stand."""

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.paper import source_checks
from analysis.paper.claims import Claims, Stated, load_claims
from analysis.paper.findings import Status
from analysis.paper.source_checks import KINDS, findings, notes, run_checks, table
from analysis.paper.source_paper import Outcome

CLAIMS = Path(__file__).parents[2] / "results" / "paper" / "claims.yaml"


@pytest.fixture(scope="module")
def claims() -> Claims:
    return load_claims(CLAIMS)


def changed(claims: Claims, **values) -> Claims:
    """The claims with other values: `tab3__k8="..."` for tab3.k8, numbers with their digits as text."""
    by_id = dict(claims.by_id)
    for name, value in values.items():
        claim = name.replace("__", ".")
        number = [Stated(n) if isinstance(n, str) else n for n in value] if isinstance(value, list) else value
        by_id[claim] = replace(by_id[claim], value=Stated(number) if isinstance(number, str) else number)
    return Claims(by_id, claims.machines)


def contradicted(claims: Claims) -> set[str]:
    return {finding.claim.id for finding in findings(claims)}


TODAY = {"tab4.loads.k8"}
NOTED = {"tab3.blocked.k8", "tab4.k2.ondemand", "tab4.k4.ondemand", "tab4.k8.ondemand"}


def test_what_no_rounding_repairs(claims):
    (finding,) = findings(claims)
    assert {finding.claim.id} == TODAY and finding.status is Status.CONTRADICTED
    assert "397 and 89 loads" in finding.why and "at most 320 experts, if a load brings one routed" in finding.why


def test_what_means_or_a_copy_may_repair_is_a_note(claims):
    found = notes(claims)
    assert set(found) == NOTED
    (loads,), (wait,) = found["tab4.k8.ondemand"], found["tab3.blocked.k8"]
    assert "390.3 to 403.0 loads per step, but a step routes to no more than 320 experts" in loads
    assert "longer than the whole step of 540.5 to 571.4 ms" in wait and "third-party copy" in wait


def test_numbers_that_fit_are_not_contradicted(claims):
    repaired = changed(
        claims,
        tab4__k2__ondemand=["0.41", "0.20", "30.4"],
        tab4__k4__ondemand=["0.37", "0.17", "50.9"],
        tab4__k8__ondemand=["0.42", "0.20", "126.9"],
        tab3__blocked__k8=["475.0", "211.6"],
        tab4__loads__k8=[302, 89],
    )
    assert not contradicted(repaired) and not NOTED & set(notes(repaired))


def test_fewer_digits_hide_what_more_digits_show(claims):
    """At 0.3 MiB per load a step may hold 363 to 508 loads: 320 is out of reach. At 0.4 it is not."""
    assert "tab4.k8.ondemand" in notes(changed(claims, tab4__k8__ondemand=["0.3", "0.20", "126.9"]))
    assert "tab4.k8.ondemand" not in notes(changed(claims, tab4__k8__ondemand=["0.4", "0.20", "126.9"]))


WRONG = [
    ("tab3.gain", {"tab3__k2": ["4.8", "9.6"]}),
    ("tab3.order_k", {"tab3__k4": ["1.5", "2.7"]}),
    ("tab2.35b.gap", {"tab2__35b__gap": "4.2"}),
    ("tab2.8b.gap", {"tab2__8b__mmlu_pro": ["60.1", "65.8"]}),
    ("tab2.reasoning_gap", {"tab2__35b__gpqa_diamond": ["60.8", "81.8"]}),
    ("resident.ratio", {"resident__decode": "2.9"}),
    ("resident.memory", {"resident__memory": "19.5"}),
    ("mem.price_k8", {"mem__price_k8": ["1.53", "-1.15"]}),
    ("tab4.shape", {"tab4__k4__prerouter": ["1.32", "0.84", "50.9"]}),
    ("tab4.loads.k8", {"tab4__loads__k8": [397, 80]}),
    ("arch.35b.heads", {"arch__35b__heads": 32}),
    ("arch.8b.heads", {"arch__8b__predicted_layers": 15}),
    ("arch.35b.head_input", {"arch__35b__head_input": 2304}),
    ("arch.35b.adapters_disk", {"arch__35b__lora_disk": 142}),
    ("arch.35b.disk", {"arch__35b__disk": "17.5"}),
    ("staged.stack_tensors", {"staged__stack_tensors": 6}),
]


@pytest.mark.parametrize(("claim", "values"), WRONG, ids=[claim for claim, _ in WRONG])
def test_every_check_notices_a_wrong_number(claims, claim, values):
    if claim not in TODAY:
        assert claim not in contradicted(claims)
    checks = [check for check in run_checks(changed(claims, **values)) if check.outcome is Outcome.CONTRADICTED]
    before = {check.what for check in run_checks(claims) if check.outcome is Outcome.CONTRADICTED}
    assert any(claim in check.against and check.what not in before for check in checks)


@pytest.mark.parametrize(
    ("claim", "values"),
    [
        ("tab3.blocked.k2", {"tab3__blocked__k2": ["254.9", "46.5"]}),
        ("fit.residual_all", {"fit__residual_all": "0.03"}),
        ("fit.residual_prerouter", {"fit__slope": "1.83"}),
    ],
)
def test_what_does_not_fit_is_noted(claims, claim, values):
    assert claim not in notes(claims) and claim in notes(changed(claims, **values))


def test_every_claim_of_a_check_exists_and_contradictions_name_one(claims):
    for check in run_checks(claims):
        assert set(check.claims) | set(check.against) <= set(claims.by_id)
        assert check.outcome is not Outcome.CONTRADICTED or check.against
        assert check.found and check.what


def test_the_table_puts_contradictions_first_and_the_command_prints_it(claims, capsys):
    assert source_checks.main(["--claims", str(CLAIMS)]) == 0
    printed = capsys.readouterr().out
    assert printed == table(claims) + "\n"
    cells = [line.removeprefix("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")][2:]
    assert {row[1] for row in cells} == {"arithmetic", "consistency", "beside"} and printed.endswith(KINDS + "\n")
    rows = [row[0] for row in cells]
    assert rows == sorted(rows, key=["contradicted", "note", "agrees"].index)


def test_a_claim_that_is_missing_is_one_line(claims, tmp_path, capsys):
    short = Claims({key: claim for key, claim in claims.by_id.items() if key != "tab3.k2"}, claims.machines)
    with pytest.raises(ValueError, match="tab3.k2"):
        run_checks(short)
    assert source_checks.main(["--claims", str(tmp_path / "absent.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
