"""`edge0 doctor`: what a machine is, what it can do, and its file under experiments/machines."""
