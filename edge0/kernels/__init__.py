"""Own CPU kernels in plain C, where MLX's are slow: on Linux, for 4-bit weights and few tokens at a time.

`library` finds what was built and says which variant runs and why; `choice` whether it is used; `runner` holds an
engine's threads; `modules` and `layers` take the places of leaf modules and layers of mlx-lm's model, which `swap` puts
them in. Removable: without a library MLX computes everything.
"""
