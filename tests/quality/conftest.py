"""Stand-ins of a few questions, and a model that was never trained: its kept file and its int4 checkpoint."""

import mlx.core as mx
import pytest

from edge0 import find_tier, models
from edge0.training import teacher
from edge0.training.student import Student
from experiments.quality.data import DataRoot
from experiments.quality.standin import write_stand_ins

QUESTIONS = 8


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory):
    """A data root, shared: never write there."""
    root = tmp_path_factory.mktemp("stand-ins")
    write_stand_ins(root, QUESTIONS, seed=3)
    return DataRoot.open(root)


@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    """(checkpoint, kept bf16 file) of a tiny tier with random weights."""
    root = tmp_path_factory.mktemp("untrained")
    tier = find_tier("tiny-35b")
    folder = root / "vocabulary"
    teacher.vocabulary_in(folder)
    config = teacher.config_of(tier, folder)
    mx.random.seed(0)
    student = Student.of(models.build(config, folder, streamed=False), config, teacher.TEACHER_K)
    kept = root / "original.safetensors"
    teacher.keep(student, kept, tier, 0, folder)
    return teacher.write(kept, root / tier.name), kept
