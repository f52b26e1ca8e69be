"""Heat and power of this machine, as far as it tells: what makes the same run fast now and slow in five minutes.

Linux: thermal zones, CPU frequency files, power supplies. macOS: `pmset`. What is not readable is None; guests and many
servers tell nothing at all. Does not judge: a session's own drift run says whether speed changed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_MILLI = 1000
_KHZ_PER_MHZ = 1000


def thermal_state(system: Path = Path("/sys")) -> dict[str, Any]:
    """`hottest_c` and its `zone`; on macOS `limited` (a thermal limit holds), `speed_limit_percent`. None: unknown."""
    state: dict[str, Any] = {"hottest_c": None, "zone": None, "limited": None, "speed_limit_percent": None}
    if sys.platform == "darwin":
        return state | parse_pmset_therm(_output("pmset", "-g", "therm"))
    return state | _hottest_zone(system)


def power_state(system: Path = Path("/sys")) -> dict[str, Any]:
    """`on_battery`, `battery_percent`, `low_power_mode`, and of the first core `governor`, `frequency_mhz`,
    `max_frequency_mhz`, `boost`; None: unknown."""
    keys = "on_battery battery_percent low_power_mode governor frequency_mhz max_frequency_mhz boost".split()
    state: dict[str, Any] = dict.fromkeys(keys)
    if sys.platform == "darwin":
        battery, settings = _output("pmset", "-g", "batt"), _output("pmset", "-g")
        return state | parse_pmset_batt(battery) | parse_pmset_settings(settings)
    return state | _supplies(system) | _frequency(system)


def parse_pmset_therm(text: str | None) -> dict[str, Any]:
    """Output of `pmset -g therm`: the CPU speed limit in per cent, and whether any limit or warning is in force."""
    if text is None:
        return {}
    limits = {key: int(value) for key, value in re.findall(r"^\s*(CPU_\w+)\s*=\s*(\d+)", text, re.MULTILINE)}
    speed, scheduler = limits.get("CPU_Speed_Limit"), limits.get("CPU_Scheduler_Limit")
    warned = [int(level) for level in re.findall(r"warning level\s*=\s*(\d+)", text, re.IGNORECASE)]
    told = [value < 100 for value in (speed, scheduler) if value is not None] + [level > 0 for level in warned]
    if not told and "No thermal warning level" in text:
        told = [False]
    return {"limited": any(told) if told else None, "speed_limit_percent": speed}


def parse_pmset_batt(text: str | None) -> dict[str, Any]:
    """Output of `pmset -g batt`: on battery or not, and its charge. The battery's id is not kept."""
    source = re.search(r"Now drawing from '([^']+)'", text or "")
    charge = re.search(r"(\d+)%", text or "")
    return {
        "on_battery": source.group(1) == "Battery Power" if source else None,
        "battery_percent": int(charge.group(1)) if charge else None,
    }


def parse_pmset_settings(text: str | None) -> dict[str, Any]:
    """Output of `pmset -g`: whether low power mode is on."""
    mode = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d)", text or "", re.MULTILINE)
    return {"low_power_mode": mode.group(1) == "1" if mode else None}


def _hottest_zone(system: Path) -> dict[str, Any]:
    zones = []
    for zone in (system / "class/thermal").glob("thermal_zone*"):
        degrees = _number(zone / "temp")
        if degrees is not None:
            zones.append((degrees / _MILLI, _text(zone / "type")))
    if not zones:
        return {}
    hottest, name = max(zones, key=lambda zone: zone[0])
    return {"hottest_c": hottest, "zone": name}


def _supplies(system: Path) -> dict[str, Any]:
    """On battery: a battery is there and no mains supply is online. A battery of a mouse is not this machine's."""
    mains, charge = [], None
    for supply in sorted((system / "class/power_supply").glob("*")):
        kind = _text(supply / "type")
        if kind == "Battery" and _text(supply / "scope") != "Device":
            charge = _number(supply / "capacity")
        elif kind in ("Mains", "USB"):
            mains.append(_number(supply / "online"))
    known = charge is not None or mains
    return {"on_battery": charge is not None and 1 not in mains if known else None, "battery_percent": charge}


def _frequency(system: Path) -> dict[str, Any]:
    cpu = system / "devices/system/cpu"
    now, most = (_number(cpu / "cpu0/cpufreq" / name) for name in ("scaling_cur_freq", "cpuinfo_max_freq"))
    boost, no_turbo = _number(cpu / "cpufreq/boost"), _number(cpu / "intel_pstate/no_turbo")
    if boost is None and no_turbo is not None:
        boost = 1 - no_turbo
    return {
        "governor": _text(cpu / "cpu0/cpufreq/scaling_governor"),
        "frequency_mhz": None if now is None else now // _KHZ_PER_MHZ,
        "max_frequency_mhz": None if most is None else most // _KHZ_PER_MHZ,
        "boost": None if boost is None else boost == 1,
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None
