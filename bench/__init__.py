"""Measurements: `python -m stagewright.bench` runs them all, `python -m stagewright.bench.NAME` one of them."""
