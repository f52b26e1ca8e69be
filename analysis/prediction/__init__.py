"""Decode speed worked out from routes, load costs and simulated caches: `edge0 predict` and its target."""
