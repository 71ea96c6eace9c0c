"""The night's MLflow run, there while training goes on. Policy only; the body is gr_core.stages.projecting.begin.

A task, hence a thread: the signal that cancels a flow is met by the main thread, and must not hit MLflow as it makes its
database.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import projecting

announce = task(name="announce", task_run_name="announce", tags={"cpu"}, cache_policy=NO_CACHE)(projecting.begin)
