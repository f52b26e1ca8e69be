"""Other engines as arms of a session: their library, built on demand, and their files, made from our checkpoint."""
