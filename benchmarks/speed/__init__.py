"""One module per speed benchmark. `run(options)` yields rows; the first line of the docstring describes it."""
