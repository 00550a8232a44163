"""Measuring the kernels of a spec against a copy, torch and other libraries, on a CUDA GPU.

`cases` (what is measured, and its bytes) and `report` (JSON, CSV, tables, plots) need no torch; `measure`, `providers`,
`latency`, `profile` and `run` do. The compiler imports none of them.
"""
