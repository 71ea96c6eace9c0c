"""Prefect policy (retries, timeouts, tags, names) around one function of gr_core.stages each."""
