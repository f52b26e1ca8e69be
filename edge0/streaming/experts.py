"""The arithmetic of routed experts: a gated MLP over stacked quantised matrices, one gather per projection.

The operations and their order are those of mlx-lm's SwitchGLU, so that every path gives the resident model's bits.
Knows nothing of where the matrices lie: `stacks` may be a whole layer, the bank, or a stack made for one step.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu

from edge0.families import EXPERT_BITS, GROUP_SIZE
from edge0.lazy import as_mlx

SORT_FROM = 64  # indices from which SwitchGLU sorts; on Metal this chooses another kernel


def expert_mlp(x: mx.array, positions: mx.array | np.ndarray, stacks: Sequence[mx.array]) -> mx.array:
    """Apply K experts to each token (paper section 3.1).

    Args:
        x: `[..., D]` activations.
        positions: `[..., K]` uint32 rows of the stacks.
        stacks: nine arrays, gate, up, down, each weight, scales, biases; `[rows, out, in]` packed.

    Returns:
        `[..., K, D]`, unweighted.
    """
    positions = as_mlx(positions)
    gate, up, down = stacks[0:3], stacks[3:6], stacks[6:9]
    h = mx.expand_dims(x, (-2, -3))
    order, rows = None, positions
    if positions.size >= SORT_FROM:
        order = mx.argsort(positions.flatten())
        h, rows = h.flatten(0, -3)[order // positions.shape[-1]], positions.flatten()[order]

    def gather(value: mx.array, part: Sequence[mx.array]) -> mx.array:
        return mx.gather_qmm(
            value,
            *part,
            rhs_indices=rows,
            transpose=True,
            group_size=GROUP_SIZE,
            bits=EXPERT_BITS,
            sorted_indices=order is not None,
        )

    raised = gather(h, up)
    h = gather(swiglu(gather(h, gate), raised), down)
    if order is not None:
        h = mx.unflatten(h[mx.argsort(order)], 0, positions.shape)
    return h.squeeze(-2)
