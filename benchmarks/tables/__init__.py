"""One module per table. `JOBS` declares what is run and measured; the first line of the docstring describes it."""
