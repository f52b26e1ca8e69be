"""One module per command: its words, its arguments, and what it does. None of them imports MLX before it is run."""
