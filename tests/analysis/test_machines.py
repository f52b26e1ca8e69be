"""Machine files as the analysis reads them, and the finding of result folders."""

import re
from pathlib import Path

import pytest
import yaml

from analysis.machines import experiment_folders, known_machines, load_machine, only, read_table
from analysis.paper.claims import load_claims

ROOT = Path(__file__).parents[2]
FILES, SCHEMA = ROOT / "experiments/machines", ROOT / "experiments/machine.schema.yaml"
MINIMAL = {"id": "box", "name": "A box", "source": "reported", "ram_bytes": 8 << 30}


@pytest.fixture
def load(tmp_path):
    """A function that writes one machine file with changed values and loads it."""

    def call(name="box", which=None, **changes):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(MINIMAL | changes))
        return load_machine(which or name, tmp_path, SCHEMA)

    return call


def test_the_papers_machines_hold_what_the_claims_state():
    claims = load_claims(ROOT / "results/paper/claims.yaml").by_id
    for one in ("m2-16gb", "m4pro-24gb"):
        machine = load_machine(one, FILES, SCHEMA)
        serving = machine.serving
        assert machine.source == "paper"
        assert serving["load_a_ms"] == claims["fit.intercept"].value
        assert serving["load_b_ms"] == claims["fit.slope"].value
        assert serving["checkpoint_bytes"] == claims["arch.35b.disk"].value * 1e9
    stated = yaml.safe_load((ROOT / "results/paper/claims.yaml").read_text())["machines"]
    for one, entry in stated.items():
        machine = load_machine(one, FILES, SCHEMA)
        assert (machine.name, machine.values["ram_bytes"]) == (entry["name"], entry["ram_gb"] << 30)


def test_compute_of_the_m2_is_derived_from_its_prerouter_rows():
    claims = load_claims(ROOT / "results/paper/claims.yaml").by_id
    compute = load_machine("m2-16gb", FILES, SCHEMA).serving["compute_ms"]
    assert set(compute) == {"2", "4", "8"}
    for k, stated in compute.items():
        derived = 1000 / claims[f"tab3.k{k}"].value[1] - claims[f"tab3.blocked.k{k}"].value[1]
        assert stated == pytest.approx(derived, abs=0.06)
    # What the note says: the on-demand row of K=8 holds more waiting than its step is long.
    assert 1000 / claims["tab3.k8"].value[0] < claims["tab3.blocked.k8"].value[0]


def test_the_loads_of_the_m4_pro_are_another_machines():
    assert load_machine("m4pro-24gb", FILES, SCHEMA).serving["load_machine"] == "m2-16gb"
    assert "load_machine" not in load_machine("m2-16gb", FILES, SCHEMA).serving


def test_by_id_or_by_path(load, tmp_path):
    assert load().name == "A box"
    assert load_machine(tmp_path / "box.yaml", tmp_path / "elsewhere", SCHEMA).id == "box"
    assert load_machine(str(tmp_path / "box.yaml"), tmp_path / "elsewhere", SCHEMA).id == "box"
    assert load().serving == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ram_bytes": "16 GB"}, r"box.yaml: ram_bytes: '16 GB' is not of type 'integer'"),
        ({"serving": {"checkpoint_bytes": 1}}, r"box.yaml: serving: 'load_a_ms' is a required property"),
        (
            {"serving": {"checkpoint_bytes": 1, "load_a_ms": -1, "load_b_ms": 1, "load_source": "x"}},
            "serving.load_a_ms",
        ),
        ({"source": "guessed"}, "box.yaml: source: 'guessed' is not one of"),
        ({"source": "measured"}, "'os' is a required property"),
        ({"colour": "red"}, "Additional properties"),
        ({"id": "other"}, "box.yaml: id: expected 'box'.*found 'other'"),
        ({"storage": {"filesystem": "ext4"}}, "box.yaml: storage: 'device' is a required property"),
    ],
)
def test_a_malformed_file_names_file_and_key(load, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(**changes)
    assert "\n" not in str(caught.value)


def test_an_unknown_id_lists_the_known_ones(load, tmp_path):
    load("box")
    with pytest.raises(ValueError, match=r"nobox.yaml: no machine of that id; known: box$"):
        load_machine("nobox", tmp_path, SCHEMA)
    with pytest.raises(ValueError, match="elsewhere.yaml: no such machine file"):
        load_machine("some/elsewhere.yaml", tmp_path, SCHEMA)
    assert known_machines(tmp_path) == ["box"]


def test_what_is_no_yaml(load, tmp_path):
    (tmp_path / "broken.yaml").write_text("id: [")
    with pytest.raises(ValueError, match=r"broken.yaml: not YAML"):
        load_machine("broken", tmp_path, SCHEMA)


def test_facts_tell_what_is_known(load):
    assert load().facts() == "A box; 8 GiB of memory; reported, without raw rows"
    storage = {
        **dict.fromkeys(("read_ahead_kb", "max_sectors_kb", "scheduler")),
        **{"filesystem": "ext4", "device": "vda", "guest": True, "lower_cache": "suspected", "read_bytes": 1 << 20},
        "random_reads": [
            {"threads": 1, "mib_s": 100.0, "median_ms": 10.0},
            {"threads": 4, "mib_s": 350.0, "median_ms": 11.0},
        ],
    }
    facts = load(storage=storage, mlx={"version": "1.0", "device": "cpu"}).facts()
    assert "random reads of 1.00 MiB: 100 MiB/s with 1 and 350 MiB/s with 4 thread(s)" in facts
    assert '"guest-cold"' in facts and "ext4 on vda" in facts and "mlx 1.0, device cpu" in facts


def test_result_folders_are_those_with_a_summary(tmp_path):
    for tier, experiment, name in (("b", "tab3", "summary.csv"), ("a", "tab3", "summary.csv"), ("c", "tab3", "x.csv")):
        place = tmp_path / "box" / tier / experiment
        place.mkdir(parents=True)
        (place / name).touch()
    (tmp_path / "box" / "bench").mkdir()
    assert [path.parent.name for path in experiment_folders("box", "tab3", tmp_path)] == ["a", "b"]
    assert experiment_folders("nobox", "tab3", tmp_path) == []


def test_a_table_that_cannot_be_used(tmp_path):
    path = tmp_path / "summary.csv"
    path.write_text("k,session\n")
    for columns, message in ((["k"], "holds no row"), (["k", "arm"], "missing columns: arm")):
        with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {message}"):
            read_table(path, columns)
    path.write_text("")
    with pytest.raises(ValueError, match="not a readable table"):
        read_table(path, ["k"])


def test_values_that_differ_are_never_joined(tmp_path):
    path = tmp_path / "summary.csv"
    path.write_text("tier,session\nmini-35b,1\nshape-35b,1\n")
    rows = read_table(path, ["tier"])
    with pytest.raises(
        ValueError, match="tier: expected one value, found mini-35b, shape-35b; they are never put in one"
    ):
        only(rows, "tier", path)
    assert only(rows, "session", path) == "1"
    with pytest.raises(ValueError, match="session: expected 2, as its folder says; found 1"):
        only(rows, "session", path, "2")
