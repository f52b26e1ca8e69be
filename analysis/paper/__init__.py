"""The paper's claims, what each target finds of them, and the ledger that collects it: the target `claims`."""
