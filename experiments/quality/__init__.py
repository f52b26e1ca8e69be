"""Quality: five public benchmarks through OpenCompass, an int4 checkpoint as it is served against its original.

What is run and what is written down, question by question; what it means is said in `analysis`. OpenCompass lives in an
environment of its own (`.venv-quality`), and only `model`, `scoring` and `run` import it.
"""
