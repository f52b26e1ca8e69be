"""Own CPU kernels in plain C, where MLX's are slow: on Linux, for 4-bit weights and few tokens at a time.

`library` finds what was built and says which variant runs and why; `runner` holds an engine's threads; the other modules
take the place of leaf modules and layers of mlx-lm's model. Removable: without a library MLX computes everything.
"""
