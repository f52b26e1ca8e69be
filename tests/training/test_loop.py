"""The loop: an interrupted run goes on to the same bits, another run's folder is refused, a diverged one is told."""

import mlx.core as mx
import numpy as np
import pandas as pd
import pytest

from edge0.errors import ErrorKind
from edge0.training import files
from edge0.training.loop import Run
from edge0.training.schedule import Schedule

SCHEDULE = Schedule(steps=12, batch=4, learning_rate=1e-2, warmup=3, accumulate=2, save_every=4)


def start():
    return {"layers.0.a": mx.ones((3,)), "list": [mx.zeros((2, 3)), mx.ones((2,))]}


def batches(step, part):
    rng = np.random.default_rng([step, part])
    return mx.array(rng.normal(size=(4, 3)), mx.float32)


def loss(trained, x):
    y = x * trained["layers.0.a"] @ trained["list"][0].T + trained["list"][1]
    return (y - x[:, :2]).square().mean(), {"size": y.square().mean()}


def begin(folder, schedule=SCHEDULE, seed=0):
    return Run(folder, schedule, start, {"seed": seed})


class Interrupted(BaseException):
    pass


def told_to_end(run, step):
    """As by a signal: the watch raises after that step."""

    def watch(done, _):
        if done == step:
            raise Interrupted

    run.advance(loss, batches, watch, look)


def killed(run, step):
    """While that step is computed."""

    def dying(step_now, part):
        if step_now == step:
            raise Interrupted
        return batches(step_now, part)

    run.advance(loss, dying, look=look)


def look(run):
    return {"seen": float(run.trained["layers.0.a"].sum())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = begin(tmp_path_factory.mktemp("whole"))
    run.advance(loss, batches, look=look)
    return run


@pytest.mark.parametrize(
    ("end", "step", "kept"), [(killed, 7, 4), *((told_to_end, step, step) for step in (1, 4, 7, 11, 12))]
)
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, whole, end, step, kept):
    with pytest.raises(Interrupted):
        end(begin(tmp_path), step)
    again = begin(tmp_path)
    assert again.step == len(again.rows) == kept
    again.advance(loss, batches, look=look)
    for left, right in ((whole.trained["layers.0.a"], again.trained["layers.0.a"]),
                        *zip(whole.trained["list"], again.trained["list"], strict=True)):  # fmt: skip
        assert np.array(left).tobytes() == np.array(right).tobytes()
    assert (tmp_path / "losses.jsonl").read_bytes() == (whole.folder / "losses.jsonl").read_bytes()
    assert begin(tmp_path).step == 12


def test_there_is_a_row_for_each_step_and_a_look_where_it_is_saved(whole):
    table = pd.read_json(whole.folder / "losses.jsonl", lines=True)
    assert list(table["step"]) == list(range(12)) and {"rate", "gradient_norm", "size"} <= set(table)
    assert list(table["step"][table["seen"].notna()]) == [3, 7, 11]
    assert table["loss"].iloc[-1] < table["loss"].iloc[0]


def test_a_place_that_cannot_be_written_is_named(tmp_path, refused, monkeypatch):
    (tmp_path / "file").write_text("")
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: begin(tmp_path / "file" / "run"), tmp_path / "file" / "run")
    state = tmp_path / "run" / "state.safetensors"
    run = begin(tmp_path / "run")
    run.advance(loss, batches, stop=lambda rows: len(rows) == 4)
    kept = state.read_bytes()
    save = files.mx.save_safetensors

    def full(path, *given):
        """A disk without space left: MLX says nothing."""
        save(path, *given)
        with open(path, "r+b") as file:
            file.truncate(len(kept) - 8)

    monkeypatch.setattr(files.mx, "save_safetensors", full)
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: run.advance(loss, batches), state, "not written whole", "free some")
    assert state.read_bytes() == kept and [path.name for path in state.parent.glob("*state*")] == [state.name]


def test_the_folder_of_another_run_is_refused(tmp_path, refused):
    begin(tmp_path).advance(loss, batches)
    refused(ErrorKind.TRAINING_MISMATCH, lambda: begin(tmp_path, seed=1), tmp_path, "remove this one")


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_state_before_it(tmp_path, refused):
    def broken(trained, x):
        value, told = loss(trained, x)
        return value * mx.array(float("nan")), told

    run = begin(tmp_path)
    run.advance(loss, batches, stop=lambda rows: len(rows) == 4)
    kept = (tmp_path / "state.safetensors").read_bytes()
    refused(ErrorKind.TRAINING_DIVERGED, lambda: begin(tmp_path).advance(broken, batches), "step 4", tmp_path)
    assert (tmp_path / "state.safetensors").read_bytes() == kept


def test_accumulated_micro_batches_are_one_large_batch(tmp_path):
    """Of two halves the mean gradient is the whole's."""

    def whole(step, part):
        return mx.concatenate([batches(step, 0), batches(step, 1)])

    parts = begin(tmp_path / "parts")
    parts.advance(loss, batches)
    one = Run(tmp_path / "one", Schedule(steps=12, batch=8, learning_rate=1e-2, warmup=3), start, {})
    one.advance(loss, whole)
    for name in ("layers.0.a",):
        np.testing.assert_allclose(np.array(parts.trained[name]), np.array(one.trained[name]), rtol=1e-5)


def test_the_rate_warms_up_and_falls_to_its_last_share():
    rates = [SCHEDULE.rate(step) for step in range(12)]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2]) and rates[3] == pytest.approx(1e-2)
    assert rates[3:] == sorted(rates[3:], reverse=True) and SCHEDULE.rate(12) == pytest.approx(1e-3)
