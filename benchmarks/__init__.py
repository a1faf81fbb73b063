"""Benchmarks: `python -m benchmarks list` lists the tables, `python -m benchmarks render` writes them into the docs."""
