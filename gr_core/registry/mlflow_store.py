"""The model registry on MLflow 3: one SQLite file and one artifact folder in the home, or a team's own server.

MLflow costs a second to import, so it is imported when a store is opened. Only MlflowClient with explicit URIs is
used, never MLflow's global state: no ./mlruns, nothing in the user's home, whatever the working directory is (B6).

A model is registered in steps that leave no version behind when one fails: the model directory (checkpoint, loader
module, our own code) is built, uploaded as a logged model, read back, compared with the checkpoint's manifest, and
loaded for a forward pass; only then the version is made. Nothing is pickled.
"""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gr_core.errors import FormatError, StoreUnavailable, UsageError
from gr_core.hashing import fingerprint
from gr_core.lake import store
from gr_core.registry import artifacts, database, packaging, relocating, signature
from gr_core.registry.base import (
    DATA,
    PREFIX,
    ModelVersion,
    RunStatus,
    check_files,
    checkpoint_state,
    clean_metrics,
    repair_aliases,
    version_of,
)
from gr_core.registry.database import quiet
from gr_core.registry.recorded import MAX_CHARACTERS as _MAX_VALUE
from gr_core.registry.recorded import run_name

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

LOADER = "gr_core.registry.scorer"
_BATCH = 100

logger = logging.getLogger(__name__)


class MlflowStore:
    """A ModelStore on MLflow.

    Args:
        tracking_uri: sqlite:///<home>/mlflow.db, or a server's URI; tracking and registry both.
        artifact_root: URI of the artifact folder; used when the experiment is made in a database of our own (a
            server decides by itself).
        name: The config's name; experiment and registered model are called daybreak-<name>.

    Raises:
        StoreUnavailable: The server did not answer.
        FormatError: The SQLite file is not a database.
    """

    def __init__(self, tracking_uri: str, artifact_root: str, name: str) -> None:
        from mlflow import MlflowClient  # costs a second, and only nights that register pay it

        self.tracking_uri = tracking_uri
        self._is_server = tracking_uri.startswith(("http://", "https://"))
        self.model = f"daybreak-{name}"
        relocating.follow(tracking_uri, artifact_root, self.model)
        with quiet():
            database.make(tracking_uri, artifact_root)
            self._client: MlflowClient = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
            self.experiment = self._open_experiment(artifact_root)

    def _open_experiment(self, artifact_root: str) -> str:
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_experiment_by_name(self.model)
            if found is not None:
                return str(found.experiment_id)
            location = None if self._is_server else database.location(artifact_root)
            return str(self._client.create_experiment(self.model, artifact_location=location))
        except MlflowException as error:
            if error.error_code == "RESOURCE_ALREADY_EXISTS":  # another process was faster
                return self._open_experiment(artifact_root)
            raise StoreUnavailable(
                f"MLflow at {self.tracking_uri} did not answer: {error}; check MLFLOW_TRACKING_URI",
                where=self.tracking_uri,
            ) from error

    def start_night(self, night: str, *, params: Mapping[str, Any], tags: Mapping[str, Any]) -> str:
        """See ModelStore."""
        run = self._one_run({"night": night, "kind": "night"}, name=run_name(night))
        known = run.data.params
        wanted = {key: str(value)[:_MAX_VALUE] for key, value in params.items()}
        fresh = {key: value for key, value in wanted.items() if key not in known}
        self._log_params(run.info.run_id, fresh)
        changed = {f"changed/{key}": value for key, value in wanted.items() if known.get(key, value) != value}
        self.tag(run.info.run_id, {**tags, **changed})
        return str(run.info.run_id)

    def child(self, run: str, name: str) -> str:
        """See ModelStore."""
        parent = {"mlflow.parentRunId": run}
        return str(self._one_run({"kind": "child", "child": name}, name=name, extra=parent).info.run_id)

    def _one_run(self, tags: Mapping[str, str], *, name: str, extra: Mapping[str, str] | None = None) -> Run:
        """Return the run with these tags, running again; made where there is none."""
        wanted = {**{PREFIX + key: value for key, value in tags.items()}, **(extra or {})}
        if any("'" in value for value in wanted.values()):
            raise UsageError(f"a run's name cannot contain ', got {name!r}", where=name)
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in wanted.items())
        found = self._client.search_runs([self.experiment], query, max_results=1)
        if not found:
            return self._client.create_run(self.experiment, run_name=name, tags=wanted)
        run: Run = found[0]
        if run.info.status != "RUNNING":
            self._client.update_run(run.info.run_id, status="RUNNING")
        return run

    def _log_params(self, run: str, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        rows = [Param(key, value) for key, value in params.items()]
        for start in range(0, len(rows), _BATCH):
            self._client.log_batch(run, params=rows[start : start + _BATCH])

    def log(self, run: str, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """See ModelStore."""
        values, not_numbers = clean_metrics(metrics)
        if step is None:
            known = self._client.get_run(run).data.metrics
            values = {key: value for key, value in values.items() if known.get(key) != value}
        self._log_values(run, [(key, value, step or 0) for key, value in values.items()])
        if not_numbers:
            self.tag(run, {"nan": ", ".join(not_numbers)})

    def log_series(self, run: str, series: Mapping[int, Mapping[str, Any]]) -> None:
        """See ModelStore."""
        cleaned = {step: clean_metrics(metrics) for step, metrics in sorted(series.items())}
        logged = self._client.get_run(run).data.metrics
        known = {
            key: {point.step for point in self._client.get_metric_history(run, key)}
            for key in dict.fromkeys(key for values, _ in cleaned.values() for key in values)
            if key in logged
        }
        points = [(key, value, step) for step, (values, _) in cleaned.items() for key, value in values.items()]
        self._log_values(run, [point for point in points if point[2] not in known.get(point[0], ())])
        not_numbers = sorted({key for _, keys in cleaned.values() for key in keys})
        if not_numbers:
            self.tag(run, {"nan": ", ".join(not_numbers)})

    def _log_values(self, run: str, points: Sequence[tuple[str, float, int]]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)  # MLflow shows it; nothing of ours reads it
        rows = [Metric(key, value, now, step) for key, value, step in points]
        for start in range(0, len(rows), _BATCH):
            self._client.log_batch(run, metrics=rows[start : start + _BATCH])

    def tag(self, run: str, tags: Mapping[str, Any]) -> None:
        """See ModelStore."""
        from mlflow.entities import RunTag

        rows = [RunTag(PREFIX + key, str(value)[:_MAX_VALUE]) for key, value in tags.items()]
        for start in range(0, len(rows), _BATCH):
            self._client.log_batch(run, tags=rows[start : start + _BATCH])

    def log_dataset(self, run: str, table_uri: str, bound: Mapping[str, Any], rows: Mapping[str, int]) -> None:
        """See ModelStore."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = {"path": table_uri, "delta_table_version": bound["delta_version"]}
        profile = {"bound": dict(bound), "rows": dict(rows)}
        dataset = Dataset(
            name=f"events@{bound['delta_version']}",
            digest=fingerprint({**source, **profile}).removeprefix("sha256:")[:16],
            source_type="delta_table",
            source=json.dumps(source),
            profile=json.dumps(profile),
        )
        context = [InputTag("mlflow.data.context", "training")]
        self._client.log_inputs(run, [DatasetInput(dataset, context)])

    def attach(self, night: str, name: str, text: str) -> None:
        """See ModelStore."""
        run = self.run_of(night)
        if run is None:
            raise UsageError(f"night {night} has no run at {self.tracking_uri}; there is nothing to attach {name} to")
        with store.answering(self._client.get_run(run).info.artifact_uri):
            self._client.log_text(run, text, name)

    def run_of(self, night: str) -> str | None:
        """See ModelStore."""
        query = f"tags.`{PREFIX}kind` = 'night' and tags.`{PREFIX}night` = '{night}'"
        found = self._client.search_runs([self.experiment], query, max_results=1)
        return str(found[0].info.run_id) if found else None

    def finish(self, run: str, status: RunStatus) -> None:
        """See ModelStore."""
        query = f"tags.`mlflow.parentRunId` = '{run}' and attributes.status = 'RUNNING'"
        for child in self._client.search_runs([self.experiment], query):
            self._client.set_terminated(child.info.run_id, status)
        self._client.set_terminated(run, status)

    def close_dead(self, *, keep: str | None) -> list[str]:
        """End as KILLED every night's run that still says RUNNING although another night runs now, or none (case B2).

        Args:
            keep: Key of the night that runs; a home runs one night at a time. None: none does.

        Returns:
            Keys of the nights whose runs were ended.
        """
        query = f"tags.`{PREFIX}kind` = 'night' and attributes.status = 'RUNNING'"
        dead = [run for run in self._client.search_runs([self.experiment], query) if _night(run) != keep]
        for run in dead:
            self.finish(run.info.run_id, "KILLED")
        return [_night(run) for run in dead]

    def register(self, run: str, checkpoint: Path, *, night: str, tags: Mapping[str, Any]) -> int:
        """See ModelStore. Measured: 0.4 s the first time in a process, 0.1 s after, for a small checkpoint."""
        state = checkpoint_state(checkpoint)
        wanted = {PREFIX + "night": night, PREFIX + "digest": str(state["digest"])}
        found = self._search(wanted)
        if found:
            return found[0].version
        self._make_model()
        kept = {**{PREFIX + key: str(value)[:_MAX_VALUE] for key, value in tags.items()}, **wanted}
        model = self._client.create_logged_model(self.experiment, name="model", source_run_id=run, tags=kept)
        try:
            self._upload(model.model_id, model.artifact_location, checkpoint, run)
        except BaseException:
            self._client.finalize_logged_model(model.model_id, "FAILED")
            raise
        self._client.finalize_logged_model(model.model_id, "READY")
        # The location itself in a database of our own: for models:/<id>, MLflow 3.17 asks its global tracking URI,
        # which makes an mlflow.db in the working directory.
        source = f"models:/{model.model_id}" if self._is_server else model.artifact_location
        made = self._client.create_model_version(self.model, source, run_id=run, tags=kept, model_id=model.model_id)
        logger.info("night %s registered as %s version %s", night, self.model, made.version)
        return int(made.version)

    def _upload(
        self, model_id: str, location: str, checkpoint: Path, run: str, send: Callable[[str], object] | None = None
    ) -> None:
        """Build the model directory, upload it and check what arrived; `send` uploads a folder, by itself the client."""
        state = checkpoint_state(checkpoint)
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "model"
            with quiet():
                _build(built, checkpoint, state, run=run, model_id=model_id)
            with store.answering(location):
                send(str(built)) if send else self._client.log_model_artifacts(model_id, str(built))
        self._check_upload(location, checkpoint, state)

    def missing(self, version: int, files: Sequence[str]) -> list[str]:
        """See ModelStore; costs two listings."""
        if "pruned" in self.version(version).tags:
            return []
        location = self._location(version)
        with store.answering(location):
            return artifacts.lacks(self._files_at(location), ["MLmodel", *(f"data/{DATA}/{name}" for name in files)])

    def restore(self, version: int, checkpoint: Path) -> None:
        """See ModelStore."""
        known, location = self.version(version), self._location(version)
        if checkpoint_state(checkpoint)["digest"] != known.digest:
            raise FormatError(f"{checkpoint} is not the checkpoint of version {version}", where=location)
        made = self._client.search_logged_models([self.experiment], f"source_run_id = '{known.run}'")
        (model,) = (one.model_id for one in made if one.artifact_location == location)
        # the client remembers where a model of this id lies, in a copied home maybe in the other one
        self._upload(model, location, checkpoint, known.run, send=self._files_at(location).log_artifacts)

    def _make_model(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(self.model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _check_upload(self, location: str, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Read the uploaded model back: every file's SHA-256, then a forward pass from that very copy."""
        from gr_core.registry.fresh import check_forward

        with tempfile.TemporaryDirectory() as folder:
            with store.answering(location):
                copy = artifacts.fetch(self._files_at(location), Path(folder), location)
            check_files(copy, checkpoint)
            check_forward(copy, signature.example(state))

    def _search(self, tags: Mapping[str, str]) -> list[ModelVersion]:
        query = " and ".join([f"name = '{self.model}'", *(f"tag.`{k}` = '{v}'" for k, v in tags.items())])
        return [version_of(found) for found in self._client.search_model_versions(query, max_results=1)]

    def version(self, version: int) -> ModelVersion:
        """See ModelStore."""
        from mlflow.exceptions import MlflowException

        try:
            return version_of(self._client.get_model_version(self.model, str(version)))
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise UsageError(f"there is no version {version} of {self.model}", where="version") from error

    def _files_at(self, location: str) -> Any:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        return get_artifact_repository(location, tracking_uri=self.tracking_uri)

    def _location(self, version: int) -> str:
        source = self.version(version).source
        if source.startswith("models:/"):  # on a server
            source = self._client.get_logged_model(source.removeprefix("models:/")).artifact_location
        return source

    def download(self, version: int, folder: Path) -> Path:
        """See ModelStore."""
        location = self._location(version)
        with store.answering(location):
            return artifacts.fetch(self._files_at(location), folder, location)

    def model_bytes(self, version: int) -> int:
        """See ModelStore."""
        return artifacts.total_bytes(self._files_at(self._location(version)))

    def drop_model(self, version: int, tags: Mapping[str, Any]) -> None:
        """See ModelStore."""
        self._files_at(self._location(version)).delete_artifacts()
        for key, value in tags.items():
            self._client.set_model_version_tag(self.model, str(version), PREFIX + key, str(value))

    def aliases(self) -> dict[str, int]:
        """See ModelStore; asks for the model, since a search for versions gives no aliases (case B1)."""
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_registered_model(self.model).aliases
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return {}
        return {alias: int(version) for alias, version in found.items()}

    def set_alias(self, alias: str, version: int | None) -> None:
        """See ModelStore."""
        if version is None:
            self._client.delete_registered_model_alias(self.model, alias)
        else:
            self._client.set_registered_model_alias(self.model, alias, str(self.version(version).version))

    def repair(self, *, champion: int | None, previous: int | None, challenger: int | None) -> dict[str, int | None]:
        """See ModelStore."""
        return repair_aliases(self, {"champion": champion, "previous": previous, "challenger": challenger})

    def link(self, run: str) -> str:
        """See ModelStore."""
        return f"{self.tracking_uri}#/experiments/{self.experiment}/runs/{run}"

    def model_uri(self, version: int) -> str:
        """Return what mlflow.pyfunc.load_model takes, with this store's tracking URI set."""
        return f"models:/{self.model}/{version}"


def _night(run: Run) -> str:
    return str(run.data.tags[PREFIX + "night"])


def _build(target: Path, checkpoint: Path, state: Mapping[str, Any], *, run: str, model_id: str) -> None:
    """Write the model directory: MLmodel, the checkpoint as data, our packages as code, input example, requirements."""
    import mlflow.pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types.schema import Schema

    frames: Any = importlib.import_module("pandas")  # MLflow's own frame; it has no type stubs
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / DATA
        shutil.copytree(checkpoint, data)
        code = packaging.copy_code(Path(folder))
        described = signature.schema(state)
        mlflow.pyfunc.save_model(
            path=str(target),
            mlflow_model=Model(run_id=run, model_id=model_id),
            loader_module=LOADER,
            data_path=str(data),
            code_paths=code,
            signature=ModelSignature(
                inputs=Schema.from_json(json.dumps(described["inputs"])),
                outputs=Schema.from_json(json.dumps(described["outputs"])),
            ),
            input_example=frames.DataFrame(signature.example(state)),
            pip_requirements=packaging.requirements(),
        )
