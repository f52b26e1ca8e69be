"""Page-cache budgets: who keeps one, how each is tried first, and whether two of them agree."""
