"""Throughput, estimates, descriptions, traces and the watchdog of a run."""
