"""Training in the open (paper sections 3.2, 3.3, 4): teachers, heads, recovery LoRA, on-policy.

Everything is sequence-parallel: a whole batch of sequences in one forward, predictions shifted by one position, pinned
to the engine's decode by a test. Sizes are no part of the code: two cores train the tiny tiers, and the released model
is a matter of memory and time.
"""
