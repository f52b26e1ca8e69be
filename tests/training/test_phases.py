"""The phases on a small random checkpoint: each trains what it says and nothing else, and its files serve."""

import dataclasses
import functools
import shutil

import mlx.core as mx
import numpy as np
import pytest
from reference import PROMPT

from edge0 import Engine, EngineOptions
from edge0.errors import ErrorKind
from edge0.training import phases
from edge0.training.adapters import load_adapter, save_adapter
from edge0.training.corpus import Corpus, Sample
from edge0.training.sampling import answers
from edge0.training.schedule import Schedule
from edge0.training.scoring import quality, score, teacher_forced
from edge0.training.student import Student, warm_start

SCHEDULE = Schedule(steps=4, batch=4, learning_rate=5e-3, warmup=2, save_every=2)
K = 4


def samples(seed, count=8):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        asked, said = (rng.integers(0, 256, rng.integers(3, 6)).tolist() for _ in range(2))
        made.append(Sample((*asked, *said, 256), len(asked), str(asked)))
    return tuple(made)


@pytest.fixture
def task(tier, checkpoint, tmp_path):
    corpus = Corpus(tmp_path / "corpus.jsonl", samples(0), "digest", 0)
    student = Student(checkpoint, K, tier.owners)
    return phases.Task(student, corpus, samples(1), tmp_path / "run", 0, SCHEDULE)


@pytest.fixture
def untrained(task, tier):
    return warm_start(task.student, tier.owners, tier.head_hidden, 0)


def test_untrained_heads_are_the_next_router_on_this_layers_input(task, untrained):
    student = task.student
    owner = student.executor.owners[1]
    student.forward(mx.array([PROMPT]), mx.array([[5]]), untrained)
    seen = student.executor.seen[owner]
    expected = student.blocks[owner + 1].logits(seen.x)
    np.testing.assert_allclose(np.array(student.executor.head_logits[owner]), np.array(expected), atol=1e-4)


def test_phase_1_comes_nearer_to_the_routers_and_leaves_the_base_alone(task, tier):
    before = np.array(task.student.blocks[tier.owners[0]].gate.weight)
    longer = dataclasses.replace(SCHEDULE, steps=15, save_every=15)
    heads, run = phases.train_heads(dataclasses.replace(task, schedule=longer), 16)
    assert np.mean([row["loss"] for row in run.rows[-3:]]) < 0.8 * run.rows[0]["loss"]
    assert {name.split(".")[1] for name in heads} == {str(owner) for owner in tier.owners}
    assert heads[f"layers.{tier.owners[0]}.fc1.weight"].shape[0] == 16
    assert np.array(task.student.blocks[tier.owners[0]].gate.weight).tobytes() == before.tobytes()
    _, recall = teacher_forced(task.student, task.corpus.samples, heads, None, 256)
    assert set(recall) == set(task.student.executor.predicted) and all(0 <= share <= 1 for share in recall.values())


def test_phase_1_ends_when_held_out_recall_has_not_grown(task):
    still = dataclasses.replace(task, schedule=Schedule(steps=9, batch=2, learning_rate=0.0, save_every=1))
    _, run = phases.train_heads(still, 16)
    assert run.step == phases.PATIENCE + 1


def test_phase_2_trains_the_lora_alone_on_the_students_path(task, untrained):
    kept = {name: np.array(value) for name, value in untrained.items()}
    lora, run = phases.train_lora(task, untrained)
    assert all(name.endswith((".lora_A", ".lora_B")) for name in lora)
    assert all(float(mx.abs(value).max()) > 0 for name, value in lora.items() if name.endswith("lora_B"))
    assert all(np.array(untrained[name]).tobytes() == value.tobytes() for name, value in kept.items())
    assert any((np.array(seen.indices) != np.array(seen.native)).any() for seen in task.student.executor.seen.values())
    native, _ = phases.train_lora(dataclasses.replace(task, folder=task.folder / "native"), None)
    assert any((np.array(native[name]) != np.array(lora[name])).any() for name in lora)
    assert run.rows[-1]["loss"] < run.rows[0]["loss"]


def test_an_untrained_lora_changes_nothing(task, untrained):
    plain = np.array(task.student.forward(mx.array([PROMPT]), mx.array([[5]]), untrained))
    task.student.use_lora()
    fresh = phases.fresh_lora(task.student.config, 3)
    corrected = task.student.forward(mx.array([PROMPT]), mx.array([[5]]), untrained, fresh)
    assert np.array(corrected).tobytes() == plain.tobytes()


def test_joint_training_returns_both_files(task, untrained):
    both, _ = phases.train_lora(task, untrained, jointly=True)
    assert set(untrained) < set(both)
    assert any((np.array(both[name]) != np.array(value)).any() for name, value in untrained.items())


def test_phase_3_learns_from_its_own_text(task, untrained, checkpoint):
    teacher = Student(checkpoint, 8)
    task = dataclasses.replace(task, schedule=dataclasses.replace(SCHEDULE, steps=2))
    lora, run = phases.train_on_policy(task, teacher, untrained, None, 6)
    assert len(run.rows) == 2 and all(row["loss"] >= -1e-5 for row in run.rows)
    again, _ = phases.train_on_policy(
        dataclasses.replace(task, folder=task.folder / "again"), teacher, untrained, None, 6
    )
    assert all(np.array(lora[name]).tobytes() == np.array(again[name]).tobytes() for name in lora)


def test_trained_files_serve_the_answers_that_were_scored(task, tier, checkpoint, copy_of):
    directory = copy_of(tier.name)
    shutil.rmtree(directory / "artifacts")
    task = dataclasses.replace(task, schedule=dataclasses.replace(SCHEDULE, steps=2), held=task.held[:5])
    heads, _ = phases.train_heads(task, tier.head_hidden)
    lora, _ = phases.train_lora(dataclasses.replace(task, folder=task.folder / "2"), heads)
    for kind, tensors in (("prerouter", heads), ("lora", lora)):
        save_adapter(directory, kind, K, tensors, tier.owners, "a test")
        loaded, _ = load_adapter(directory, kind, K)
        stored = phases.as_stored(tensors)
        assert all(np.array(loaded[name]).tobytes() == np.array(stored[name]).tobytes() for name in stored)
    scores, _ = score(task.student, task.held, phases.as_stored(heads), phases.as_stored(lora), 256)
    with Engine(directory, EngineOptions(k=K)) as engine:
        for sample, scored in zip(task.held, scores, strict=True):
            request = engine.new_request()
            logits, said = engine.prefill(request, list(sample.tokens[: sample.prompt_length])), []
            while len(said) < len(scored.answer):
                said.append(int(mx.argmax(logits).item()))
                logits = engine.step(request, said[-1])
            request.release()
            assert tuple(said) == scored.answer


def test_an_adapter_of_another_base_is_refused(task, tier, checkpoint, copy_of, tmp_path, refused):
    other = copy_of(tier.name)
    shutil.rmtree(other / "artifacts")
    heads = warm_start(task.student, tier.owners, tier.head_hidden, 0)
    path = save_adapter(other, "prerouter", K, heads, tier.owners, "a test", base=checkpoint)
    assert load_adapter(other, "prerouter", K)  # the same weights in another place are the same base
    shard = next(other.glob("model*.safetensors"))
    data = bytearray(shard.read_bytes())
    for place in range(8 + int.from_bytes(data[:8], "little"), len(data), 4099):
        data[place] ^= 1
    shard.write_bytes(bytes(data))
    for call in (lambda: load_adapter(other, "prerouter", K), lambda: Engine(other, EngineOptions(k=K, lora=False))):
        refused(ErrorKind.ADAPTER_MISMATCH, call, path, "base", "trained for another base")


def test_answers_of_many_prompt_lengths_come_in_their_order(task):
    prompts = [sample.tokens[: sample.prompt_length] for sample in task.held[:7]]
    together = answers(task.student, prompts, None, None, 5, 256)
    alone = [answers(task.student, [prompt], None, None, 5, 256)[0] for prompt in prompts]
    assert together == alone
    key = mx.random.key(1)
    drawn = [answers(task.student, prompts, None, None, 5, 256, key) for _ in range(2)]
    assert drawn[0] == drawn[1] != together


def test_quality_is_the_mean_of_what_the_ladder_scores(task, untrained):
    chats = tuple(dataclasses.replace(sample, messages=({"role": "user", "content": "?"},)) for sample in task.held[:5])
    cut = dataclasses.replace(chats[0], tokens=chats[0].tokens[: chats[0].prompt_length])
    said = answers(task.student, [cut.tokens], untrained, None, 3, -1)[0]
    right = dataclasses.replace(cut, tokens=(*cut.tokens, *said))
    samples = (right, *chats[1:], *task.held[5:8])
    found = quality(task.student, samples, untrained, None, -1)
    scores, recalls = score(task.student, samples, untrained, None, -1)
    assert found.cross_entropy == np.mean([one.cross_entropy for one in scores])
    assert found.recall == np.mean(list(recalls.values()))
    assert (found.samples, found.chats) == (8, 5)
    assert str(found).startswith(f"exact match {found.exact_match:.3f} of 5 chats, cross-entropy")
    assert quality(task.student, task.held[5:8], None, None, -1).exact_match is None


def test_a_released_adapter_is_not_replaced(untrained, tier, checkpoint, refused):
    save = functools.partial(save_adapter, checkpoint, "prerouter", K, untrained, tier.owners, "a test")
    refused(ErrorKind.OUTPUT_UNWRITABLE, save, "was not trained here", "--out")


def test_a_run_that_stopped_early_stays_there_and_one_that_was_killed_stops_there_too(task, monkeypatch):
    recalls = iter([0.3, 0.5, 0.5, 0.4, 0.6])
    monkeypatch.setattr(phases, "teacher_forced", lambda *_: ([], {1: next(recalls)}))
    task = dataclasses.replace(task, schedule=dataclasses.replace(SCHEDULE, steps=20))
    heads, run = phases.train_heads(task, 16)
    assert run.step == 8  # saved every two steps: nothing better than 0.5 in the last two looks
    again, same = phases.train_heads(task, 16)
    assert same.step == 8 and all(np.array(again[name]).tobytes() == np.array(heads[name]).tobytes() for name in heads)


def test_a_phase_goes_on_only_from_what_it_began_with(task, untrained, tier, copy_of, refused):
    phases.train_lora(task, untrained)
    others = {name: value + 0.1 for name, value in untrained.items()}
    refused(ErrorKind.TRAINING_MISMATCH, lambda: phases.train_lora(task, others), "another heads", task.folder)
    router = task.student.blocks[tier.owners[0]].gate
    router.weight = router.weight * 1.01  # another base of the same name
    refused(ErrorKind.TRAINING_MISMATCH, lambda: phases.train_lora(task, untrained), "another base", task.folder)


def test_the_teacher_is_part_of_what_phase_3_began_with(task, untrained, checkpoint, refused):
    teacher = Student(checkpoint, 8)
    task = dataclasses.replace(task, schedule=dataclasses.replace(SCHEDULE, steps=1))
    phases.train_on_policy(task, teacher, untrained, None, 4)
    gate = next(iter(teacher.blocks.values())).gate
    gate.weight = gate.weight * 1.01
    again = functools.partial(phases.train_on_policy, task, teacher, untrained, None, 4)
    refused(ErrorKind.TRAINING_MISMATCH, again, "another teacher")
