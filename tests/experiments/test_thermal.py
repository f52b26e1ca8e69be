"""What Linux files and macOS commands say of heat and power, from samples."""

import pytest

from experiments.host import thermal

THERM_QUIET = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
THERM_LIMITED = """2026-01-01 10:00:00 +0100 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 62
"""
BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=1234567)\t83%; discharging; 5:12 remaining present: true
"""
MAINS = "Now drawing from 'AC Power'\n -InternalBattery-0 (id=1234567)\t100%; charged; 0:00 remaining present: true\n"
SETTINGS = "System-wide power settings:\nCurrently in use:\n standby              1\n lowpowermode         {}\n"


@pytest.mark.parametrize(
    ("text", "limited", "speed"),
    [
        (THERM_QUIET, False, None),
        (THERM_LIMITED, True, 62),
        (THERM_LIMITED.replace("62", "100"), False, 100),
        (THERM_QUIET.replace("No thermal warning level has been recorded", "thermal warning level = 2"), True, None),
        ("", None, None),
    ],
)
def test_thermal_limits_of_macos(text, limited, speed):
    assert thermal.parse_pmset_therm(text) == {"limited": limited, "speed_limit_percent": speed}


def test_a_command_that_is_not_there_is_unknown():
    assert thermal.parse_pmset_therm(None) == {}
    assert thermal.parse_pmset_batt(None) == {"on_battery": None, "battery_percent": None}
    assert thermal.parse_pmset_settings(None) == {"low_power_mode": None}
    assert thermal._output("no-such-command-of-ours") is None


def test_battery_of_macos_without_its_id():
    assert thermal.parse_pmset_batt(BATTERY) == {"on_battery": True, "battery_percent": 83}
    assert thermal.parse_pmset_batt(MAINS) == {"on_battery": False, "battery_percent": 100}
    desktop = thermal.parse_pmset_batt("Now drawing from 'AC Power'\n")
    assert desktop == {"on_battery": False, "battery_percent": None}


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False)])
def test_low_power_mode_of_macos(value, on):
    assert thermal.parse_pmset_settings(SETTINGS.format(value)) == {"low_power_mode": on}


@pytest.fixture
def system(tmp_path):
    """A function that writes files of a /sys of one's own, by path."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return write


def test_the_hottest_zone_of_linux(system):
    sys = system(
        class__thermal__thermal_zone0__temp=41000,
        class__thermal__thermal_zone0__type="acpitz",
        class__thermal__thermal_zone1__temp=73500,
        class__thermal__thermal_zone1__type="x86_pkg_temp",
        class__thermal__thermal_zone2__temp="",
    )
    assert thermal._hottest_zone(sys) == {"hottest_c": 73.5, "zone": "x86_pkg_temp"}


@pytest.mark.parametrize(("online", "on_battery"), [(1, False), (0, True)])
def test_power_supplies_of_linux(system, online, on_battery):
    sys = system(
        class__power_supply__AC__type="Mains",
        class__power_supply__AC__online=online,
        class__power_supply__BAT0__type="Battery",
        class__power_supply__BAT0__capacity=57,
        class__power_supply__mouse__type="Battery",
        class__power_supply__mouse__scope="Device",
        class__power_supply__mouse__capacity=9,
    )
    assert thermal._supplies(sys) == {"on_battery": on_battery, "battery_percent": 57}


def test_a_machine_without_a_battery(system):
    mains = {"class__power_supply__AC__type": "Mains", "class__power_supply__AC__online": 1}
    assert thermal._supplies(system(**mains)) == {"on_battery": False, "battery_percent": None}


@pytest.mark.parametrize(
    ("files", "boost"),
    [({"cpufreq__boost": 1}, True), ({"intel_pstate__no_turbo": 1}, False), ({"intel_pstate__no_turbo": 0}, True)],
)
def test_frequencies_of_linux(system, files, boost):
    cpu = "devices__system__cpu__"
    sys = system(
        **{
            f"{cpu}cpu0__cpufreq__scaling_cur_freq": 1_800_000,
            f"{cpu}cpu0__cpufreq__cpuinfo_max_freq": 4_200_000,
            f"{cpu}cpu0__cpufreq__scaling_governor": "powersave",
        },
        **{cpu + name: value for name, value in files.items()},
    )
    expected = {"governor": "powersave", "frequency_mhz": 1800, "max_frequency_mhz": 4200, "boost": boost}
    assert thermal._frequency(sys) == expected


def test_a_system_that_tells_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(thermal.sys, "platform", "linux")
    assert set(thermal.thermal_state(tmp_path).values()) == {None}
    assert set(thermal.power_state(tmp_path).values()) == {None}


def test_macos_asks_pmset(tmp_path, monkeypatch):
    said = {("pmset", "-g", "therm"): THERM_LIMITED, ("pmset", "-g", "batt"): BATTERY, ("pmset", "-g"): SETTINGS}
    monkeypatch.setattr(thermal.sys, "platform", "darwin")
    monkeypatch.setattr(thermal, "_output", lambda *command: said[command].format(1))
    assert thermal.thermal_state(tmp_path)["limited"] is True
    power = thermal.power_state(tmp_path)
    assert (power["on_battery"], power["low_power_mode"], power["governor"]) == (True, True, None)
