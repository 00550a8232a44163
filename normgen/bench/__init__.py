"""Measuring the kernels of a spec against a copy, torch and other libraries, on a CUDA GPU.

`cases` (what is measured, and its bytes), `report` (rows, JSON, CSV), `tables` and `plots` need no torch; `measure`,
`providers`, `latency`, `profile` and `run` do. The compiler imports none of them.
"""
