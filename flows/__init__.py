"""Stage order, fan-out and parameters: Prefect flows and the `daybreak` command."""
