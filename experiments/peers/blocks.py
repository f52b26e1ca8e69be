"""Weights of our checkpoints as numpy arrays, and as the blocks of 32 that llama.cpp's files hold.

A matrix is affine in groups of 64 here and in blocks of 32 there: Q4_1 (code x d + m) is the same thing written twice
as fine, exact wherever the bf16 scale is a half-precision number too. Q4_0 and Q8_0 have no offset, so they are
quantised anew. Knows nothing of names or of models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edge0.checkpoint.header import TensorEntry
from edge0.checkpoint.synth import from_bf16
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import GROUP_SIZE

BLOCK = 32  # weights of one block of Q4_0, Q4_1 and Q8_0


@dataclass(frozen=True)
class Affine:
    """A quantised matrix `[..., rows, columns]`: code x scale + bias, scale and bias fp32 for each 32 columns."""

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray
    bits: int

    @classmethod
    def of(cls, words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> Affine:
        """From the three tensors of a file: uint32 words, lowest code first, and a scale and a bias for each 64."""
        places = np.arange(0, 32, bits, dtype=np.uint32)
        codes = (words[..., None] >> places & np.uint32((1 << bits) - 1)).astype(np.uint8)
        finer = (np.repeat(each, GROUP_SIZE // BLOCK, axis=-1) for each in (scales, biases))
        return cls(codes.reshape(*words.shape[:-1], -1), *finer, bits)

    @property
    def values(self) -> np.ndarray:
        """The weights, fp32."""
        codes = self.codes.reshape(*self.scales.shape, BLOCK).astype(np.float32)
        return (codes * self.scales[..., None] + self.biases[..., None]).reshape(self.codes.shape)

    def rows(self, order: np.ndarray) -> Affine:
        parts = (each[..., order, :] for each in (self.codes, self.scales, self.biases))
        return Affine(*parts, self.bits)

    def stacked(self, count: int) -> Affine:
        """`[rows, columns]` as `[count, rows / count, columns]`."""
        parts = (each.reshape(count, -1, each.shape[-1]) for each in (self.codes, self.scales, self.biases))
        return Affine(*parts, self.bits)

    def columns(self, order: np.ndarray) -> Affine:
        """`order` must move whole blocks.

        Raises:
            Edge0Error: LAYOUT_MALFORMED for one that does not.
        """
        blocks = order.reshape(-1, BLOCK)
        if (blocks != blocks[:, :1] // BLOCK * BLOCK + np.arange(BLOCK)).any():
            detail = f"columns can only be moved by whole blocks of {BLOCK}"
            raise Edge0Error(ErrorKind.LAYOUT_MALFORMED, detail, found="heads of another size")
        moved = blocks[:, 0] // BLOCK
        return replace(
            self, codes=self.codes[..., order], scales=self.scales[..., moved], biases=self.biases[..., moved]
        )


def read(entry: TensorEntry) -> np.ndarray:
    """A tensor of a file: U32 as it is, floats as fp32."""
    kinds = {"U32": np.uint32, "BF16": np.uint16, "F16": np.float16, "F32": np.float32}
    stored = np.memmap(entry.path, kinds[entry.dtype], "r", entry.offset, entry.shape)
    if entry.dtype == "BF16":
        return from_bf16(stored)
    return np.array(stored if entry.dtype == "U32" else stored.astype(np.float32))


def q4_1(weights: Affine) -> np.ndarray:
    """The blocks of a 4-bit matrix, uint8 `[..., rows, blocks x 20]`: d and m as fp16, then the codes of the first 16
    columns in the low halves of 16 bytes, those of the last 16 in the high halves.

    Raises:
        Edge0Error: NUMERIC where a scale or bias is beyond what fp16 holds.
    """
    with np.errstate(over="ignore"):  # looked for below
        d, m = weights.scales.astype(np.float16), weights.biases.astype(np.float16)
    if not (np.isfinite(d).all() and np.isfinite(m).all()):
        raise Edge0Error(ErrorKind.NUMERIC, "a scale or bias is too large for fp16, which Q4_1 holds it in")
    low, high = np.split(weights.codes.reshape(*weights.scales.shape, BLOCK), 2, axis=-1)
    blocks = np.concatenate([d[..., None].view(np.uint8), m[..., None].view(np.uint8), low | high << 4], axis=-1)
    return blocks.reshape(*weights.codes.shape[:-1], -1)
