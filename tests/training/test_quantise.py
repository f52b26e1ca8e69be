"""A trained model as a checkpoint: the engine loads it, and weights come back within half a step of the grid."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from reference import dequantise, engine_logits, relative_l2, stock_logits, stock_model

from edge0 import Engine, EngineOptions, find_tier, models
from edge0.checkpoint.quantise import write_checkpoint
from edge0.checkpoint.verify import verify_files
from edge0.errors import ErrorKind
from edge0.training.teacher import config_of


@pytest.fixture(scope="module", params=["unit-35b", "unit-8b"])
def made(request, tmp_path_factory):
    """A model with random fp32 weights, and its checkpoint."""
    tier, folder = find_tier(request.param), tmp_path_factory.mktemp("made") / "model"
    mx.random.seed(0)
    model = models.build(config_of(tier, folder), folder, streamed=False)
    weights = {name: value.astype(mx.float32) for name, value in tree_flatten(model.parameters())}
    write_checkpoint(tier, folder, weights, {"source": "a test"}, phrases=("a phrase",))
    return folder, weights


def test_the_engine_serves_it_as_stock_mlx_lm_does(made):
    folder, _ = made
    with Engine(folder, EngineOptions(k=8, prerouter="off", lora=False)) as engine:
        logits = engine_logits(engine)
    assert relative_l2(logits, stock_logits(stock_model(folder, 8))) < 1e-5


def test_weights_come_back_within_half_a_step(made):
    folder, weights = made
    back = dict(tree_flatten(dequantise(stock_model(folder, 8)).parameters()))
    assert back.keys() == weights.keys()
    for name, value in weights.items():
        left, right = np.array(value), np.array(back[name])
        spread = np.ptp(left, axis=-1, keepdims=True) if left.ndim > 1 else np.abs(left)
        assert (np.abs(left - right) <= 0.05 * spread + 1e-2).all(), name


def test_its_tokenizer_has_the_phrases_and_its_files_verify(made):
    folder, _ = made
    from edge0.tokens import load_tokenizer

    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("xa phrasey")) == 3
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a phrase"}], add_generation_prompt=True)
    assert not verify_files(folder).problems


def test_nothing_is_overwritten_and_an_absent_weight_is_named(made, tmp_path, refused):
    folder, weights = made
    tier = find_tier("unit-35b" if "language_model" in next(iter(weights)) else "unit-8b")
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: write_checkpoint(tier, folder, weights, {}), folder)
    less = {name: value for name, value in weights.items() if not name.endswith("norm.weight")}
    refused(ErrorKind.TENSOR_MISSING, lambda: write_checkpoint(tier, tmp_path / "m", less, {}), "norm.weight")
    assert list(tmp_path.iterdir()) == []
