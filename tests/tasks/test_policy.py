"""Tasks are policy around one stage function each; only what is transient is retried."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest

from gr_core.errors import CommitConflict, ConfigError, DataContractError, FormatError, StoreUnavailable, TrainingError
from gr_core.stages import gating, ingesting, judging, packing, sequencing
from tasks.encode import encode_bucket
from tasks.evaluate import evaluate
from tasks.gate import gate
from tasks.ingest import ingest
from tasks.pack import write_pack
from tasks.policy import RETRIES, is_transient
from tasks.register import register
from tasks.sequences import build_bucket
from tasks.train import train
from tasks.vocabulary import grow_vocabulary

BODIES = [
    (ingest, ingesting.ingest),
    (build_bucket, sequencing.build_bucket),
    (grow_vocabulary, packing.grow_vocabulary),
    (encode_bucket, packing.encode_bucket),
    (write_pack, packing.write_pack),
    (evaluate, judging.evaluate),
    (register, judging.register),
    (gate, gating.gate),
]


class Outcome:
    """A task's state that ends as told."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def result(self) -> None:
        """Raise the error, as Prefect's states do."""
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(("task", "body"), BODIES, ids=lambda value: getattr(value, "name", ""))
def test_a_task_is_its_stage_function(task: Any, body: Any) -> None:
    """Prefect adds policy and nothing else: the same function runs without it."""
    assert task.fn is body


@pytest.mark.parametrize("task", [task for task, _ in BODIES] + [train], ids=lambda task: task.name)
def test_every_stage_has_a_retry_policy_and_no_cache(task: Any) -> None:
    """Retries are bounded and conditional; idempotence is ours, so Prefect caches nothing."""
    assert task.retries == RETRIES
    assert task.retry_condition_fn is is_transient
    assert type(task.cache_policy).__name__ == "_None"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StoreUnavailable("silent"), True),
        (CommitConflict("lost"), True),
        (DataContractError("bad file"), False),
        (ConfigError("bad key"), False),
        (FormatError("damaged"), False),
        (TrainingError("not finite"), False),
        (ValueError("ours"), False),
        (KeyboardInterrupt(), False),
        (None, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_only_transient_faults_are_retried(error: BaseException | None, expected: bool) -> None:  # noqa: FBT001
    """Silent storage and lost commits are tried again; what trying again would not mend is not."""
    assert is_transient(None, None, Outcome(error)) is expected


@pytest.mark.parametrize("name", ["prefect.flow_runs", "prefect.task_runs"])
@pytest.mark.parametrize(
    ("error", "level", "traced"),
    [
        (DataContractError("no column"), logging.INFO, False),
        (ConfigError("bad key"), logging.INFO, False),
        (ConfigError("bad key"), logging.DEBUG, True),
        (StoreUnavailable("silent"), logging.INFO, True),
        (TrainingError("not finite"), logging.INFO, True),
        (ValueError("ours"), logging.INFO, True),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_a_fault_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, level: int, *, traced: bool
) -> None:
    """What Prefect logs of a run that ended so: the message says all of bad input, of a fault the place is needed."""
    logger, shown = logging.getLogger(name), io.StringIO()
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(shown)])
    monkeypatch.setattr(logger, "propagate", False)
    logger.setLevel(level)
    try:
        raise error
    except type(error) as caught:
        logger.exception("Encountered exception during execution: %r", caught)
    finally:
        logger.setLevel(logging.NOTSET)
    assert str(error) in shown.getvalue()
    assert ("Traceback" in shown.getvalue()) is traced
    assert traced or shown.getvalue().count("\n") == 1
