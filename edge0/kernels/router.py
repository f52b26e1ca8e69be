"""The routing laws by the kernels: ten small operations cost more than the few hundred scores that they work on.

The same choices and weights as `routing.Router`, to the last digits; the best expert is first.
"""

from __future__ import annotations

import ctypes

import numpy as np

from edge0.kernels.library import Routing
from edge0.kernels.runner import Kernels, address, floats
from edge0.lazy import Array
from edge0.routing import Router


class KernelRouter:
    """What a `Router` does, to arrays of numpy."""

    def __init__(self, router: Router, kernels: Kernels):
        self._k, self._kernels = router.k, kernels
        groups = 0 if router.law == "softmax" else router.groups
        self._law = ctypes.pointer(Routing(router.k, groups, router.groups_kept, router.scale))

    def __call__(
        self, logits: Array, bias: np.ndarray | None = None, forced: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        values = floats(logits)
        *shape, experts = values.shape
        if forced is None:
            ids = np.empty((*shape, self._k), np.uint32)
        else:
            ids = np.ascontiguousarray(forced, np.uint32).reshape(*shape, self._k)
        weights = np.empty(ids.shape, np.float32)
        self._kernels.run(
            "edge0_route",
            self._law,
            address(values),
            None if bias is None else address(bias),
            values.size // experts,
            experts,
            int(forced is not None),
            address(ids),
            address(weights),
        )
        return ids, weights
