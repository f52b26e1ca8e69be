"""Serving over HTTP: what turns one engine into a small OpenAI-compatible server that one bad request cannot hurt.

From the inside out: `text` and `template` are words and ids, `completion` is one answer, `worker` is the thread that
owns the engine, `requests`, `prepare` and `replies` are what clients say and hear, `exchange` is one client waiting for
one answer, `app` is the routes, `server` the sockets and signals.
"""
