"""What is trained and recorded: the command `edge0 train`, and the ladder of quality; training is edge0's own."""
