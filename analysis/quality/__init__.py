"""Table 2: scores of benchmarks with intervals, paired differences, and whether the text is healthy."""
